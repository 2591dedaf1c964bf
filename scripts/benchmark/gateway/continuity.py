"""``scripts/bench continuity``: what ``--continuity`` costs the gateway's processes, in processor time for a call.

Two gateways stand before one engine, whose template drops reasoning: one with ``--continuity``, one without. Both
get the same calls in turn: conversations of 30,000 tokens that continue, and as many tokens without a history.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from benchmark.campaign import Figures
from benchmark.gateway.servers import CHAT, Server, running
from benchmark.limits import Outcome
from benchmark.machine import describe_machine, disk
from benchmark.measure import percentile
from benchmark.report import as_json, outcome_table, table

_ROLLOUTS: Final = 4
_ABOVE_OFF_MS: Final = 2.0
_WITHOUT_HISTORY: Final = 1.1
_VOCABULARY: Final = 150_000
# Words as long as tokens of English are, with the space.
_SAID: Final = " ".join(f"{number:03}" for number in range(250))
_THOUGHT: Final = " ".join(f"t{number:02}" for number in range(50))
_END: Final = 151_645

_GIVEN: Final = web.AppKey("given", list[bool])

Messages = list[dict[str, Any]]


@lru_cache(maxsize=4096)
def _ids(text: str) -> list[int]:
    """A token a word."""
    return [1_000 + zlib.crc32(word.encode()) % _VOCABULARY for word in text.split()]


def _rendered(messages: Messages, generation: bool) -> list[int]:
    """What the template writes: no reasoning."""
    ids: list[int] = []
    for message in messages:
        ids += [*_ids(message["role"]), *_ids(message["content"]), _END]
    return [*ids, *_ids("assistant")] if generation else ids


async def _tokenize(request: web.Request) -> web.Response:
    question = orjson.loads(await request.read())
    ids = _rendered(question["messages"], question["add_generation_prompt"])
    return _json({"count": len(ids), "max_model_len": 131_072, "tokens": ids, "token_strs": None})


async def _chat(request: web.Request) -> web.Response:
    asked = orjson.loads(await request.read())
    given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
    prompt = given or _rendered(asked["messages"], True)
    request.app[_GIVEN].append(given is not None)
    said = [*_ids(_THOUGHT), *_ids(_SAID), _END]
    entries = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []} for _ in said]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _SAID, "reasoning": _THOUGHT},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": said,
    }
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(said), "completion_tokens": len(said)}
    identity = {"id": f"chatcmpl-{time.monotonic_ns()}", "object": "chat.completion", "created": 1, "model": "policy"}
    return _json({**identity, "choices": [choice], "usage": usage, "prompt_token_ids": prompt})


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@asynccontextmanager
async def _engine(given: list[bool]) -> AsyncIterator[str]:
    """An engine that tells of each chat whether it was given its prompt."""
    app = web.Application(client_max_size=2**26)
    app[_GIVEN] = given
    app.add_routes([web.post("/tokenize", _tokenize), web.post(CHAT, _chat)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class Plan:
    """How long conversations are, in turns and in tokens, and how often each of them asks in one measurement."""

    turns: int
    tokens: int
    calls: int
    repeats: int


@dataclass
class Rollout:
    """A conversation through one gateway."""

    url: str
    messages: Messages

    @classmethod
    def begun(cls, server: Server, name: str, words: int) -> Rollout:
        """A conversation that begins with so many words of a user."""
        system = {"role": "system", "content": "You work on a repository."}
        return cls(server.url + server.path.format(rollout=name), [system, _user(words)])

    async def turn(self, session: aiohttp.ClientSession, words: int) -> None:
        """Ask; the harness gives the answer back without reasoning, and says so many words."""
        body = orjson.dumps({"model": "policy", "messages": self.messages})
        async with session.post(self.url, data=body, headers={"content-type": "application/json"}) as response:
            response.raise_for_status()
            answer = (await response.json())["choices"][0]["message"]
        self.messages += [{"role": "assistant", "content": answer["content"]}, _user(words)]


def _user(words: int) -> dict[str, Any]:
    return {"role": "user", "content": " ".join(f"{number % 1000:03}" for number in range(words))}


class Subject:
    """One of the gateways, with conversations that have a long history."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self._server = server
        self._plan = plan
        self._names = map("without-{}".format, count())
        each = max(1, plan.tokens // plan.turns - len(_SAID.split()) - len(_THOUGHT.split()) - 5)
        self._long = [Rollout.begun(server, f"long-{number}", each) for number in range(_ROLLOUTS)]
        self._each = each
        self._spent: dict[str, list[float]] = {"with history": [], "without history": []}

    async def prepare(self, session: aiohttp.ClientSession) -> None:
        """Play until the histories are long."""
        for rollout in self._long:
            for _ in range(self._plan.turns):
                await rollout.turn(session, self._each)

    async def measure(self, session: aiohttp.ClientSession) -> None:
        """Some calls of each kind, one at a time."""
        for kind, spent in self._spent.items():
            for number in range(_ROLLOUTS * self._plan.calls):
                rollout = self._long[number % _ROLLOUTS]
                if kind == "without history":
                    rollout = Rollout.begun(self._server, next(self._names), self._plan.tokens)
                begun = self._server.running_seconds()
                await rollout.turn(session, 1)
                spent.append(self._server.running_seconds() - begun)
        for rollout in self._long:
            # As long as before: what was measured is taken back, as a harness does that tries again.
            del rollout.messages[-2 * self._plan.calls :]

    def figures(self) -> Mapping[str, Figures]:
        """By kind of call, what the quickest tenth took at most: what else the machine does only adds to it."""
        return {kind: {"cpu_ms_per_call": 1e3 * percentile(spent, 10)} for kind, spent in self._spent.items()}


async def _measured(root: Path, plan: Plan) -> dict[str, Mapping[str, Figures]]:
    given: list[bool] = []
    async with _engine(given) as engine, aiohttp.ClientSession() as session:
        with ExitStack() as stack:
            options = {"off": (), "exact": ("--continuity",)}
            subjects = {}
            for name, more in options.items():
                starting = asyncio.to_thread(stack.enter_context, running("ours", engine, root / name, further=more))
                subjects[name] = Subject(await starting, plan)
            for subject in subjects.values():
                await subject.prepare(session)
            for repeat in range(plan.repeats):
                for subject in [*subjects.values()][:: 1 if repeat % 2 else -1]:
                    await subject.measure(session)
            with_history = _ROLLOUTS * (plan.turns - 1 + plan.repeats * plan.calls)
            if sum(given) != with_history:
                raise RuntimeError(
                    f"{sum(given)} of {with_history} calls were given their prompt, so nothing was measured"
                )
            return {name: subject.figures() for name, subject in subjects.items()}


def judge(cells: Mapping[str, Mapping[str, Figures]], tokens: int) -> Iterator[Outcome]:
    """With continuity against without."""
    on, off = ({kind: one["cpu_ms_per_call"] for kind, one in cells[name].items()} for name in ("exact", "off"))
    subject = f"{tokens:,} tokens"
    for kind in on:
        bound = _WITHOUT_HISTORY if kind == "without history" else None
        yield Outcome("continuity", f"CPU per call {kind}, exact / off", subject, on[kind] / off[kind], False, bound)
    above = on["with history"] - off["with history"]
    yield Outcome("continuity", "CPU per call with history, exact - off, ms", subject, above, False, _ABOVE_OFF_MS)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; returns the exit code."""
    if sys.platform != "linux":
        print("scripts/bench continuity reads /proc, which only Linux has", file=sys.stderr)
        return 2
    made = argparse.ArgumentParser(prog="scripts/bench continuity", description=__doc__)
    made.add_argument("--tokens", type=int, default=30_000, help="of each conversation (default: 30000)")
    made.add_argument("--turns", type=int, default=20, help="of each conversation (default: 20)")
    made.add_argument("--calls", type=int, default=20, help="of each conversation in a measurement (default: 20)")
    made.add_argument("--repeats", type=int, default=4, help="of each gateway, in turn (default: 4)")
    made.add_argument("--trial", action="store_true", help="judge nothing, as when runs are too short for that")
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    options = made.parse_args(arguments)
    plan = Plan(options.turns, options.tokens, options.calls, options.repeats)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as folder:
        machine = describe_machine(Path(folder))
        cells = asyncio.run(_measured(Path(folder), plan))
    outcomes = list(judge(cells, options.tokens))
    if options.trial:
        outcomes = [replace(outcome, bound=None) for outcome in outcomes]
    if options.json:
        print(json.dumps(as_json(machine, {"continuity": cells}, outcomes), indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        rows = [
            [name, *(f"{figures['cpu_ms_per_call']:.2f}" for figures in kinds.values())]
            for name, kinds in cells.items()
        ]
        print(f"\n{table([['CPU per call, ms', *cells['off']], *rows])}\n\n{outcome_table(outcomes)}")
    return int(options.check and any(outcome.holds is False for outcome in outcomes))

"""The share of rollouts that can be trained on, by set-up and policy of ``--continuity``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import tempfile
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from e2e.agents import MODEL
from e2e.cache import Cache, default_cache
from e2e.splices import Checked, check_splices, tapped_url
from e2e.vllm import Vllm
from support.multi_turn import Rollouts, run
from support.replay import serving
from token_id_capture.builder import Trajectory
from token_id_capture.provenance import Policy
from token_id_capture.server.app import create_app
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store import StoreWarning, TokenCaptureStore
from token_id_capture.testing import policy as testing_policy
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import Habits

LARGEST_DIFFERENCE = 1e-4
_PROBLEMS_SHOWN = 3
_PROBLEM_LENGTH = 500
_HEAD = (
    f"{'set-up':<42} {'policy':<9} {'delivered':<22} {'rescored':>8} {'read as sent':>14}"
    "  calls by how their prompt was made"
)
_TEMPLATES = {
    "cutting otherwise": Habits(merges=True),
    "tidying": Habits(tidies=True),
    "dropping reasoning": Habits(reasoning=True),
    "tidying and dropping reasoning": Habits(reasoning=True, tidies=True),
}
_KINDS: dict[str, dict[str, Any]] = {"": {}, ", streamed": {"stream": True}, ", cut off": {"max_tokens": 12}}

Score = Callable[[Trajectory], Awaitable[float]]
"""The largest difference between the log probabilities of a sequence and those of a new scoring of it as a whole."""


@dataclass(frozen=True)
class SetUp:
    """One engine, under the words that describe it."""

    name: str
    url: str
    model: str
    score: Score
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What one policy made of one set-up."""

    set_up: str
    policy: Policy
    rollouts: Rollouts
    difference: float
    splices: Checked

    @property
    def kept(self) -> bool:
        """Whether the policy kept what it promises."""
        whole = self.rollouts.delivered == len(self.rollouts.builds)
        right = self.difference < LARGEST_DIFFERENCE and not self.splices.problems
        return right and (whole or self.policy is not Policy.EXACT)

    def line(self) -> str:
        """A row of the table."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.rollouts.outcomes.items()))
        total = len(self.rollouts.builds)
        share = f"{self.rollouts.delivered} of {total} ({100 * self.rollouts.delivered / total:.1f} %)"
        read = f"{self.splices.calls - len(self.splices.problems)} of {self.splices.calls}"
        return f"{self.set_up:<42} {self.policy.value:<9} {share:<22} {self.difference:8.1e} {read:>14}  {counts}"


def main(description: str, arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=60, help="for each set-up and policy (%(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of each rollout (%(default)s)")
    parser.add_argument("--upstream", metavar="URL", help="a running vLLM in place of the testing engine")
    parser.add_argument("--model", help="the name of its model")
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="install vLLM for CPU (3.5 GB, once), and start it without and with a reasoning parser",
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), metavar="DIR", help="where it is installed (%(default)s)"
    )
    parser.add_argument("--policies", nargs="+", default=[one.value for one in Policy], choices=[*Policy])
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", StoreWarning)
    if (options.upstream is None) != (options.model is None):
        parser.error("--upstream and --model belong together")
    return asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    print(_HEAD)
    kept = True
    async with contextlib.aclosing(_set_ups(options)) as set_ups:
        async for set_up in set_ups:
            for policy in map(Policy, options.policies):
                result = await measured(set_up, policy, options.rollouts, options.turns)
                print(result.line(), *map(_problem, result.splices.problems[:_PROBLEMS_SHOWN]), sep="\n", flush=True)
                kept = kept and result.kept
    return 0 if kept else 1


def _problem(text: str) -> str:
    return f"    {text[:_PROBLEM_LENGTH]}"


async def _set_ups(options: argparse.Namespace) -> AsyncGenerator[SetUp, None]:
    """One after the other, each with its engine running."""
    if options.upstream is not None:
        for set_up in of_vllm(options.upstream, options.model):
            yield set_up
    elif options.vllm:
        async with contextlib.aclosing(_of_started_vllm(Cache(options.cache))) as started:
            async for set_up in started:
                yield set_up
    else:
        for name, habits in _TEMPLATES.items():
            async with serve_engine(PolicyEngine(habits=habits)) as url:
                for kind, more in _KINDS.items():
                    yield SetUp(name + kind, url, "policy", _score_with_policy, more)


async def _of_started_vllm(cache: Cache) -> AsyncGenerator[SetUp, None]:
    servers = {
        "vLLM": "",
        "vLLM, reasoning never shown": "--reasoning-parser qwen3",
        "vLLM, Qwen3's template": _with_reasoning(),
    }
    for number, (name, arguments) in enumerate(servers.items()):
        vllm = Vllm(arguments=arguments)
        vllm.install(cache)
        logs = cache.logs / f"yield-{number}"
        logs.mkdir(exist_ok=True)
        async with vllm.running(cache, logs) as server:
            for set_up in of_vllm(f"http://127.0.0.1:{server.port}", MODEL, name):
                yield set_up


def _with_reasoning() -> str:
    """Arguments of a server whose template drops reasoning: Qwen3's own, from the package that collects templates."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        raise SystemExit("the package trl, which has Qwen3's template, is not installed: run scripts/install")
    template = Path(package.origin).parent / "chat_templates" / "qwen3.jinja"
    return f"--reasoning-parser qwen3 --chat-template {template}"


def of_vllm(url: str, model: str, name: str = "vLLM") -> list[SetUp]:
    """What is measured of a running vLLM."""

    async def score(sequence: Trajectory) -> float:
        body = {
            "model": model,
            "prompt": sequence.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            scored = (await response.json())["choices"][0]["prompt_logprobs"]
        differences = [0.0]
        places = zip(sequence.token_ids, sequence.loss_mask, sequence.log_probs, scored, strict=True)
        for token, trained, captured, entry in places:
            if trained:
                differences.append(abs(captured - entry[str(token)]["logprob"]))
        return max(differences)

    # A seed of the request ends vLLM 0.32 on CPUs in some batches ("CPU Generator does not use offset").
    return [
        SetUp(words, url, model, score, {"seed": None, **more})
        for words, more in (
            (name, {}),
            (f"{name}, streamed", {"stream": True}),
            (f"{name}, cut off", {"max_tokens": 10}),
        )
    ]


async def measured(set_up: SetUp, policy: Policy, rollouts: int, turns: int) -> Result:
    """Play the rollouts through a gateway with this policy, build them, score what is delivered again, and look at
    each spliced call."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "captures.db"
        async with tapped_url(set_up.url) as (upstream, tap):
            app = create_app(
                upstream, TokenCaptureStore(database), engine="vllm", settings=GatewaySettings(continuity=policy)
            )
            async with serving(app) as (url, _), TokenCaptureStore(database) as store:
                found = await run(url, store, rollouts, turns=turns, model=set_up.model, **set_up.options)
    splices = await check_splices(set_up.url, policy, found.entries, tap.exchanges())
    sequences = [build.trajectory() for build in found.builds.values() if build.deliverable]
    differences = [await set_up.score(sequence) for sequence in sequences]
    return Result(set_up.name, policy, found, max(differences, default=0.0), splices)


async def _score_with_policy(sequence: Trajectory) -> float:
    scored = testing_policy.Policy().log_probs_of(sequence.token_ids.tolist())
    pairs = zip(sequence.loss_mask, sequence.log_probs, scored, strict=True)
    return max((abs(captured - again) for trained, captured, again in pairs if trained), default=0.0)

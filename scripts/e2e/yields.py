"""The share of rollouts that can be trained on, by set-up and policy of ``--continuity``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from e2e.agents import MODEL
from e2e.cache import Cache, default_cache
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

    @property
    def kept(self) -> bool:
        """Whether the policy kept what it promises."""
        whole = self.rollouts.delivered == len(self.rollouts.builds)
        return self.difference < LARGEST_DIFFERENCE and (whole or self.policy is not Policy.EXACT)

    def line(self) -> str:
        """A row of the table."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.rollouts.outcomes.items()))
        total = len(self.rollouts.builds)
        share = f"{self.rollouts.delivered} of {total} ({100 * self.rollouts.delivered / total:.1f} %)"
        return f"{self.set_up:<42} {self.policy.value:<9} {share:<22} {self.difference:8.1e}  {counts}"


def main(description: str) -> int:
    """Measure, and print the table."""
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
    parser.add_argument("--policies", nargs="+", default=[one.value for one in Policy], choices=[*Policy])
    options = parser.parse_args()
    warnings.simplefilter("ignore", StoreWarning)
    if (options.upstream is None) != (options.model is None):
        parser.error("--upstream and --model belong together")
    return asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    kept = True
    print(f"{'set-up':<42} {'policy':<9} {'delivered':<22} {'rescored':>8}  calls by how their prompt was made")
    async with _set_ups(options) as set_ups:
        for set_up in set_ups:
            for policy in map(Policy, options.policies):
                result = await measured(set_up, policy, options.rollouts, options.turns)
                print(result.line(), flush=True)
                kept = kept and result.kept
    return 0 if kept else 1


@contextlib.asynccontextmanager
async def _set_ups(options: argparse.Namespace) -> AsyncIterator[list[SetUp]]:
    if options.upstream is not None:
        yield of_vllm(options.upstream, options.model)
        return
    if options.vllm:
        async with contextlib.AsyncExitStack() as stack:
            cache = Cache(default_cache())
            found: list[SetUp] = []
            for name, arguments in (("vLLM", ""), ("vLLM, Qwen3's template", _with_reasoning())):
                vllm = Vllm(arguments=arguments)
                vllm.install(cache)
                logs = cache.logs / f"yield-{len(found)}"
                logs.mkdir(exist_ok=True)
                server = await stack.enter_async_context(vllm.running(cache, logs))
                found += of_vllm(f"http://127.0.0.1:{server.port}", MODEL, name)
            yield found
        return
    async with contextlib.AsyncExitStack() as stack:
        templates = {
            "cutting otherwise": Habits(merges=True),
            "tidying": Habits(tidies=True),
            "dropping reasoning": Habits(reasoning=True),
            "tidying and dropping reasoning": Habits(reasoning=True, tidies=True),
        }
        found = []
        for name, habits in templates.items():
            url = await stack.enter_async_context(serve_engine(PolicyEngine(habits=habits)))
            kinds: dict[str, dict[str, Any]] = {"": {}, ", streamed": {"stream": True}, ", cut off": {"max_tokens": 12}}
            found += [SetUp(name + kind, url, "policy", _score_with_policy, more) for kind, more in kinds.items()]
        yield found


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
    """Play the rollouts through a gateway with this policy, build them, and score what is delivered again."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "captures.db"
        app = create_app(
            set_up.url, TokenCaptureStore(database), engine="vllm", settings=GatewaySettings(continuity=policy)
        )
        async with serving(app) as (url, _), TokenCaptureStore(database) as store:
            found = await run(url, store, rollouts, turns=turns, model=set_up.model, **set_up.options)
    sequences = [build.trajectory() for build in found.builds.values() if build.deliverable]
    differences = [await set_up.score(sequence) for sequence in sequences]
    return Result(set_up.name, policy, found, max(differences, default=0.0))


async def _score_with_policy(sequence: Trajectory) -> float:
    scored = testing_policy.Policy().log_probs_of(sequence.token_ids.tolist())
    pairs = zip(sequence.loss_mask, sequence.log_probs, scored, strict=True)
    return max((abs(captured - again) for trained, captured, again in pairs if trained), default=0.0)

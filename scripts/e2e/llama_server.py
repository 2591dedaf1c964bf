"""llama-server, built from the llama.cpp in the source distribution of llama-cpp-python."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from e2e.agents import MODEL, Attempt
from e2e.cache import Cache, CannotRunError
from e2e.engine import MODEL_FOLDER
from e2e.responses import Json, finish_reasons, is_done, messages_of, parts_of
from e2e.server import Server, free_port, is_healthy, running
from e2e.stories import Act, Kind
from e2e.tap import Exchange
from e2e.witness import Said, Sampled

VERSION = "0.3.36"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_RECIPE = f"llama-cpp-python=={VERSION} {' '.join(_OPTIONS)}"
_START_SECONDS = 120
_SLOTS = 4
_CONTEXT = 1024
_VOCABULARY = 571
_END_OF_TURN = 2


class LlamaServer:
    """One llama-server with the tiny model in float16.

    A token's log probability is computed in a batch of a few when it is sampled, and after a whole
    prompt when it is scored, in different orders of summation: at most 0.005 apart where it was tried.
    """

    name = f"llama-server of llama-cpp-python {VERSION}"
    option = "llama-cpp"
    gateway_options = ("--tokenize-prompts",)
    tolerance = 0.02
    kinds = tuple(Kind)
    acts = tuple(Act)
    # Its own defaults cut the distribution off.
    sampling: Mapping[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    asking: Mapping[str, Json] = {
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 1},
        "/v1/completions": {"logprobs": 1},
    }
    refused: Mapping[str, Any] = {"grammar": "this is not a grammar"}

    def install(self, cache: Cache) -> None:
        """One static executable; the build takes minutes and 2 GB meanwhile."""
        cache.make("llama-server", _RECIPE, partial(_build, cache))

    @asynccontextmanager
    async def running(self, cache: Cache, logs: Path) -> AsyncIterator[Server]:
        """The server with a few slots, each with a context of its own."""
        port = free_port()
        command: list[str | Path] = [
            cache.root / "llama-server" / "llama-server",
            "--model", MODEL_FOLDER / "tiny.gguf", "--alias", MODEL,
            "--host", "127.0.0.1", "--port", str(port), "--offline",
            "--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _CONTEXT), "--threads", "1",
            "--jinja",
        ]  # fmt: skip
        async with running(self.name, command, logs / "llama-server.log", {}, port) as server:
            await server.until(partial(is_healthy, f"http://127.0.0.1:{port}/health"), _START_SECONDS)
            yield server

    def tokenize(self, text: str) -> Json:
        """It reads special tokens in a text only if told to."""
        return {"content": text, "add_special": False, "parse_special": True}

    def ids_of(self, choice: Json) -> list[int]:
        """The entries of log probabilities name them."""
        return [entry["id"] for entry in _entries(choice)]

    async def said(self, session: aiohttp.ClientSession, url: str, exchange: Exchange) -> Said | None:
        """Read the entries of log probabilities; the prompt's ids are the tokenizer's, asked anew.

        Entries are missing for what a stop string cut off, for all tokens of a character but the last,
        and the count is of the first choice alone.
        """
        streamed = exchange.content_type.startswith("text/event-stream")
        if streamed and not is_done(exchange.body):
            return None
        parts = parts_of(exchange.body, streamed)
        prompt = await _prompt(session, url, exchange)
        choices = tuple(
            Sampled(prompt, *_sampled(parts, index), reason) for index, reason in sorted(finish_reasons(parts).items())
        )
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
        counted = sum(len(choice.ids) for choice in choices)
        if counted != usage["completion_tokens"] or len(prompt) != usage["prompt_tokens"]:
            return None
        return Said(exchange.tag, parts[0]["id"], choices, counted)

    def view_problem(self, attempt: Attempt, exchange: Exchange) -> str | None:
        """Byte for byte where nothing had to be changed; else the same message, and no array unasked."""
        streamed = exchange.content_type.startswith("text/event-stream")
        if attempt.asks and attempt.streamed == streamed:
            seen, sent = attempt.body, exchange.body
            same = sent.startswith(seen) if attempt.hung_up else seen == sent
            return None if same else "other bytes than the engine's"
        seen_parts, sent_parts = parts_of(attempt.body, attempt.streamed), parts_of(exchange.body, streamed)
        if not attempt.asks and any(choice.get("logprobs") for part in seen_parts for choice in part["choices"]):
            return "it shows log probabilities that were not asked for"
        if attempt.hung_up and not finish_reasons(seen_parts):
            return None
        if attempt.asks and _all_ids(seen_parts) != _all_ids(sent_parts):
            return "other ids than the engine's"
        same = finish_reasons(seen_parts) == finish_reasons(sent_parts) and _said(seen_parts) == _said(sent_parts)
        return None if same else "another message than the engine's"

    async def score(
        self, session: aiohttp.ClientSession, url: str, ids: Sequence[int], mask: Sequence[int]
    ) -> list[float]:
        """One forward pass for each sampled token, over all that is before it and without the cache."""
        sampled = [at for at, bit in enumerate(mask) if bit]
        found = await asyncio.gather(*(_score(session, url, ids[:at], ids[at]) for at in sampled))
        scores = dict(zip(sampled, found, strict=True))
        return [scores.get(at, 0.0) for at in range(len(ids))]

    def reference_differences(self, cache: Cache, rows: Path) -> list[float]:
        """There is no other implementation here."""
        return []


async def _score(session: aiohttp.ClientSession, url: str, before: Sequence[int], token: int) -> float:
    body = {
        "prompt": list(before),
        "n_predict": 1,
        "n_probs": _VOCABULARY,
        "cache_prompt": False,
        # Any token will do, except part of a character: that would give no entry.
        "logit_bias": [[_END_OF_TURN, 1000]],
    }
    async with session.post(f"{url}/completion", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    alternatives = answer["completion_probabilities"][0]["top_logprobs"]
    found: float = next(entry["logprob"] for entry in alternatives if entry["id"] == token)
    return found


async def _prompt(session: aiohttp.ClientSession, url: str, exchange: Exchange) -> tuple[int, ...]:
    prompt = exchange.sent.get("prompt")
    if isinstance(prompt, list):
        return tuple(prompt)
    if prompt is None:
        chat = {name: value for name, value in exchange.sent.items() if name in ("messages", "tools")}
        prompt = (await _posted(session, f"{url}/apply-template", chat))["prompt"]
    text = {"content": prompt, "add_special": True, "parse_special": True}
    return tuple((await _posted(session, f"{url}/tokenize", text))["tokens"])


async def _posted(session: aiohttp.ClientSession, url: str, body: Json) -> Json:
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        answer: Json = await response.json()
        return answer


def _entries(choice: Json) -> list[Json]:
    return (choice.get("logprobs") or {}).get("content") or []


def _all_entries(parts: list[Json], index: int) -> list[Json]:
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    return [entry for choice in choices for entry in _entries(choice)]


def _sampled(parts: list[Json], index: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    entries = _all_entries(parts, index)
    return tuple(entry["id"] for entry in entries), tuple(entry["logprob"] for entry in entries)


def _all_ids(parts: list[Json]) -> list[int]:
    return [entry["id"] for entry in _all_entries(parts, 0)]


def _said(parts: list[Json]) -> dict[int, Any]:
    """Text and tool calls of each choice."""
    return {
        index: (message.get("content") or "", [call["function"] for call in message.get("tool_calls") or ()])
        for index, message in messages_of(parts).items()
    }


def _build(cache: Cache, folder: Path) -> None:
    """Download, unpack, compile, and keep the executable alone."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise CannotRunError("llama-server must be compiled: install a C++ compiler first, such as g++")
    build = folder / "build"
    python = cache.new_environment(folder / "tools")
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    cache.run("llama-tools", [*pip, "install", "cmake>=3.25", "ninja>=1.11"])
    package = "llama-cpp-python"
    cache.run(
        "llama-download",
        [*pip, "download", "--no-deps", "--no-binary", package, "--dest", folder, f"{package}=={VERSION}"],
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    tools = python.parent
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    cache.run("llama-configure", [tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", ninja, *_OPTIONS])
    # Those that this process may use, so that taskset holds for the build too.
    cores = str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    cache.run("llama-build", [tools / "cmake", "--build", build, "--target", "llama-server", "--parallel", cores])
    shutil.copy2(build / "bin" / "llama-server", folder / "llama-server")
    for part in (build, archive, source.parents[1], folder / "tools"):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()

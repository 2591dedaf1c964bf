"""A task of a harness with a real vLLM, whose tiny model says anything: what it generated is stored as it was sent."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
from e2e.cache import Cache
from e2e.splices import tapped_url
from e2e.tap import Exchange
from e2e.vllm import Vllm
from e2e.witness import Said

from harnessing.programs import Harness
from harnessing.run import ROLLOUT, Result, ended, gateway, place_in
from token_id_capture.lifecycle import MAIN_AGENT
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

_SECONDS: Final = 240
# The instructions and tools of a harness are up to 100,000 tokens of the tiny vocabulary.
_LONGEST: Final = 200_000
_NAMED: Final = "--served-model-name policy"  # as the harnesses that speak chat, whose bytes stay their own, call it
_ENGINE: Final = f"{_NAMED} --max-model-len {_LONGEST} --hf-overrides '{{\"max_position_embeddings\": {_LONGEST}}}'"
_MOST_TOKENS: Final = 48
_CHAT: Final = "/v1/chat/completions"


async def run_real(
    harnesses: Iterable[Harness], programs: Path, cache: Cache, report: Callable[[Result], bool]
) -> list[bool]:
    """Start vLLM, with room for a harness's prompts, and have each harness do a task; what ``report`` says of each.

    Raises:
        CannotRunError: vLLM does not start.
    """
    async with Vllm(arguments=_ENGINE).running(cache, cache.logs) as server:
        engine = f"http://127.0.0.1:{server.port}"
        return [report(await _run(harness, programs, engine)) for harness in harnesses]


async def _run(harness: Harness, programs: Path, engine: str) -> Result:
    """Have a harness do a task. Its exit code is told and not judged: what it makes of such answers is its affair."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "captures.db"
        place = place_in(Path(folder), programs)
        async with tapped_url(engine) as (upstream, tap), aiohttp.ClientSession() as session:
            more = ("--max-tokens", str(_MOST_TOKENS))
            with gateway(upstream, database, harness.history, more=more) as address:
                code, output = await asyncio.to_thread(ended, harness, place, address, seconds=_SECONDS)
            exchanges = [exchange for exchange in tap.exchanges() if exchange.path == _CHAT and not _is_trial(exchange)]
            said = [await Vllm().said(session, engine, one) for one in exchanges if one.whole and one.status == 200]
        async with TokenCaptureStore(database) as store:
            entries = await store.read_entries(ROLLOUT)
            detail = await store.describe_rollout(ROLLOUT)
    problems = [f"it had not ended after {_SECONDS} s"] if code is None else []
    problems += [f"flag {flag.reason}: {flag.detail}" for flag in detail.flags]
    problems += [f"call {intent.model_call_id} is open" for intent in detail.intents if intent.outcome is None]
    problems += _differences(exchanges, said, entries)
    longest = max((len(entry.prompt_token_ids) for entry in entries), default=0)
    name = f"{harness.name} (exit code {code}, longest prompt {longest:,} ids)"
    return Result(name, len(entries), dict(Counter(entry.agent or MAIN_AGENT for entry in entries)), problems, output)


def _is_trial(exchange: Exchange) -> bool:
    """The gateway itself asks for one token, to see what the template takes."""
    return exchange.sent.get("max_tokens") == 1


def _differences(
    exchanges: Sequence[Exchange], said: Sequence[Said | None], entries: Sequence[TokenEntry]
) -> Iterator[str]:
    """Where the entries are not what passed the wire."""
    if not entries:
        yield "no call was captured"
    if broken := sum(not exchange.whole or exchange.status >= 500 for exchange in exchanges):
        yield f"{broken} responses of the engine did not come to their end"
    if refused := [exchange for exchange in exchanges if 400 <= exchange.status < 500]:
        yield f"the engine refused {len(refused)} calls: {refused[0].body.decode(errors='replace')}"
    if None in said:
        yield "a response of the engine does not say all that was sampled"
    stored = {entry.response_id: entry for entry in entries}
    for one in filter(None, said):
        entry = stored.pop(one.response_id, None)
        [sampled] = one.choices
        if entry is None:
            yield f"{one.response_id} was generated and is not stored"
        elif (
            tuple(entry.prompt_token_ids),
            tuple(entry.generation_token_ids),
            tuple(entry.generation_log_probs),
            entry.finish_reason,
        ) != (sampled.prompt, sampled.ids, sampled.log_probs, sampled.finish_reason):
            yield f"{one.response_id} is not stored as the engine sent it"
    yield from (f"{response_id} is stored, and no engine sent it" for response_id in stored)

"""The engine is killed under calls: each must be told as it is, and none may look whole that is not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from e2e.agents import MODEL
from e2e.engine import Engine
from e2e.findings import Findings
from e2e.responses import is_done
from e2e.server import Server
from e2e.tap import TAG_HEADER, Tap
from token_id_capture.store import TokenCaptureStore

_ROLLOUTS = tuple(f"outage-{number}" for number in range(6))
_LONG = {"max_tokens": 600, "ignore_eos": True}
_SECONDS = 60
_PATH = "/v1/completions"


async def check_outage(
    engine: Engine, server: Server, tap: Tap, gateway_url: str, database: Path, findings: Findings
) -> None:
    """Each rollout makes a whole call, one under which the engine is killed, and one when it is gone.

    Half of them ask while the engine stands still, so that it is sure to have answered nothing.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def call(rollout_id: str, **fields: object) -> tuple[int, bytes | None]:
            """Status and body; the body is None if the connection broke."""
            url = f"{gateway_url}/ng-rollout/{rollout_id}/training-token-capture{_PATH}"
            body = {"model": MODEL, "prompt": "A river is", **engine.sampling, **fields}
            async with session.post(
                url, json=body, headers={TAG_HEADER: f"{rollout_id}/{fields['max_tokens']}"}
            ) as response:
                try:
                    return response.status, await response.read()
                except aiohttp.ClientError:
                    return response.status, None

        async def under_way(rollout_ids: tuple[str, ...]) -> list[asyncio.Task[tuple[int, bytes | None]]]:
            """Long calls that have reached the engine."""
            calls = [asyncio.create_task(call(one, stream=_streams(one), **_LONG)) for one in rollout_ids]
            async with asyncio.timeout(_SECONDS):
                for one in rollout_ids:
                    while tap.asked(f"{one}/{_LONG['max_tokens']}".encode()) == 0:  # noqa: ASYNC110 (bytes tell no event)
                        await asyncio.sleep(0.02)
            return calls

        before = await asyncio.gather(*(call(one, max_tokens=4) for one in _ROLLOUTS))
        findings.expect(all(status == 200 for status, _ in before), "outage", f"before it: {before}")
        calls = await under_way(_ROLLOUTS[:3])
        server.signal(signal.SIGSTOP)
        calls += await under_way(_ROLLOUTS[3:])
        server.signal(signal.SIGKILL)
        under = await asyncio.gather(*calls)
        tap.close()
        after = await asyncio.gather(*(call(one, max_tokens=4) for one in _ROLLOUTS))
    findings.expect(all(status == 502 for status, _ in after), "outage", f"after it: {after}")
    async with TokenCaptureStore(database, create=False) as store:
        for rollout_id, (status, body) in zip(_ROLLOUTS, under, strict=True):
            whole = status == 200 and body is not None and (is_done(body) or not _streams(rollout_id))
            await _check(store, rollout_id, whole, findings)


def _streams(rollout_id: str) -> bool:
    return rollout_id[-1] in "135"


async def _check(store: TokenCaptureStore, rollout_id: str, whole: bool, findings: Findings) -> None:
    """Entries for what was whole, one flag and one open intent for what was not, a refused one for the last."""
    detail = await store.describe_rollout(rollout_id)
    broken = [flag.reason for flag in detail.flags]
    outcomes = sorted(str(intent.outcome) for intent in detail.intents)
    found = (len(detail.calls), len(broken), outcomes)
    wanted = (2, 0, ["refused"]) if whole else (1, 1, ["None", "refused"])
    known = set(broken) <= {"lost_stream", "unknown_outcome"}
    findings.expect(found == wanted and known, "outage", f"{rollout_id}: {found} for {broken}, not {wanted}")
    findings.counts["calls_cut_off_by_the_engine"] += not whole

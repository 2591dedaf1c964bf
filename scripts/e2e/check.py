"""The comparisons: stored entries and clients' bytes with the wire, rows with the reference, rows with the engine."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import aiohttp

from e2e.agents import Attempt
from e2e.engine import Engine
from e2e.findings import Findings
from e2e.responses import Json
from e2e.tap import Exchange
from e2e.witness import Outcome, Said, Sampled, Witness
from token_id_capture import TokenEntry

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/completions")


async def witnessed(
    engine: Engine, session: aiohttp.ClientSession, url: str, exchanges: Iterable[Exchange], findings: Findings
) -> tuple[Witness, dict[str, Exchange]]:
    """Sort the exchanges of attempts that could generate."""
    witness, generations = Witness(), dict[str, Exchange]()
    for exchange in exchanges:
        if not exchange.tag or exchange.path not in GENERATION_PATHS:
            continue
        findings.expect(exchange.tag not in generations, "sent once", f"{exchange.tag} reached the engine twice")
        generations[exchange.tag] = exchange
        if exchange.whole and 400 <= exchange.status < 500:
            witness.refused.add(exchange.tag)
        elif not exchange.whole or exchange.status != 200:
            witness.lost.add(exchange.tag)
        elif (said := await engine.said(session, url, exchange)) is None:
            witness.uncountable.add(exchange.tag)
        else:
            witness.said[exchange.tag] = said
    return witness, generations


def check_entries(witness: Witness, entries: Iterable[TokenEntry], findings: Findings) -> None:
    """Each whole response is stored exactly, number for number, and nothing else is."""
    stored: defaultdict[tuple[str, str], list[TokenEntry]] = defaultdict(list)
    for entry in entries:
        stored[entry.rollout_id, entry.response_id or ""].append(entry)
        findings.counts["entries"] += 1
    for said in witness.said.values():
        rollout_id = said.tag.partition("/")[0]
        found = sorted(stored.pop((rollout_id, said.response_id), []), key=lambda entry: entry.model_call_id)
        if findings.expect(len(found) == len(said.choices), "stored", f"{said.tag}: {len(found)} entries"):
            for entry, sampled in zip(found, said.choices, strict=True):
                _check_entry(entry, said, sampled, findings)
    for (rollout_id, response_id), found in stored.items():
        findings.expect(False, "stored", f"{rollout_id}: {len(found)} entries of {response_id!r}, which nobody sent")


def _check_entry(entry: TokenEntry, said: Said, sampled: Sampled, findings: Findings) -> None:
    pairs = (
        ("prompt ids", tuple(entry.prompt_token_ids), sampled.prompt),
        ("generated ids", tuple(entry.generation_token_ids), sampled.ids),
        ("log probabilities", tuple(entry.generation_log_probs), sampled.log_probs),
        ("finish reason", (entry.finish_reason,), (sampled.finish_reason,)),
    )
    for what, stored, sent in pairs:
        findings.expect_same(stored, sent, what, f"{said.tag}: stored what the engine did not send")
    findings.counts["entry_tokens"] += len(sampled.ids)


def check_clients(
    engine: Engine, attempts: Iterable[Attempt], generations: Mapping[str, Exchange], findings: Findings
) -> None:
    """Clients saw the engine's bytes, less what they did not ask for."""
    for attempt in attempts:
        exchange = generations.get(attempt.tag)
        if attempt.status != 200:
            if exchange is not None and attempt.status:
                same = (attempt.status, attempt.body) == (exchange.status, exchange.body)
                findings.expect(same, "client's view", f"{attempt.tag}: another error than the engine's")
            continue
        if exchange is None:
            findings.expect(False, "client's view", f"{attempt.tag}: answered, and the engine was never asked")
            continue
        problem = engine.view_problem(attempt, exchange)
        findings.expect(problem is None, "client's view", f"{attempt.tag}: {problem}")
        findings.counts["client_responses_compared"] += 1


def check_rows(outcomes: Mapping[str, Outcome], rows: Sequence[Json], findings: Findings) -> None:
    """Each rollout has one row, and it is what the reference says."""
    findings.expect(
        sorted(row["rollout_id"] for row in rows) == sorted(outcomes), "rows", "not one row for each rollout"
    )
    for row in rows:
        outcome = outcomes[row["rollout_id"]]
        if row["mask_sample"]:
            reason = str(row["mask_reason"]).partition(":")[0]
            findings.masked[reason] += 1
            wanted = ", ".join(sorted(outcome.reasons)) or "a row to train on"
            findings.expect(
                reason in outcome.reasons, "outcome", f"{row['rollout_id']}: masked for {reason}, not {wanted}"
            )
            findings.expect(not row["token_ids"], "masked row", f"{row['rollout_id']}: it has token ids")
            continue
        findings.counts["delivered"] += 1
        findings.counts["delivered_tokens"] += sum(row["loss_mask"])
        wanted = ", ".join(sorted(outcome.reasons))
        if findings.expect(not outcome.reasons, "outcome", f"{row['rollout_id']}: delivered, not masked for {wanted}"):
            wanted_arrays = (
                ("token_ids", outcome.token_ids),
                ("loss_mask", outcome.loss_mask),
                ("log_probs", outcome.log_probs_beside(row["log_probs"])),
            )
            for name, array in wanted_arrays:
                findings.expect_same(row[name], array, f"row's {name}", row["rollout_id"])


async def check_scores(engine: Engine, session: aiohttp.ClientSession, url: str, row: Json, findings: Findings) -> None:
    """The engine, asked again for the same ids, gives the same log probabilities."""
    ids, mask, log_probs = row["token_ids"], row["loss_mask"], row["log_probs"]
    scores = await engine.score(session, url, ids, mask)
    differences = _differences(scores, mask, log_probs)
    findings.differences += differences
    largest = max(differences, default=0.0)
    findings.expect(largest <= engine.tolerance, "log probabilities", f"{row['rollout_id']}: off by {largest:g}")


async def check_teeth(engine: Engine, session: aiohttp.ClientSession, url: str, row: Json, findings: Findings) -> None:
    """The comparison must notice one other id, and log probabilities that are one place off."""
    ids, mask, log_probs = list(row["token_ids"]), row["loss_mask"], row["log_probs"]
    sampled = [position for position, bit in enumerate(mask) if bit]
    if len(sampled) < 3:
        return
    draw = random.Random(row["rollout_id"])
    position = draw.choice(sampled[:-1])
    ids[position] = draw.choice([other for other in range(3, 500) if other != ids[position]])
    scores = await engine.score(session, url, ids, mask)
    noticed = max(_differences(scores, mask, log_probs)) > engine.tolerance
    findings.expect(noticed, "teeth", f"{row['rollout_id']}: another id at {position} went unnoticed")
    findings.counts["falsified_rows_noticed"] += noticed
    moved = [0.0, *log_probs[:-1]]
    if max(_differences(moved, mask, log_probs)) <= 2 * engine.tolerance:
        return  # a policy so sure of itself that moving its log probabilities changes nothing
    scores = await engine.score(session, url, row["token_ids"], mask)
    noticed = max(_differences(scores, mask, moved)) > engine.tolerance
    findings.expect(noticed, "teeth", f"{row['rollout_id']}: log probabilities one place off went unnoticed")
    findings.counts["falsified_rows_noticed"] += noticed


def _differences(scores: Sequence[float], mask: Sequence[int], log_probs: Sequence[float]) -> list[float]:
    return [abs(score - known) for score, bit, known in zip(scores, mask, log_probs, strict=True) if bit]

"""Sentences about the facts of ``store.health``, each with what to do next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from token_id_capture.cli.output.units import plural, show_bytes, show_duration
from token_id_capture.lifecycle import Outcome

if TYPE_CHECKING:
    from token_id_capture.store.maintain.health import Counted, FileHealth, Health, OpenCall, ServerHealth

_PINNED_WAL_BYTES: Final = 256 * 2**20
_WORTHWHILE_FREE_BYTES: Final = 100 * 2**20


@dataclass(frozen=True)
class Diagnosis:
    """Findings need a person; notes are good to know."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def diagnose(health: Health) -> Diagnosis:
    """What the facts mean."""
    diagnosis = Diagnosis()
    _judge_calls(health, diagnosis)
    _judge_rollouts(health, diagnosis)
    if health.file is not None:
        _judge_file(health.file, diagnosis)
        _judge_space(health.file, diagnosis, anybody_writes=health.anybody_writes)
    if health.server is not None:
        _judge_server(health.server, diagnosis)
    return diagnosis


def _judge_calls(health: Health, diagnosis: Diagnosis) -> None:
    by_fate: dict[str, list[OpenCall]] = {}
    for call in health.open_calls:
        by_fate.setdefault(call.fate, []).append(call)
    # With an outcome on its rollout, somebody has dealt with the loss.
    lost = [call for call in by_fate.get("lost", []) if call.outcome is None]
    if lost:
        processes = {(call.pid, call.host) for call in lost}
        died = ", ".join(f"process {pid} on {host}" for pid, host in sorted(processes)[:3])
        more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
        diagnosis.findings.append(
            f"{plural(len(lost), 'call')} of {_rollouts(lost)} lost: {died}{more} died before tokens were "
            "stored. These rollouts are incomplete and will be masked; run them again under new ids."
        )
    accounted = len(by_fate.get("lost", [])) - len(lost)
    if accounted:
        diagnosis.notes.append(f"{plural(accounted, 'lost call')} in rollouts that were masked or failed already.")
    if unknown := by_fate.get("unknown"):
        hosts = ", ".join(sorted({call.host for call in unknown})[:3])
        diagnosis.findings.append(
            f"{plural(len(unknown), 'call')} of {_rollouts(unknown)} begun where this command cannot see ({hosts}): "
            "run tokcap doctor there, or in the same container, to learn whether the process still runs."
        )
    if overtaken := by_fate.get("overtaken"):
        diagnosis.notes.append(
            f"{plural(len(overtaken), 'call')} of {_rollouts(overtaken)} still open when the rollout was frozen."
        )
    if failed := by_fate.get("failed"):
        diagnosis.notes.append(
            f"{plural(len(failed), 'call')} of {_rollouts(failed)} left without tokens, and flagged: "
            f"{_most_common(Counter(str(call.reason) for call in failed))}."
        )
    if in_flight := by_fate.get("in_flight"):
        oldest = show_duration(health.examined_at - in_flight[0].begun_at)
        diagnosis.notes.append(f"{plural(len(in_flight), 'call')} in flight, the oldest for {oldest}.")


def _judge_rollouts(health: Health, diagnosis: Diagnosis) -> None:
    rollouts = health.rollouts
    waiting = diagnosis.notes if health.anybody_writes else diagnosis.findings
    nobody = "" if health.anybody_writes else ", and no process writes any more"
    if rollouts.open_with_calls.count:
        waiting.append(
            f"{_named(rollouts.open_with_calls)} open with captured calls{nobody}: tokcap finalize freezes and builds "
            f"them."
        )
    if rollouts.open_without_calls.count and not health.anybody_writes:
        waiting.append(
            f"{_named(rollouts.open_without_calls)} open without a captured call{nobody}: "
            "tokcap finalize masks them, and says why."
        )
    if rollouts.frozen_without_outcome.count:
        waiting.append(
            f"{_named(rollouts.frozen_without_outcome)} frozen without an outcome{nobody}: "
            "run tokcap finalize on them again."
        )
    if rollouts.marked_since_delivery.count:
        diagnosis.findings.append(
            f"{_named(rollouts.marked_since_delivery)} marked incomplete after the delivery: what was delivered may "
            "lack a call. tokcap show says which; take the sample out, or finalize the rollout again."
        )
    if rollouts.delivered_not_retired.count:
        diagnosis.notes.append(
            f"{_named(rollouts.delivered_not_retired)} delivered and not retired: tokcap finalize --retire on the "
            f"same files deletes their captures."
        )
    for word, evidence in ((Outcome.MASKED, rollouts.masked), (Outcome.FAILED, rollouts.failed)):
        if evidence.count:
            diagnosis.notes.append(
                f"{_named(evidence)} {word} and kept as evidence ({_most_common(evidence.reasons)}): "
                "tokcap prune --evidence deletes old ones."
            )


def _judge_file(file: FileHealth, diagnosis: Diagnosis) -> None:
    from token_id_capture.store.file.location import is_known, is_refused, is_volatile

    if file.structure_damage:
        diagnosis.findings.append(
            f"the structure of the file is damaged ({file.structure_damage[0]}): back it up, then run tokcap verify "
            "to learn which calls are affected."
        )
    if file.journal_mode != "wal":
        diagnosis.findings.append(
            f"the file is in journal mode {file.journal_mode}, so the store refuses it: another program changed it. "
            "PRAGMA journal_mode = WAL in the sqlite3 shell puts it right."
        )
    if int(file.mode, 8) & 0o077:
        diagnosis.findings.append(
            f"the file has mode {file.mode}, so others than its owner can open it: chmod 600 {file.path}"
        )
    if file.file_system and is_refused(file.file_system):
        diagnosis.findings.append(
            f"the file lies on {file.file_system}, where WAL mode loses data: move it to a local disk."
        )
    if file.file_system and not is_known(file.file_system):
        diagnosis.notes.append(
            f"the file lies on {file.file_system}, which this release does not know: it must be a disk of this machine "
            "that no other machine shares."
        )
    if file.file_system and is_volatile(file.file_system):
        diagnosis.notes.append(f"the file lies on {file.file_system}: a restart of the machine loses it.")
    if file.leftovers:
        diagnosis.notes.append(
            f"{plural(len(file.leftovers), 'file')} of killed backups ({file.leftovers[0]}): the next tokcap backup "
            f"to the same name removes them; you may delete them too."
        )
    if file.wal_reset_bug:
        diagnosis.notes.append(
            f"SQLite {file.sqlite_version} has the WAL-reset bug (fixed in 3.51.3, 3.50.7 and 3.44.6). This package "
            "is safe from it; let no other program, such as litestream, write or checkpoint the file, or run a Python "
            "that has a newer SQLite."
        )


def _judge_server(server: ServerHealth, diagnosis: Diagnosis) -> None:
    if server.problem and not server.standby:
        diagnosis.findings.append(f"a store refuses this server: {server.problem}.")
    if server.standby:
        diagnosis.notes.append("this server is a standby: it can be read, but stores need the primary.")
    if server.settings["full_page_writes"] == "off":
        diagnosis.findings.append(
            "full_page_writes is off there: unless its file system writes pages whole (ZFS does), a loss of power "
            "damages what was acknowledged. Turn it on."
        )
    if server.settings["data_checksums"] == "off":
        diagnosis.notes.append(
            "data_checksums are off there: tokcap verify still finds changed bytes of calls. To protect all tables, "
            "stop the server and turn them on with pg_checksums."
        )


def _judge_space(file: FileHealth, diagnosis: Diagnosis, *, anybody_writes: bool) -> None:
    if file.wal_size > _PINNED_WAL_BYTES:
        why = (
            "a reader that keeps a transaction open pins it; end that process"
            if anybody_writes
            else "no process was left to empty it; the next one that closes the store does"
        )
        diagnosis.findings.append(f"the WAL has grown to {show_bytes(file.wal_size)}: {why}.")
    if file.free_size >= _WORTHWHILE_FREE_BYTES and file.free_size * 4 >= file.size:
        diagnosis.notes.append(
            f"{show_bytes(file.free_size)} of {show_bytes(file.size)} are free pages, which later captures use again: "
            f"tokcap vacuum{'' if file.incremental_vacuum else ' --full'} gives them back."
        )


def _named(counted: Counted) -> str:
    shown = ", ".join(counted.examples)
    more = ", ..." if counted.count > len(counted.examples) else ""
    return f"{plural(counted.count, 'rollout')} ({shown}{more}) {'is' if counted.count == 1 else 'are'}"


def _rollouts(calls: list[OpenCall]) -> str:
    rollouts = {call.rollout_id for call in calls}
    return f"{plural(len(rollouts), 'rollout')} {'was' if len(calls) == 1 else 'were'}"


def _most_common(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason or 'no reason'} {count:,}" for reason, count in reasons.most_common(5))

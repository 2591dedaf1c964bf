"""``tokcap doctor``: what a crash or a long run left behind, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import (
    EXIT_PARTIAL,
    DatabaseOption,
    JsonOption,
    local_time,
    print_json,
    print_line,
)
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.output.units import show_bytes, show_duration
from token_id_capture.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from token_id_capture.cli.output.diagnosis import Diagnosis
    from token_id_capture.store.maintain.health import FileHealth, Health, ServerHealth

_MOST_ROWS = 20
_COLUMN = 11
"""Where the values of the summary begin."""


def doctor(
    database: DatabaseOption,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check the structure of the file, which reads it once.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Explain what a crash or a long run left behind.

    Shows which processes died and which calls they lost, which rollouts wait to be finalized or retired, what is
    kept as evidence, and the state of the file or server. Only reads, even while others write. Exit code 0: no
    findings; 1: there are findings; 2: the database cannot be used.
    """
    from token_id_capture.cli.output.diagnosis import diagnose
    from token_id_capture.store.maintain.health import examine
    from token_id_capture.store.reading import location_of

    health = examine(location_of(database), check_structure=check)
    diagnosis = diagnose(health)
    if json:
        print_json({"findings": diagnosis.findings, "notes": diagnosis.notes, **_facts(health)})
    else:
        _print(health, diagnosis)
    if diagnosis.findings:
        raise typer.Exit(EXIT_PARTIAL)


def _facts(health: Health) -> dict[str, object]:
    return {
        **({"file": health.file} if health.server is None else {"server": health.server}),
        "processes": health.processes,
        "open_calls": health.open_calls,
        "rollouts": health.rollouts,
    }


def _print(health: Health, diagnosis: Diagnosis) -> None:
    for line in _summary(health):
        print_line(line, hanging=_COLUMN)
    _print_calls(health)
    _print_processes(health)
    for title, sentences in (("needs you", diagnosis.findings), ("good to know", diagnosis.notes)):
        if sentences:
            print(f"\n{title}")
        for sentence in sentences:
            print_line(f"- {sentence}")
    if not diagnosis.findings:
        print("\nnothing to do")


def _summary(health: Health) -> list[str]:
    states = health.rollouts.by_state
    counts = [f"{states.get(state, 0):,} {state}" for state in State]
    alive = sum(process.liveness == "alive" for process in health.processes)
    return [
        *(_of_file(health.file) if health.file is not None else _of_server(health.server)),
        f"rollouts   {', '.join(counts)}",
        f"processes  {alive:,} alive, {len(health.processes) - alive:,} gone or elsewhere",
    ]


def _of_server(server: ServerHealth | None) -> Iterator[str]:
    if server is not None:
        settings = ", ".join(f"{name} {value}" for name, value in server.settings.items())
        yield f"database   {server.url}"
        yield (
            f"server     PostgreSQL {server.version}{', a standby' if server.standby else ''}; {settings}; "
            f"{show_bytes(server.size)}, schema {server.schema_revision}"
        )


def _of_file(file: FileHealth) -> list[str]:
    damage = file.structure_damage
    structure = "not checked" if damage is None else "damaged" if damage else "sound"
    return [
        f"database   {file.path}",
        f"file       {show_bytes(file.size)}, {show_bytes(file.free_size)} of it free; WAL "
        f"{show_bytes(file.wal_size)}; mode {file.mode}, on {file.file_system or 'an unknown file system'}, schema "
        f"{file.schema_revision}, SQLite {file.sqlite_version}",
        f"structure  {structure}",
    ]


def _print_calls(health: Health) -> None:
    calls = [call for call in health.open_calls if call.fate not in ("in_flight", "failed")]
    if not calls:
        return
    rows = [
        (
            call.rollout_id,
            call.model_call_id,
            call.fate,
            local_time(call.begun_at),
            call.pid,
            call.host,
            call.outcome or call.rollout_state,
        )
        for call in calls[:_MOST_ROWS]
    ]
    print("\ncalls without tokens")
    print_table(("rollout", "call", "fate", "begun", "by process", "on host", "rollout is"), rows)
    _print_rest(len(calls))


def _print_processes(health: Health) -> None:
    blamed = {call.writer_id for call in health.open_calls}
    processes = [one for one in health.processes if one.writer_id in blamed or one.liveness == "alive"]
    if not processes:
        return
    rows = [
        (
            one.pid,
            one.host,
            one.liveness,
            local_time(one.started_at),
            f"{show_duration(health.examined_at - one.last_seen_at)} ago",
            sum(call.writer_id == one.writer_id for call in health.open_calls),
        )
        for one in processes[:_MOST_ROWS]
    ]
    print("\nprocesses")
    print_table(("process", "host", "is", "started", "last seen", "open calls"), rows)
    _print_rest(len(processes))


def _print_rest(count: int) -> None:
    if count > _MOST_ROWS:
        print(f"and {count - _MOST_ROWS:,} more; --json lists them all")

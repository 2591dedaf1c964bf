"""The findings as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.limits import Cells, Outcome

FIGURES = {
    "calls_per_second": "calls/s",
    "cpu_us_per_call": "CPU per call, us",
    "put_p50_ms": "put p50, ms",
    "put_p99_ms": "put p99, ms",
    "put_max_ms": "put at most, ms",
    "block_ms": "longest block of the loop, ms",
    "memory_mb": "peak memory above inputs, MB",
    "close_ms": "close, ms",
    "disk_kb_per_call": "on disk after close, KB a call",
    "freeze_ms_per_rollout": "freeze, ms a rollout",
    "read_ms_per_rollout": "freeze + build + trajectory, ms",
    "drop_ms_per_rollout": "drop, ms a rollout",
}


def level_tables(cells: Cells) -> Iterator[str]:
    """A table a level: figures by workload and store."""
    for level, workloads in cells.items():
        columns = [(workload, store) for workload, stores in workloads.items() for store in stores]
        heads = [[level], [""]]
        for workload, store in columns:
            first = store == next(iter(workloads[workload]))
            heads[0].append(workload if first else "")
            heads[1].append(store)
        rows = [
            [label, *(_number(workloads[workload][store].get(figure)) for workload, store in columns)]
            for figure, label in FIGURES.items()
            if any(figure in workloads[workload][store] for workload, store in columns)
        ]
        yield table([*heads, *rows])


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """What must be reached: a row a title, a column a subject."""
    subjects = list(dict.fromkeys(outcome.subject for outcome in outcomes))
    rows = [["", *subjects]]
    for title in dict.fromkeys(outcome.title for outcome in outcomes):
        by_subject = {outcome.subject: str(outcome) for outcome in outcomes if outcome.title == title}
        rows.append([title, *(by_subject.get(subject, "") for subject in subjects)])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows[1:] or rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.ljust(width) if column == 0 else text.rjust(width)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_json(machine: Mapping[str, Any], cells: Cells, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Everything, for programs."""
    return {"machine": machine, "levels": cells, "limits": [outcome.json() for outcome in outcomes]}

"""What ``tokcap finalize`` and ``tokcap verify`` counted, in words, and the exit code of the former."""

from __future__ import annotations

from typing import TYPE_CHECKING

from token_id_capture.cli.options import EXIT_PARTIAL
from token_id_capture.cli.output.units import plural

if TYPE_CHECKING:
    from token_id_capture.finalize.totals import Totals
    from token_id_capture.store.maintain.verification import Checked


def exit_code(totals: Totals) -> int:
    """0 if everything was done, 128 + the signal after one, else 1."""
    if totals.signal:
        return 128 + totals.signal
    return 0 if totals.complete else EXIT_PARTIAL


def summary(totals: Totals) -> list[str]:
    """What was done, then why the run stopped and why rows were masked."""
    done = [
        _written(totals),
        *_unless_zero(totals.dropped, "masked and dropped"),
        *_unless_zero(totals.already_there, "there already"),
        *_unless_zero(totals.retired, "retired"),
        *_unless_zero(totals.refused, "refused"),
        *_unless_zero(totals.unknown, "unknown"),
        *_unless_zero(totals.without_record, "without a record"),
        *_unless_zero(totals.before, "left out, opened before --since"),
        *_unless_zero(totals.not_frozen, "not frozen"),
        *_unless_zero(totals.not_retired, "not retired"),
    ]
    return [", ".join(done), *(stopping(totals) if totals.stopped else _histogram(totals))]


def _written(totals: Totals) -> str:
    masked = totals.masked - totals.dropped
    if totals.rows == totals.written:
        return f"{plural(totals.written, 'row')} written, {masked:,} of them masked"
    of = plural(totals.written, "rollout")
    return f"{plural(totals.rows, 'row')} of {of} written, {masked:,} of the rollouts masked"


def stopping(totals: Totals) -> list[str]:
    """Why the run ended early, then the reasons of the masked rows; empty if it did not."""
    return [totals.stopped, *_histogram(totals)] if totals.stopped else []


def _histogram(totals: Totals) -> list[str]:
    """The reasons of the masked rows and the causes of new beginnings, the most frequent first."""
    masked = [f"{count:>6} masked: {reason}" for reason, count in totals.reasons.most_common()]
    return masked + [f"{count:>6} began anew: {cause}" for cause, count in totals.causes.most_common()]


def _unless_zero(count: int, what: str) -> list[str]:
    return [f"{count:,} {what}"] if count else []


def checked_in_words(checked: Checked) -> str:
    """How much was checked."""
    return (
        f"checked {plural(checked.calls, 'call')} of {plural(checked.rollouts, 'rollout')} and "
        f"{plural(checked.snapshot_calls, 'call')} of {plural(checked.snapshots, 'snapshot')}"
    )

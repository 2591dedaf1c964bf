"""Build a frozen rollout: its training sequences, and the reasons why there are none. Pure.

A sequence may be trained on only if it is contiguous, all calls of its agent were captured, one policy
sampled it, and nobody can doubt that its reward belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Self

from token_id_capture import reasons
from token_id_capture.builder import BuildNotes, BuildOutput, Chain, Trajectory, run_builder
from token_id_capture.builder.attribution import Attribution, ScoredAnswer, attribute
from token_id_capture.builder.build import Joined, join
from token_id_capture.builder.causes import Cause
from token_id_capture.builder.masks import (
    IncompleteCapture,
    MainSequence,
    causes_of,
    counted_once,
    main_sequence,
    masked,
    named,
    of_models,
    scored_answer_reasons,
)
from token_id_capture.builder.projections import project_chain_response
from token_id_capture.builder.rows import TrainingRow, empty_row, training_row
from token_id_capture.builder.sequences import Sequence, main_sequence_of, sequences_of
from token_id_capture.errors import InvalidEntryError
from token_id_capture.lifecycle import Outcome, Sequences
from token_id_capture.protocols import TokenCaptureSnapshot

__all__ = [
    "DEFAULT_BUILDER",
    "Build",
    "ScoredAnswer",
    "Sequences",
    "SnapshotRef",
    "TrainingRow",
    "build_snapshot",
    "unneeded_build",
]

DEFAULT_BUILDER: Final = "prefix_merging"

_LISTED_DIVERGENCES: Final = 16


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """Which state of which rollout; what retirement asks for."""

    rollout_id: str
    snapshot_id: str
    version: int


@dataclass(frozen=True)
class Build:
    """What was made of one snapshot.

    ``outcome`` is deliverable, masked or failed: of the main sequence, or with ``wanted`` all of whether one of
    them may be trained on. ``reasons`` has all that apply, the cause before its consequences, each a code of
    ``token_id_capture.reasons`` with its particulars after ``": "``, and is empty if the build is
    deliverable. ``rows`` are the sequences to deliver, masked ones among them with their own reasons; none
    if it is masked as a whole. ``snapshot`` is None if the rollout could not be frozen; its id is empty if
    nobody has seen the rollout. ``output`` has all chains and where each call stands. It is None if the
    calls could not be joined, and ``error`` says why; or if nothing of the snapshot is needed.
    """

    rollout_id: str
    snapshot: SnapshotRef | None
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    output: BuildOutput | None = None
    error: Exception | None = None
    builder: str = DEFAULT_BUILDER
    calls: int = 0
    incomplete: bool = False
    wanted: Sequences = Sequences.MAIN
    rows: tuple[Sequence, ...] = ()
    causes: Mapping[Cause, int] = field(default_factory=dict)
    every: Callable[[], tuple[Sequence, ...]] = field(default=tuple, repr=False, compare=False)

    @classmethod
    def failed(cls, rollout_id: str, reason: str, error: Exception | None = None) -> Self:
        """The build of a rollout without a snapshot; ``reason`` is a code of ``reasons``."""
        return cls(rollout_id, None, Outcome.FAILED, (reason,), error=error)

    def failing(self, reason: str, error: Exception) -> Self:
        """The same build, except that it failed after all."""
        return replace(self, outcome=Outcome.FAILED, reasons=(reason,), error=error)

    @property
    def deliverable(self) -> bool:
        """Whether it may be trained on."""
        return self.outcome is Outcome.DELIVERABLE

    @property
    def is_of_unknown_rollout(self) -> bool:
        """Whether the store has never seen the rollout."""
        return self.snapshot is not None and not self.snapshot.snapshot_id

    @property
    def reason(self) -> str:
        """The code of the first reason; empty if it is deliverable."""
        return reasons.split_reason(self.reasons[0])[0] if self.reasons else ""

    @property
    def explanation(self) -> str:
        """The first reason in words; empty if it is deliverable."""
        if not self.reasons:
            return ""
        code, detail = reasons.split_reason(self.reasons[0])
        return f"{code}: {reasons.BUILD_REASONS[code]}" + (f" ({detail})" if detail else "")

    @property
    def notes(self) -> BuildNotes:
        """What the builder kept, dropped and could not decide; all zero if it failed."""
        return self.output.notes if self.output is not None else BuildNotes(self.builder)

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        """Every sequence of the rollout, the main one first if it is known; computed when it is asked for.

        Each sampled token has its loss in the first sequence that holds it and may be trained on. What came
        after the scored answer is in none.
        """
        return self.every()

    @property
    def main(self) -> Sequence:
        """The first sequence to train on: the main agent's, if that is known.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        row = next((row for row in self.rows if not row.reasons), None)
        if row is None:
            raise InvalidEntryError(f"rollout {self.rollout_id!r} has no sequence to train on: {self.explanation}")
        return row

    @property
    def main_chain(self) -> Chain:
        """The calls of ``main``.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        return self.main.chain

    def trajectory(self) -> Trajectory:
        """``main``, flat.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        return self.main.trajectory()

    def response(self, model: str = "") -> dict[str, Any]:
        """``main``, of the Responses shape; its size grows with the square of the turns.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        return self.response_of(self.main, model)

    def training_rows(self) -> Iterator[TrainingRow]:
        """A row for each of ``rows``, masked ones included; one masked row if the rollout is masked as a whole."""
        for index, row in enumerate(self.rows):
            yield training_row(self.rollout_id, row, index, len(self.rows))
        if not self.rows:
            yield empty_row(self.rollout_id, self.reason)

    def response_of(self, row: Sequence, model: str = "") -> dict[str, Any]:
        """Any sequence, of the Responses shape. Calls without loss carry no token arrays."""
        return project_chain_response(self.rollout_id, row.chain, row.trained, model=model)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Counts for people and databases, all JSON; with ``error`` if the build is not deliverable."""
        notes = self.notes
        quarantined = len(self.output.quarantined) if self.output is not None else 0
        return {
            "n_calls": self.calls,
            "chains": notes.chains,
            "roots": notes.roots,
            "quarantined_calls": quarantined,
            "quarantined_fraction": round(quarantined / self.calls, 4) if self.calls else 0.0,
            "copied_calls": len(notes.copied_calls),
            "empty_generation_calls": len(notes.empty_generation_calls),
            "divergent_prompts": len(notes.divergences),
            **self.token_counts(),
            "sequences": len(self.rows),
            "masked_sequences": sum(bool(row.reasons) for row in self.rows),
            "causes": {cause.value: count for cause, count in sorted(self.causes.items())},
            "capture_incomplete": self.incomplete,
            **({} if self.deliverable else {"error": self.explanation}),
        }

    def token_counts(self) -> dict[str, Any]:
        """How many tokens were sampled, and how many of them have loss in a row that may be trained on."""
        captured, delivered = self.notes.generated_tokens_captured, self.notes.generated_tokens_delivered
        if self.rows:
            trained = (call for row in self.rows if not row.reasons for call in row.trained_calls)
            delivered = sum(len(call.generation_token_ids) for call in trained)
        return {
            "delivered_fraction": round(delivered / captured, 4) if captured else 0.0,
            "generated_tokens_captured": captured,
            "generated_tokens_delivered": delivered,
        }

    def divergences(self) -> list[dict[str, Any]]:
        """Where prompts diverge from earlier calls, at most 16, as JSON."""
        return [asdict(divergence) for divergence in self.notes.divergences[:_LISTED_DIVERGENCES]]

    def details(self) -> dict[str, Any]:
        """What is recorded with the outcome: metrics, reasons, divergences."""
        return {**self.metrics, "reasons": list(self.reasons), "divergences": self.divergences()}


def build_snapshot(
    snapshot: TokenCaptureSnapshot,
    *,
    sequences: Sequences = Sequences.MAIN,
    scored: ScoredAnswer | None = None,
    models: Collection[str] | None = None,
    builder: str = DEFAULT_BUILDER,
) -> Build:
    """Join the calls of a snapshot, and decide what of them may be trained on.

    Never raises on what a snapshot holds: whatever cannot be joined is a failed build with its ``error``.

    Args:
        sequences: which of them ``rows`` of the build has.
        scored: what the finished record says of the answer that was scored.
        models: names, or shell patterns of names, of the models to train; the tokens of others get no loss.
            Without it a sequence of several models is masked.
    """
    ref = SnapshotRef(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
    blank = Build(
        snapshot.rollout_id,
        ref,
        Outcome.FAILED,
        builder=builder,
        calls=len(snapshot.entries),
        incomplete=snapshot.incomplete,
        wanted=sequences,
    )
    try:
        _refuse_foreign(snapshot)
        if builder != DEFAULT_BUILDER:
            run_builder(snapshot.entries, builder).main_chain()  # which says that it is for export alone
        build = _Decision(snapshot, join(snapshot.entries), scored, models).build(blank)
    except Exception as error:
        incomplete = (reasons.CAPTURE_INCOMPLETE,) if snapshot.incomplete else ()
        return replace(
            blank, reasons=(f"{reasons.BUILD_FAILED}: {error or type(error).__name__}", *incomplete), error=error
        )
    return build


class _Decision:
    """What of the joined calls may be trained on."""

    def __init__(
        self,
        snapshot: TokenCaptureSnapshot,
        joined: Joined,
        scored: ScoredAnswer | None,
        models: Collection[str] | None,
    ) -> None:
        self._snapshot = snapshot
        self._joined = joined
        self._models = models
        self._incomplete = IncompleteCapture(snapshot, joined)
        self._attribution = Attribution() if scored is None else attribute(joined, snapshot.entries, scored)
        self._main = main_sequence(joined, self._attribution) if joined.forest.calls else MainSequence(None)

    def build(self, blank: Build) -> Build:
        rows = self._rows(blank.wanted)
        for row in rows:
            row.chain.validate()
        deliverable = any(not row.reasons for row in rows)
        return replace(
            blank,
            outcome=Outcome.DELIVERABLE if deliverable else Outcome.MASKED,
            reasons=() if deliverable else tuple(self._why_masked(blank.wanted, rows)),
            output=self._joined.output,
            rows=rows,
            causes=causes_of(self._joined),
            every=self.every,
        )

    def _why_masked(self, wanted: Sequences, rows: tuple[Sequence, ...]) -> Iterable[str]:
        if wanted is Sequences.ALL and rows:
            return dict.fromkeys(reason for row in rows for reason in row.reasons)
        return self._reasons(rows)

    def _rows(self, wanted: Sequences) -> tuple[Sequence, ...]:
        if wanted is Sequences.ALL:
            return self.every()
        if self._main.call is None:
            return ()
        row = masked(main_sequence_of(self._joined, self._main.call), self._incomplete)
        return tuple(of_models([row], self._models, row))

    def every(self) -> tuple[Sequence, ...]:
        found = sequences_of(self._joined, self._main.call)
        found = [masked(one, self._incomplete, scored_answer_reasons(self._attribution)) for one in found]
        main = found[0] if found and self._main.call is not None else None
        return tuple(counted_once(of_models(found, self._models, main)))

    def _reasons(self, rows: tuple[Sequence, ...]) -> list[str]:
        """Why the main sequence must not be trained on, the cause before its consequences."""
        if rows:
            return list(rows[0].reasons)
        notes = self._joined.output.notes
        found = [reasons.CAPTURE_INCOMPLETE] if self._snapshot.incomplete else []
        if not self._snapshot.entries:
            found.append(reasons.NOTHING_RECORDED)
        elif not self._joined.forest.calls:
            found.append(f"{reasons.EMPTY_GENERATIONS}: {named(notes.empty_generation_calls)}")
        found += self._main.reasons
        return found + ([f"{reasons.ABORTED_CALL}: {named(notes.aborted_calls)}"] if notes.aborted_calls else [])


def _refuse_foreign(snapshot: TokenCaptureSnapshot) -> None:
    foreign = {entry.rollout_id for entry in snapshot.entries} - {snapshot.rollout_id}
    if foreign:
        raise InvalidEntryError(f"the snapshot holds calls of other rollouts: {named(sorted(foreign))}")


def unneeded_build(snapshot: TokenCaptureSnapshot) -> Build:
    """The build of a capture of which nothing is needed, so that it may be retired."""
    ref = SnapshotRef(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
    calls, incomplete = len(snapshot.entries), snapshot.incomplete
    return Build(snapshot.rollout_id, ref, Outcome.DELIVERABLE, calls=calls, incomplete=incomplete)

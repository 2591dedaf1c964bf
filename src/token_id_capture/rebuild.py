"""Build a frozen rollout: a training sequence, or the reasons why there is none. Pure.

A build is deliverable only if the snapshot is complete and its calls form one sequence from one
root, contiguous, with no doubt about which response was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

from token_id_capture import reasons
from token_id_capture.builder import (
    BuildNotes,
    BuildOutput,
    Chain,
    Trajectory,
    project_chain_trajectory,
    project_main_chain_response,
    run_builder,
)
from token_id_capture.errors import InvalidEntryError
from token_id_capture.lifecycle import Outcome
from token_id_capture.protocols import TokenCaptureSnapshot

DEFAULT_BUILDER: Final = "prefix_merging"

_LISTED_DIVERGENCES: Final = 16
_NAMED_CALLS: Final = 8


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """Which state of which rollout; what retirement asks for."""

    rollout_id: str
    snapshot_id: str
    version: int


@dataclass(frozen=True)
class Build:
    """What was made of one snapshot.

    ``outcome`` is deliverable, masked or failed; ``reasons`` has all that apply, the cause before its
    consequences, each a code of ``token_id_capture.reasons`` with its particulars after ``": "``, and is
    empty if the build is deliverable. ``snapshot`` is None if the rollout could not be frozen, or if it
    is one that nobody has seen. ``output`` has all chains and where each call stands. It is None if the
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

    @classmethod
    def failed(cls, rollout_id: str, reason: str, error: Exception | None = None) -> Self:
        """The build of a rollout of which there is no snapshot; ``reason`` as in ``reasons``."""
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

    @property
    def main_chain(self) -> Chain:
        """The chain to train on.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        if not self.deliverable or self.output is None:
            raise InvalidEntryError(f"rollout {self.rollout_id!r} has no sequence to train on: {self.explanation}")
        return self.output.main_chain()

    def trajectory(self) -> Trajectory:
        """The sequence to train on, flat.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        return project_chain_trajectory(self.main_chain)

    def response(self, model: str = "") -> dict[str, Any]:
        """The sequence to train on, of the Responses shape; its size grows with the square of the turns.

        Raises:
            InvalidEntryError: the build is not deliverable.
        """
        chain = self.main_chain
        return project_main_chain_response(self.rollout_id, BuildOutput([chain]), model=model)

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
            "delivered_fraction": notes.delivered_fraction,
            "generated_tokens_captured": notes.generated_tokens_captured,
            "generated_tokens_delivered": notes.generated_tokens_delivered,
            "capture_incomplete": self.incomplete,
            **({} if self.deliverable else {"error": self.explanation}),
        }

    def divergences(self) -> list[dict[str, Any]]:
        """Where prompts diverge from earlier calls, at most 16, as JSON."""
        return [asdict(divergence) for divergence in self.notes.divergences[:_LISTED_DIVERGENCES]]

    def details(self) -> dict[str, Any]:
        """What is recorded with the outcome: metrics, reasons, divergences."""
        return {**self.metrics, "reasons": list(self.reasons), "divergences": self.divergences()}


def build_snapshot(snapshot: TokenCaptureSnapshot, *, builder: str = DEFAULT_BUILDER) -> Build:
    """Join the calls of a snapshot, and decide whether the result may be trained on.

    Never raises on what a snapshot holds: whatever cannot be joined is a failed build with its ``error``.
    """
    calls, incomplete, output = len(snapshot.entries), snapshot.incomplete, None
    ref = SnapshotRef(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
    try:
        output = _joined(snapshot, builder)
        found = _reasons_to_mask(snapshot, output)
        if not found:
            output.main_chain().validate()
    except Exception as error:
        found = [f"{reasons.BUILD_FAILED}: {error or type(error).__name__}"]
        found += [reasons.CAPTURE_INCOMPLETE] if incomplete else []
        return Build(snapshot.rollout_id, ref, Outcome.FAILED, tuple(found), output, error, builder, calls, incomplete)
    outcome = Outcome.MASKED if found else Outcome.DELIVERABLE
    return Build(snapshot.rollout_id, ref, outcome, tuple(found), output, None, builder, calls, incomplete)


def unneeded_build(snapshot: TokenCaptureSnapshot) -> Build:
    """The build of a capture of which nothing is needed, so that it may be retired."""
    ref = SnapshotRef(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
    calls, incomplete = len(snapshot.entries), snapshot.incomplete
    return Build(snapshot.rollout_id, ref, Outcome.DELIVERABLE, calls=calls, incomplete=incomplete)


def _joined(snapshot: TokenCaptureSnapshot, builder: str) -> BuildOutput:
    foreign = {entry.rollout_id for entry in snapshot.entries} - {snapshot.rollout_id}
    if foreign:
        raise InvalidEntryError(f"the snapshot holds calls of other rollouts: {_named(sorted(foreign))}")
    output = run_builder(snapshot.entries, builder)
    if output.chains:
        output.main_chain()  # a builder that makes none is not for delivery, and says so
    return output


def _reasons_to_mask(snapshot: TokenCaptureSnapshot, output: BuildOutput) -> list[str]:
    """Why this must not be trained on, the cause before its consequences; empty: nothing forbids it."""
    notes = output.notes
    found: list[str] = []
    if snapshot.incomplete:
        found.append(reasons.CAPTURE_INCOMPLETE)
    if not snapshot.entries:
        found.append(reasons.NOTHING_RECORDED)
    elif not output.chains:
        found.append(f"{reasons.EMPTY_GENERATIONS}: {_named(notes.empty_generation_calls)}")
    if notes.unresolved_retries:
        found.append(f"{reasons.UNRESOLVED_RETRY}: {_named(notes.unresolved_retries)}")
    if notes.roots > 1:
        first = next((one for one in notes.divergences if one.parent_call_id is None), None)
        found.append(f"{reasons.MULTIPLE_ROOTS}: {notes.roots} roots" + (f"; {first}" if first else ""))
    if notes.chains > max(notes.roots, 1):
        first = next((one for one in notes.divergences if one.parent_call_id is not None), None)
        found.append(f"{reasons.MULTIPLE_CHAINS}: {notes.chains} sequences" + (f"; {first}" if first else ""))
    if notes.aborted_calls:
        found.append(f"{reasons.ABORTED_CALL}: {_named(notes.aborted_calls)}")
    return found


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_CALLS
    return ", ".join(names[:_NAMED_CALLS]) + (f" and {rest} more" if rest > 0 else "")

"""What a page shows, as data: the one form in which the live page asks for it and a file carries it.

Every class here is plain, and becomes JSON field by field; the scripts in ``assets`` read these names. Times are
seconds since the epoch, None where nobody recorded them. Lengths and positions count tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from token_id_capture.explanation import Role
from token_id_capture.lifecycle import Flag, Intent, LateWrite, Outcome, Purpose, State
from token_id_capture.report.alignment import Step
from token_id_capture.report.segments import Part, Segment

if TYPE_CHECKING:
    from token_id_capture.store.read.history import KeptEvidence


class Vocabulary(Protocol):
    """The policy's tokenizer, as far as a page needs it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        ...

    def piece(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; a character may be spread over several tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Said:
    """A part of an answer as the engine parsed it; ``name`` is that of the tool that is called."""

    part: Part
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt does not continue the call that it shares most with; ``looks`` says what that looks like."""

    position: int
    cause: str | None
    looks: str


@dataclass(frozen=True, slots=True)
class CallData:
    """A stored call. ``number`` counts from 1 in the order in which the calls were stored.

    The prompt is made from the sequence (prompt and generation) of the call ``base`` by ``steps``, and from nothing if
    that is None. Only what the steps put in, and what was sampled, is among the tokens of the page, in the order of the
    calls; of a call that is not ``embedded``, not even that. ``segments`` are positions in what is put in, and
    ``answer`` in what was sampled. ``said`` is what the engine made of the answer.
    """

    number: int
    id: str
    role: Role
    parent: int | None
    same_as: int | None
    base: int | None
    steps: tuple[Step, ...]
    prompt: int
    sampled: int
    embedded: bool
    segments: tuple[Segment, ...]
    answer: tuple[Segment, ...]
    said: tuple[Said, ...]
    divergence: Divergence | None
    agent: str | None
    parent_agent: str | None
    purpose: Purpose | None
    model: str
    finish_reason: str | None
    weight_version: str | None
    sampling: Mapping[str, Any]
    log_probs_mode: str | None
    continuity: str | None
    response_id: str | None
    flags: tuple[str, ...]
    begun_at: float | None
    created_at: float | None
    stored_at: float | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Base64 of little-endian numbers: ids (uint32), and log probabilities (float32) of those that were sampled.

    ``texts`` has the piece of each id: a text, or its bytes where they are only part of a character; None
    without a tokenizer.
    """

    ids: str
    log_probs: str
    texts: Mapping[int, str | list[int]] | None


@dataclass(frozen=True, slots=True)
class SequenceData:
    """A path through the tree: its calls by number, from the root on."""

    name: str
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Concern:
    """A call that a finding is about, with its particulars; ``number`` is None if no tokens of it are stored."""

    id: str
    number: int | None
    particulars: str


@dataclass(frozen=True, slots=True)
class FindingData:
    """One reason, what it means, and what to do about it; ``more`` concerns are not listed."""

    reason: str
    what: str
    remedies: tuple[str, ...]
    concerns: tuple[Concern, ...]
    more: int


@dataclass(frozen=True, slots=True)
class OutcomeData:
    """A recorded outcome."""

    version: int
    outcome: Outcome
    reason: str
    recorded_at: float


@dataclass(frozen=True, slots=True)
class RolloutData:
    """One rollout as a whole. ``tone`` names the colour of ``badge``; ``left_out`` calls are too many to embed."""

    id: str
    state: State
    version: int
    snapshot_id: str
    badge: str
    tone: str
    headline: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    opened_at: float
    frozen_at: float | None
    retired_at: float | None
    findings: tuple[FindingData, ...]
    notes: tuple[str, ...]
    calls: tuple[CallData, ...]
    sequences: tuple[SequenceData, ...]
    tokens: Tokens
    left_out: int
    flags: tuple[Flag, ...]
    intents: tuple[Intent, ...]
    outcomes: tuple[OutcomeData, ...]
    late_writes: tuple[LateWrite, ...]
    made_at: float


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """A rollout in a list. ``number`` grows with the time of its opening; the fields that are None are not known."""

    number: int
    id: str
    state: State
    outcome: Outcome | None
    reason: str
    causes: tuple[str, ...]
    calls: int | None
    generated_tokens: int | None
    flags: int
    open_calls: int
    opened_at: float
    reward: float | None
    group: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that matters, and what it is."""

    value: str
    label: str
    note: str


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one kind, one for each label of the plot."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """Bars: over ``time``, or of a distribution. The values of all series of a label are stacked."""

    title: str
    unit: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    note: str = ""
    time: bool = False


@dataclass(frozen=True, slots=True)
class ReasonBar:
    """How often a reason occurred, and its sentence."""

    reason: str
    what: str
    count: int
    note: str


@dataclass(frozen=True, slots=True)
class OverviewData:
    """All rollouts of a database together."""

    summary: str
    tiles: tuple[Tile, ...]
    plots: tuple[Plot, ...]
    reasons: tuple[ReasonBar, ...]
    flags: tuple[ReasonBar, ...]
    kept: tuple[KeptEvidence, ...]
    more_kept: bool
    made_at: float


@dataclass(frozen=True, slots=True)
class PageData:
    """What a page begins with. A live page has nothing of it, and asks for it."""

    database: str
    rollout: RolloutData | None = None
    overview: OverviewData | None = None
    rollouts: tuple[RolloutLine, ...] = ()
    live: bool = False


@dataclass(frozen=True, slots=True)
class LinesPage:
    """Lines of a list; whether there are ``more`` behind them."""

    lines: tuple[RolloutLine, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the server has no answer."""

    error: str

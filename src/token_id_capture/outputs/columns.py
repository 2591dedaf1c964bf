"""The columns of rows that are known beforehand, and what kind of value each column holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from token_id_capture.outputs.shapes import Shape


class Kind(Enum):
    """What a column holds; every kind but the sequences may be null."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    FLAG = "flag"
    SAMPLING = "sampling"
    TURN_SPANS = "turn_spans"
    WEIGHT_SPANS = "weight_spans"
    TOKEN_IDS = "token_ids"
    LOSS_MASK = "loss_mask"
    LOG_PROBS = "log_probs"
    FOUND = "found"
    """What the values themselves are: the column has a ``shape``."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``meaning`` is for people."""

    name: str
    kind: Kind
    meaning: str
    shape: Shape | None = None


_ROLLOUT: Final = (
    Column("rollout_id", Kind.TEXT, "the rollout"),
    Column("snapshot_id", Kind.TEXT, "its snapshot; null if it is not frozen"),
    Column("version", Kind.INTEGER, "the version of the snapshot, or of the open rollout"),
    Column("state", Kind.TEXT, "open or frozen"),
    Column("outcome", Kind.TEXT, "the latest recorded outcome; null if there is none"),
)
_LINEAGE: Final = (
    Column("sequence", Kind.INTEGER, "which of the rollout's sequences, from 0"),
    Column("sequences", Kind.INTEGER, "how many there are; masked ones are left out"),
    Column("parent", Kind.INTEGER, "the sequence that it departs from; null if from none"),
    Column("parent_token", Kind.INTEGER, "the first token, from 0, at which both differ"),
    Column("agent", Kind.TEXT, "who speaks; null if the harness does not tell"),
    Column("purpose", Kind.TEXT, "what for: turn, auxiliary, compaction or prewarm"),
    Column("segment", Kind.INTEGER, "how often the agent's conversation was compacted before"),
    Column("cause", Kind.TEXT, "why the sequence starts anew; null for the first"),
    Column("multimodal", Kind.FLAG, "whether its tokens stand for images, sounds or files too"),
    Column("continuity", Kind.TEXT, "the policy by which prompts were made of earlier tokens; null without"),
)
_SEQUENCE: Final = (
    Column("token_ids", Kind.TOKEN_IDS, "the whole sequence"),
    Column("loss_mask", Kind.LOSS_MASK, "1 where the policy sampled the token, else 0"),
    Column("log_probs", Kind.LOG_PROBS, "log probability of each sampled token; 0.0 elsewhere"),
)

TRAJECTORY_COLUMNS: Final = (
    *_ROLLOUT,
    *_LINEAGE,
    Column("calls", Kind.INTEGER, "calls that the sequence is joined from"),
    Column("model", Kind.TEXT, "the model of the last of them"),
    Column("finish_reason", Kind.TEXT, "why the last answer ended"),
    Column("truncated", Kind.FLAG, "whether a limit cut the last answer off"),
    Column("prompt_length", Kind.INTEGER, "tokens before the first answer"),
    Column("turn_spans", Kind.TURN_SPANS, "each answer: start, end (exclusive), model_call_id, response_id, model"),
    Column("sampling", Kind.SAMPLING, "the last request's parameters; other: those without a field, as JSON text"),
    Column("log_probs_mode", Kind.TEXT, "log probabilities before or after temperature and the like; null if unknown"),
    Column("weight_versions", Kind.WEIGHT_SPANS, "the weights that sampled it: start, end (exclusive), version"),
    Column("created_at", Kind.NUMBER, "when the last call was recorded, in seconds since the epoch"),
    Column("sampled_tokens", Kind.INTEGER, "the number of ones in loss_mask"),
    *_SEQUENCE,
)
CALL_COLUMNS: Final = (
    *_ROLLOUT,
    Column("incomplete", Kind.FLAG, "whether something of the rollout is missing"),
    Column("model_call_id", Kind.TEXT, "the call"),
    Column("model", Kind.TEXT, "its model"),
    Column("weight_version", Kind.TEXT, "the weights that sampled it"),
    Column("finish_reason", Kind.TEXT, "why the generation ended"),
    Column("continuity", Kind.TEXT, "how the prompt was made with --continuity; null without"),
    Column("created_at", Kind.NUMBER, "when it was recorded, in seconds since the epoch"),
    Column("prompt_length", Kind.INTEGER, "tokens of the prompt"),
    Column("generation_length", Kind.INTEGER, "sampled tokens"),
    *_SEQUENCE,
)

"""A row of ``tokcap finalize --format trajectory`` or ``tokcap export``, checked, as trainers' adapters read it.

A row is a mapping, as a JSON line or a Parquet file gives it. Arrays may be lists, packed sequences or
NumPy arrays. ``log_probs[i]`` belongs to ``token_ids[i]``; nothing is shifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

PLACEHOLDER: Final = 0
"""The token id of the two tokens that stand for a row without any; they have no loss."""


@dataclass(frozen=True)
class Row:
    """One training sequence of N tokens, N at least 2, in plain lists.

    ``loss_mask`` is 1 where the policy sampled the token and this row trains it, and ``log_probs`` is 0.0
    elsewhere. A masked row has no loss: what is left of its tokens is context, and a row without tokens
    becomes two placeholders, since several loaders refuse empty sequences.
    """

    token_ids: list[int]
    loss_mask: list[int]
    log_probs: list[float]
    masked: bool
    fields: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, row: Mapping[str, Any], placeholder: int = PLACEHOLDER) -> Self:
        """Check a row and put its arrays into lists of ``int`` and ``float``.

        Raises:
            ValueError: an array is missing, or the arrays have different lengths; the message names
                the rollout.
        """
        missing = [name for name in ("token_ids", "loss_mask", "log_probs") if row.get(name) is None]
        if missing:
            raise ValueError(f"the row of {_named(row)} has no {' and no '.join(missing)}: write it as a trajectory")
        tokens = [int(token) for token in row["token_ids"]]
        mask = [int(bool(one)) for one in row["loss_mask"]]
        log_probs = [float(one) for one in row["log_probs"]]
        if not len(tokens) == len(mask) == len(log_probs):
            raise ValueError(
                f"the row of {_named(row)} has {len(tokens)} token ids, {len(mask)} loss mask values and "
                f"{len(log_probs)} log probabilities: their numbers must be equal"
            )
        masked = bool(row.get("mask_sample") or row.get("mask_reason"))
        if len(tokens) < 2:
            tokens, mask, log_probs, masked = [placeholder] * 2, [0, 0], [0.0, 0.0], True
        if masked:
            mask, log_probs = [0] * len(tokens), [0.0] * len(tokens)
        return cls(tokens, mask, log_probs, masked, row)

    @property
    def prompt_length(self) -> int:
        """The tokens before the first one with loss; without any, all but the last token."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.token_ids) - 1

    @property
    def reward(self) -> float | None:
        """The record's ``reward``; None if it has none."""
        reward = self.fields.get("reward")
        return None if reward is None else float(reward)

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off by a limit of tokens."""
        told = self.fields.get("truncated")
        return self.fields.get("finish_reason") == "length" if told is None else bool(told)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Start and end (exclusive) of each answer that the row holds, in order.

        From ``turn_spans`` where the row has them, else the runs of tokens with loss.
        """
        spans = self.fields.get("turn_spans")
        if spans is not None and len(spans) and not self.masked:
            return [(int(span["start"]), int(span["end"])) for span in spans]
        return self.trained_spans

    @property
    def trained_spans(self) -> list[tuple[int, int]]:
        """Start and end (exclusive) of each run of tokens with loss."""
        edges = [0, *self.loss_mask, 0]
        starts = [at for at in range(len(self.loss_mask) + 1) if edges[at + 1] > edges[at]]
        ends = [at for at in range(len(self.loss_mask) + 1) if edges[at + 1] < edges[at]]
        return list(zip(starts, ends, strict=True))

    @property
    def temperature(self) -> float:
        """The sampling temperature of the request; 1.0 where it set none."""
        sampling = self.fields.get("sampling")
        told = sampling.get("temperature") if isinstance(sampling, Mapping) else None
        return 1.0 if told is None else float(told)

    def versions(self, unknown: int = -1) -> list[int]:
        """The weight version of each token with loss, ``unknown`` elsewhere and where it is not a number."""
        versions = [unknown] * len(self.token_ids)
        for span in self._weight_spans:
            version = str(span["version"])
            number = int(version) if version.lstrip("-").isdecimal() else unknown
            for at in range(int(span["start"]), min(int(span["end"]), len(versions))):
                versions[at] = number if self.loss_mask[at] else unknown
        return versions

    @property
    def weight_versions(self) -> list[str]:
        """The different weight versions of the row's answers, in order."""
        return list(dict.fromkeys(str(span["version"]) for span in self._weight_spans))

    @property
    def _weight_spans(self) -> list[Mapping[str, Any]]:
        spans = self.fields.get("weight_versions")
        return [] if spans is None else list(spans)


def read(rows: Iterable[Mapping[str, Any]], placeholder: int = PLACEHOLDER) -> list[Row]:
    """Each row checked.

    Raises:
        ValueError: as for ``Row.of``.
    """
    return [Row.of(row, placeholder) for row in rows]


def _named(row: Mapping[str, Any]) -> str:
    return f"rollout {row.get('rollout_id')!r}"

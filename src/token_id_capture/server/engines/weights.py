"""Which weights sampled which tokens of a choice, when several parts of its response tell.

A span is ``{"version", "start", "end"}``, in generated tokens and with ``end`` exclusive. Weights may change
while a response is streamed, so neither the first version nor the last stands for the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def only_version(spans: list[Any] | None) -> str | None:
    """The version of the weights, if one made the whole choice."""
    versions = {str(span.get("version")) for span in spans or () if isinstance(span, Mapping)}
    return versions.pop() if len(versions) == 1 else None


def merged_spans(known: list[Any] | None, new: list[Any]) -> list[Any]:
    """The spans after one more part told some: all of them again as they grow, or those that are new in it."""
    if known and new and _place(new[0], "start") >= _place(known[-1], "end") > 0:
        return known + new
    return new


def with_version(
    version: str | None, spans: list[Any] | None, said: str, before: int, after: int
) -> tuple[str | None, list[Any] | None]:
    """The one version or the spans, after a part ``said`` a version with the tokens from ``before`` to ``after``."""
    if spans is None and version in (None, said):
        return said, None
    told = list(spans or [{"version": version, "start": 0, "end": before}])
    if str(told[-1].get("version")) == said:
        told[-1] = {**told[-1], "end": after}
    else:
        told.append({"version": said, "start": before, "end": after})
    told = [span for span in told if span["end"] > span["start"]]
    only = only_version(told)
    return only, told if only is None else None


def _place(span: Any, name: str) -> int:
    place = span.get(name) if isinstance(span, Mapping) else None
    return place if type(place) is int else -1

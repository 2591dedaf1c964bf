"""The content parts of chat messages."""

from __future__ import annotations

from typing import Any


def text_part(text: str) -> dict[str, Any]:
    """A part of text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """A part that shows an image; ``url`` may be a ``data:`` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content that parts make: a plain string for a single text, as templates expect it."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts

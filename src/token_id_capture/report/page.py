"""From data to one self-contained HTML file that loads nothing.

Style and scripts stand in the page, named by their hashes in its content security policy. What comes from the
database is one block of JSON, and the scripts put it into the page as text and never as markup.
"""

from __future__ import annotations

import hashlib
import html
from base64 import b64encode
from functools import cache
from pathlib import Path
from string import Template
from typing import Final

import orjson

from token_id_capture.report.model import PageData

MARK: Final = '<meta name="generator" content="tokcap report">'
"""Stands near the beginning of every page, so that a page can be told from any other file."""

_ASSETS: Final = Path(__file__).with_name("assets")
_SCRIPTS: Final = (
    *("dom.js", "rollout.js", "tokens.js", "search.js", "diff.js", "conversation.js"),
    *("outline.js", "inspector.js", "page.js", "overview.js", "list.js", "live.js", "main.js"),
)


def render(title: str, data: PageData, *, connects: bool = False) -> str:
    """The page. One that ``connects`` may ask the server that it came from, and nobody else."""
    style, script = _asset("style.css"), "\n".join(map(_asset, _SCRIPTS))
    return Template(_asset("page.html")).substitute(
        mark=MARK,
        policy=policy(connects=connects),
        title=html.escape(title),
        style=style,
        script=script,
        data=embedded(data),
    )


def policy(*, connects: bool) -> str:
    """The content security policy of a page."""
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    allowed += ["connect-src 'self'"] if connects else []
    style, script = _asset("style.css"), "\n".join(map(_asset, _SCRIPTS))
    return "; ".join([*allowed, f"style-src '{_hash(style)}'", f"script-src '{_hash(script)}'"])


def as_json(data: object) -> bytes:
    """Data of ``model`` as JSON."""
    return orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)


def embedded(data: object) -> str:
    """The same as it may stand in a script element: nothing in it can end that."""
    return as_json(data).replace(b"<", b"\\u003c").decode()


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


def _hash(text: str) -> str:
    """The form in which a content security policy names an inline style or script."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

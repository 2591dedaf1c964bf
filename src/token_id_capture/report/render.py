"""From page data to HTML. Nothing that comes from the database reaches the page unescaped."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from token_id_capture.report.overview_page import OverviewPage
from token_id_capture.report.rollout_page import RolloutPage, utc

MARK: Final = '<meta name="generator" content="tokcap report">'
"""Stands near the beginning of every page, so that a page can be told from any other file."""

_TEMPLATES: Final = Path(__file__).with_name("templates")
_SCRIPTS: Final = ("sequence.js", "palette.js", "strip.js", "inspector.js", "tokens.js")


def render_rollout(page: RolloutPage) -> str:
    """The page of one rollout."""
    script = _joined(*_SCRIPTS) if page.tokens is not None else ""
    return _render("rollout.html", page, script)


def render_overview(page: OverviewPage) -> str:
    """The page of all rollouts of a database; it needs no script."""
    return _render("overview.html", page, "")


def _render(template: str, page: Any, script: str) -> str:
    style = _joined("style.css")
    sources = {"style-src": style, "script-src": script}
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    policy += [f"{directive} '{_hash(text)}'" for directive, text in sources.items() if text]
    return (
        _environment()
        .get_template(template)
        .render(page=page, style=style, script=script, policy="; ".join(policy), mark=MARK)
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(utc=utc, thousands=lambda number: f"{number:,}")
    return environment


def _visible(value: Any) -> Any:
    """Text with control and direction characters written out: an engine's text must not rearrange the page.

    Each expression of a template passes here before it is escaped; ``Markup`` is what the template
    itself vouches for.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in value
    )


def _joined(*names: str) -> str:
    return "\n".join((_TEMPLATES / name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    """The form in which a content security policy names an inline style or script."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

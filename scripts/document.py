"""What the documentation repeats from the code. ``scripts/document`` writes it; a test compares it.

In README.md and docs/continuity.md a table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from token_id_capture import reasons
from token_id_capture.cli.main import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
CONTINUITY = ROOT / "docs" / "continuity.md"


def readme(text: str) -> str:
    """The README with its generated tables brought up to date."""
    tables = {
        "build reasons": _reasons(reasons.BUILD_REASONS),
        "flag reasons": _reasons(reasons.FLAG_REASONS),
        "release reasons": _reasons(reasons.RELEASE_REASONS),
        "commands": _table(("command", "what it does"), _summaries()),
    }
    return _filled(text, tables)


def continuity(text: str) -> str:
    """The page on continuity with its table of reasons brought up to date."""
    return _filled(text, {"continuity reasons": _reasons(reasons.CONTINUITY_REASONS)})


def _filled(text: str, tables: Mapping[str, str]) -> str:
    for name, table in tables.items():
        block = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        # Not as a template, in which a backslash of the table would mean something.
        text, found = block.subn(partial(_block, table), text)
        if found != 1:
            raise ValueError(f"the page has {found} blocks {name!r} instead of one")
    return text


def _block(table: str, block: re.Match[str]) -> str:
    return f"{block[1]}{table}{block[2]}"


def commands() -> str:
    """The page of all commands and their options."""
    sections = [_section(name, command) for name, command in all_commands().items()]
    return "\n".join(("# The commands of tokcap\n", "Written by `scripts/document` from `tokcap --help`.\n", *sections))


def all_commands() -> dict[str, Any]:
    """The commands by name."""
    group: Any = typer.main.get_command(app)
    return dict(sorted(group.commands.items()))


def options_of(command: Any) -> Iterable[Any]:
    """Its parameters, without --help."""
    return (parameter for parameter in command.params if parameter.name != "help")


def _reasons(table: Mapping[str, str]) -> str:
    return _table(("reason", "what it means"), ((f"`{reason}`", text) for reason, text in table.items()))


def _summaries() -> Iterable[tuple[str, str]]:
    for name, command in all_commands().items():
        yield f"[`tokcap {name}`](docs/commands.md#tokcap-{name})", _paragraphs(command)[0]


def _section(name: str, command: Any) -> str:
    parameters = list(options_of(command))
    arguments = "".join(f" {_shown(parameter)}" for parameter in parameters if _is_argument(parameter))
    rows = ((f"`{_names(parameter)}`", _described(parameter)) for parameter in parameters)
    text = "\n\n".join(_paragraphs(command))
    table = _table(("argument or option", "what it does"), rows)
    return f"## tokcap {name}\n\n`tokcap {name}{arguments} [OPTIONS]`\n\n{text}\n\n{table}"


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(command.help).split("\n\n")]


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _shown(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.rpartition("_")[2].upper())


def _names(parameter: Any) -> str:
    if _is_argument(parameter):
        return _shown(parameter)
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {_shown(parameter)}"


def _described(parameter: Any) -> str:
    notes = []
    if parameter.envvar:
        notes.append(f"`{parameter.envvar}`")
    if parameter.required:
        notes.append("required")
    elif _is_argument(parameter):
        notes += [f"default `{parameter.default}`"] if parameter.default is not None else []
    elif parameter.is_flag:
        notes += [f"default `{parameter.opts[0]}`"] if parameter.default else []
    elif parameter.default not in (None, ""):
        notes.append(f"default `{getattr(parameter.default, 'value', parameter.default)}`")
    return " ".join(filter(None, (parameter.help, f"({', '.join(notes)})" if notes else "")))


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *((_cell(left), _cell(right)) for left, right in rows)]
    return "".join(f"| {left} | {right} |\n" for left, right in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    COMMANDS.parent.mkdir(exist_ok=True)
    README.write_text(readme(README.read_text("utf-8")), "utf-8")
    COMMANDS.write_text(commands(), "utf-8")
    CONTINUITY.write_text(continuity(CONTINUITY.read_text("utf-8")), "utf-8")
    print(f"wrote {README.name}, {COMMANDS.relative_to(ROOT)} and {CONTINUITY.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

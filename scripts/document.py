"""What the documentation repeats from the code, and the schema of a new file. ``scripts/document`` writes both; tests
compare them.

On a page of ``pages`` a table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
from sqlalchemy import create_engine

from token_id_capture import reasons
from token_id_capture.cli.main import app
from token_id_capture.cli.serving.settings import PREFIX
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store.file.migrate import upgrade

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMMANDS = DOCS / "commands.md"
SCHEMA = ROOT / "migrations" / "sqlite" / "schema.sql"

_SCHEMA_HEAD = """\
-- A new file of the newest revision. Written by scripts/document from the migrations: change those.
"""

# What the migrations put into an empty file.
_SCHEMA_ROWS = """\
INSERT INTO numbers (n)
    WITH RECURSIVE counter(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM counter WHERE n < 1023) SELECT n FROM counter;
INSERT INTO capture_file (file_id, made_at)
    VALUES (lower(hex(randomblob(16))), (julianday('now') - 2440587.5) * 86400.0);
"""

_ALL_COMMANDS = """\
Every command that works on a database takes `--database PATH` (`-d`, or `TOKCAP_DATABASE`): a file, a directory that
holds `token_captures.db`, or an `sqlite:///` URL. Results go to standard output, everything else to standard error.
Exit code 1 means that some of the work could not be done, 2 that nothing could. `TOKCAP_DEBUG=1` shows the traceback of
an error.
"""


def pages() -> dict[Path, str]:
    """The pages with tables among their text, brought up to date."""
    tables = {
        "reasons.md": {
            "build reasons": _reasons(reasons.BUILD_REASONS),
            "flag reasons": _reasons(reasons.FLAG_REASONS),
            "release reasons": _reasons(reasons.RELEASE_REASONS),
        },
        "configuration.md": {"settings": _table(("variable", "default", "what it does"), _settings())},
        "continuity.md": {"continuity reasons": _reasons(reasons.CONTINUITY_REASONS)},
    }
    return {DOCS / name: _filled((DOCS / name).read_text("utf-8"), filling) for name, filling in tables.items()}


def _settings() -> Iterable[tuple[str, str, str]]:
    for name, field in GatewaySettings.model_fields.items():
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "" if default in (None, "") else f"`{getattr(default, 'value', default)}`"
        yield f"`{PREFIX}{name.upper()}`", shown, str(field.description)


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
    return "\n".join(
        (
            "# The commands of tokcap\n",
            "Written by `scripts/document` from `tokcap --help`.\n",
            _table(("command", "what it does"), _summaries()),
            _ALL_COMMANDS,
            *sections,
        )
    )


def schema() -> str:
    """The statements that make what the migrations make one after the other."""
    with create_engine("sqlite://").begin() as connection:
        upgrade(connection)
        made = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        statements = "".join(f"{statement};\n" for statement in made.scalars())
        (revision,) = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars()
    return f"{_SCHEMA_HEAD}{statements}{_SCHEMA_ROWS}INSERT INTO alembic_version (version_num) VALUES ('{revision}');\n"


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
        yield f"[`tokcap {name}`](#tokcap-{name})", _paragraphs(command)[0]


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


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(_cell, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    written = {**pages(), COMMANDS: commands(), SCHEMA: schema()}
    for page, text in written.items():
        page.write_text(text, "utf-8")
    print(f"wrote {', '.join(str(page.relative_to(ROOT)) for page in written)}")


if __name__ == "__main__":
    main()

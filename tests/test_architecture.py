"""The direction of imports, read from the source. A lower room never knows a higher one.

::

    {errors, reasons} <- tokens <- records <- protocols <- config <- {builder, sink, store}
        <- {consumer, server} <- {delivery, explanation, testing} <- {browse, export, finalize, report}
        <- {cli, integrations} <- __main__
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import token_id_capture

PACKAGE = Path(token_id_capture.__file__).parent
NAME = token_id_capture.__name__

TIERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "reasons"}),
    frozenset({"tokens"}),
    frozenset({"records"}),
    frozenset({"protocols"}),
    frozenset({"config"}),
    frozenset({"builder", "sink", "store"}),
    frozenset({"consumer", "server"}),
    frozenset({"delivery", "explanation", "testing"}),
    frozenset({"browse", "export", "finalize", "report"}),
    frozenset({"cli", "integrations"}),
    frozenset({"__main__"}),
)
TIER_OF = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}

ROOT = "__init__"

# Third parties that may be imported when a module of the room is imported. Inside a function
# anything may be imported that its room may use at all.
HEAVY = {
    "aiohttp": {"server", "testing"},
    "aiosqlite": {"store"},
    "alembic": {"store"},
    "datasette": {"browse"},
    "jinja2": {"report"},
    "nemo_gym": {"integrations"},
    "prometheus_client": {"server"},
    "pyarrow": {"export"},
    "pydantic_settings": {"server", "cli"},
    "rich": {"cli"},
    "sqlalchemy": {"store"},
    "starlette": {"server", "testing"},
    "tokenizers": {"cli"},
    "typer": {"cli"},
    "uvicorn": {"server", "testing", "cli"},
}

# Only a process that works on the file itself opens a store.
MAY_IMPORT_STORE = {"browse", "cli", "consumer", "export", "finalize", "integrations", "report", "store", ROOT}

# An import of the store when a module is imported would make the package heavy, so these import it
# inside a function.
LAZY_STORE = {
    "consumer": "reads the local directory of a configuration only where one is given",
    ROOT: "the store's names load on first use",
}

LONGEST_FILE = 400


class Import(NamedTuple):
    """One import statement: who imports which module, where, and whether only inside a function."""

    room: str
    target: str
    place: str
    lazy: bool
    typing_only: bool

    @property
    def target_room(self) -> str:
        """The room of this package that is imported; empty for a third party."""
        head, _, rest = self.target.partition(".")
        return (rest.partition(".")[0] or ROOT) if head == NAME else ""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[Import]:
    package = [NAME, *path.relative_to(PACKAGE).parent.parts]

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                parent = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*parent, *([child.module] if child.module else [])])
                # "from token_id_capture import store" names a room as an imported name.
                targets = [f"{module}.{alias.name}" if module == NAME else module for alias in child.names]
            for target in targets:
                place = f"{path.relative_to(PACKAGE)}:{child.lineno}"
                yield Import(room_of(path), target, place, lazy, typing_only)
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, lazy or in_function, typing_only or for_types)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [found for path in sources() for found in imports_of(path)]


def test_the_reader_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "server").mkdir()
    path = tmp_path / "server" / "app.py"
    path.write_text(
        "import token_id_capture.store.file.connections\n"
        "from token_id_capture import store\n"
        "from ..store import codec\n"
        "if TYPE_CHECKING:\n    from token_id_capture.store import TokenCaptureStore\n"
        "def f():\n    from token_id_capture.store.schema import metadata\n"
    )
    found = list(imports_of(path))
    assert [one.target_room for one in found] == ["store"] * 5
    assert [one.lazy for one in found] == [False, False, False, False, True]
    assert [one.typing_only for one in found] == [False, False, False, True, False]


def test_every_file_belongs_to_a_room() -> None:
    assert {room_of(path) for path in sources()} - {ROOT} <= set(TIER_OF)


def test_the_rooms_are_drawn_as_they_are() -> None:
    drawn = " <- ".join(f"{{{', '.join(sorted(tier))}}}" if len(tier) > 1 else next(iter(tier)) for tier in TIERS)
    contributing = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    for text in (__doc__, contributing):
        assert drawn in " ".join(text.split())


def test_a_room_imports_only_rooms_below_it(imports: list[Import]) -> None:
    breaches = [
        f"{one.place}: {one.room} imports {one.target_room}"
        for one in imports
        if one.target_room
        and one.room != ROOT
        and one.target_room != one.room
        and (one.target_room not in TIER_OF or TIER_OF[one.target_room] >= TIER_OF[one.room])
    ]
    assert not breaches


def test_only_some_rooms_open_a_store(imports: list[Import]) -> None:
    breaches = [
        one.place
        for one in imports
        if one.target_room == "store" and not one.typing_only and one.room not in MAY_IMPORT_STORE
    ]
    assert not breaches


def test_the_store_is_imported_lazily_where_the_package_stays_light(imports: list[Import]) -> None:
    breaches = [
        one.place
        for one in imports
        if one.target_room == "store" and one.room in LAZY_STORE and not (one.lazy or one.typing_only)
    ]
    assert not breaches


def test_heavy_packages_stay_in_their_rooms(imports: list[Import]) -> None:
    breaches = [
        f"{one.place}: {one.target}"
        for one in imports
        if one.room not in HEAVY.get(one.target.partition(".")[0], {one.room}) and not one.typing_only
    ]
    assert not breaches


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text("utf-8").splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}

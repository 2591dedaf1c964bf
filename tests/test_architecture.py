"""The direction of imports, read from the source. A lower package never knows a higher one.

::

    {collector, errors, lifecycle, provenance, reasons, recent} <- tokens <- records <- protocols <- config
        <- {builder, capture, store}
        <- {outputs, rebuild, server, sink} <- integrations <- consumer <- {delivery, explanation, testing}
        <- {export, finalize, report} <- {hand_off, view} <- browse <- cli <- __main__

Inside the three largest packages the same holds::

    store: driver <- {file, outcome_order, sequence_walk, server_url} <- {codec, schema} <- read <- write <- backend
        <- {local, postgres} <- reading <- {maintain, store} <- copying
    server: {defaults, text} <- {dialects, engines, settings} <- wire <- http
        <- {continuity, listener, middleware, prompt_ids, stream, tracing, upstreams} <- call
        <- {gateway, translation} <- {app, check}
    cli: options <- {output, serving} <- {commands, demo} <- main
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import token_id_capture

PACKAGE = Path(token_id_capture.__file__).parent
NAME = token_id_capture.__name__

TIERS: tuple[frozenset[str], ...] = (
    frozenset({"collector", "errors", "lifecycle", "provenance", "reasons", "recent"}),
    frozenset({"tokens"}),
    frozenset({"records"}),
    frozenset({"protocols"}),
    frozenset({"config"}),
    frozenset({"builder", "capture", "store"}),
    frozenset({"outputs", "rebuild", "server", "sink"}),
    frozenset({"integrations"}),
    frozenset({"consumer"}),
    frozenset({"delivery", "explanation", "testing"}),
    frozenset({"export", "finalize", "report"}),
    frozenset({"hand_off", "view"}),
    frozenset({"browse"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
TIER_OF = {package: tier for tier, packages in enumerate(TIERS) for package in packages}

# The same inside a package, of its sub-packages and modules. A new one gets its place here and in CONTRIBUTING.
INNER_TIERS: dict[str, tuple[frozenset[str], ...]] = {
    "store": (
        frozenset({"driver"}),
        frozenset({"file", "outcome_order", "sequence_walk", "server_url"}),
        frozenset({"codec", "schema"}),
        frozenset({"read"}),
        frozenset({"write"}),
        frozenset({"backend"}),
        frozenset({"local", "postgres"}),
        frozenset({"reading"}),
        frozenset({"maintain", "store"}),
        frozenset({"copying"}),
    ),
    "server": (
        frozenset({"defaults", "text"}),
        frozenset({"dialects", "engines", "settings"}),
        frozenset({"wire"}),
        frozenset({"http"}),
        frozenset({"continuity", "listener", "middleware", "prompt_ids", "stream", "tracing", "upstreams"}),
        frozenset({"call"}),
        frozenset({"gateway", "translation"}),
        frozenset({"app", "check"}),
    ),
    "cli": (
        frozenset({"options"}),
        frozenset({"output", "serving"}),
        frozenset({"commands", "demo"}),
        frozenset({"main"}),
    ),
}

ROOT = "__init__"

# Third parties that may be imported when a module of the package is imported. Inside a function
# anything may be imported that its package may use at all.
HEAVY = {
    "aiohttp": {"hand_off", "server", "testing"},
    "aiosqlite": {"store"},
    "alembic": {"store"},
    "datasette": {"browse"},
    "fsspec": {"outputs"},
    "nemo_gym": {"integrations"},
    "prometheus_client": {"server"},
    "psycopg": {"store"},
    "pyarrow": {"outputs"},
    "pydantic_settings": {"server", "cli"},
    "rich": {"cli"},
    "sqlalchemy": {"store"},
    "starlette": {"hand_off", "server", "testing", "view"},
    "tokenizers": {"cli"},
    "torch": {"export"},
    "typer": {"cli"},
    "uvicorn": {"server", "testing", "cli"},
}

# Only a process that works on the file itself opens a store.
MAY_IMPORT_STORE = {
    *("browse", "cli", "consumer", "export", "finalize", "hand_off", "integrations", "report", "store", "view", ROOT),
}

# An import of the store when a module is imported would make the package heavy, so these import it
# inside a function.
LAZY_STORE = {
    "consumer": "reads the local directory of a configuration only where one is given",
    ROOT: "the store's names load on first use",
}

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
MOST_FILES = 12

# The commands of the command line are as many as they are, and so are the modules that users import by name.
ANY_NUMBER_OF_FILES = {".", "cli/commands"}


class Import(NamedTuple):
    """One import statement: who imports which module, where, and whether only inside a function."""

    importer: str
    target: str
    place: str
    lazy: bool
    typing_only: bool

    @property
    def package(self) -> str:
        """The package or module at the top that has the statement."""
        return _part(self.importer, 1)

    @property
    def target_package(self) -> str:
        """The same of what is imported; empty for a third party."""
        return _part(self.target, 1) if self.target.partition(".")[0] == NAME else ""


def _part(module: str, depth: int) -> str:
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else ROOT


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join([NAME, *(parts[:-1] if parts[-1] == ROOT else parts)])


def imports_of(path: Path) -> Iterator[Import]:
    package = [NAME, *path.relative_to(PACKAGE).parent.parts]

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            targets: list[str] = []
            line = getattr(child, "lineno", 0)
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                parent = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*parent, *([child.module] if child.module else [])])
                # "from token_id_capture import store" names a module as an imported name.
                targets = [
                    f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module
                    for alias in child.names
                ]
            for target in targets:
                place = f"{path.relative_to(PACKAGE)}:{line}"
                yield Import(module_of(path), target, place, lazy, typing_only)
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, lazy or in_function, typing_only or for_types)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def _is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return name.startswith(f"{NAME}.") and (path.is_dir() or path.with_suffix(".py").is_file())


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file by its place, and how many lines it has."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield f"{path.relative_to(PACKAGE)}:{node.name}", node.end_lineno - node.lineno + 1


def drawn(tiers: tuple[frozenset[str], ...]) -> str:
    return " <- ".join(f"{{{', '.join(sorted(tier))}}}" if len(tier) > 1 else next(iter(tier)) for tier in tiers)


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
    (tmp_path / "store").mkdir()
    found = list(imports_of(path))
    assert [one.package for one in found] == ["server"] * 5
    assert [one.target_package for one in found] == ["store"] * 5
    assert [one.lazy for one in found] == [False, False, False, False, True]
    assert [one.typing_only for one in found] == [False, False, False, True, False]


def test_every_file_has_its_place() -> None:
    names = [module_of(path) for path in sources()]
    assert {_part(name, 1) for name in names} - {ROOT} <= set(TIER_OF)
    for package, tiers in INNER_TIERS.items():
        inside = {_part(name, 2) for name in names if _part(name, 1) == package}
        assert inside - {ROOT} == set().union(*tiers)


def test_the_packages_are_drawn_as_they_are() -> None:
    contributing = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    for text in (__doc__, contributing):
        assert drawn(TIERS) in " ".join(text.split())
        for package, tiers in INNER_TIERS.items():
            assert f"{package}: {drawn(tiers)}" in " ".join(text.split())


def test_a_package_imports_only_packages_below_it(imports: list[Import]) -> None:
    breaches = [
        f"{one.place}: {one.package} imports {one.target_package}"
        for one in imports
        if one.target_package
        and one.package != ROOT
        and one.target_package != one.package
        and (one.target_package not in TIER_OF or TIER_OF[one.target_package] >= TIER_OF[one.package])
    ]
    assert not breaches


@pytest.mark.parametrize("package", INNER_TIERS)
def test_a_sub_package_imports_only_what_is_below_it(package: str, imports: list[Import]) -> None:
    tier_of = {part: tier for tier, parts in enumerate(INNER_TIERS[package]) for part in parts}
    inside = [
        (one.place, _part(one.importer, 2), _part(one.target, 2))
        for one in imports
        if one.package == one.target_package == package
    ]
    assert inside
    breaches = [
        f"{place}: {importer} imports {target}"
        for place, importer, target in inside
        if importer != ROOT and importer != target and not (target in tier_of and tier_of[target] < tier_of[importer])
    ]
    assert not breaches


def test_no_command_imports_a_command(imports: list[Import]) -> None:
    commands = f"{NAME}.cli.commands."
    breaches = [one.place for one in imports if one.importer.startswith(commands) and one.target.startswith(commands)]
    assert not breaches


def test_imports_have_no_circles(imports: list[Import]) -> None:
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.target_package and one.importer != NAME:
            graph.setdefault(one.importer, set()).add(one.target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_some_packages_open_a_store(imports: list[Import]) -> None:
    breaches = [
        one.place
        for one in imports
        if one.target_package == "store" and not one.typing_only and one.package not in MAY_IMPORT_STORE
    ]
    assert not breaches


def test_the_store_is_imported_lazily_where_the_package_stays_light(imports: list[Import]) -> None:
    breaches = [
        one.place
        for one in imports
        if one.target_package == "store" and one.package in LAZY_STORE and not (one.lazy or one.typing_only)
    ]
    assert not breaches


def test_heavy_libraries_stay_in_their_packages(imports: list[Import]) -> None:
    breaches = [
        f"{one.place}: {one.target}"
        for one in imports
        if one.package not in HEAVY.get(one.target.partition(".")[0], {one.package}) and not one.typing_only
    ]
    assert not breaches


def test_no_file_is_too_long_to_read() -> None:
    tests = Path(__file__).parent.rglob("*.py")
    lengths = {str(path): len(path.read_text("utf-8").splitlines()) for path in (*sources(), *tests)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_a_function_fits_on_a_screen() -> None:
    lengths = dict(found for path in sources() for found in functions_of(path))
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in sources() if path.stem != ROOT)
    crowded = {name: count for name, count in folders.items() if count > MOST_FILES}
    assert crowded.keys() <= ANY_NUMBER_OF_FILES

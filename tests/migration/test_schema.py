"""The migrations give exactly the tables of ``store.schema``, and nothing opens what it does not know."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from support.frozen import FOLDER, frozen
from token_id_capture.errors import NewerSchemaError, UnusableDatabaseError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.migrate import migrations_directory, upgrade
from token_id_capture.store.file.revision import APPLICATION_ID, HEAD_REVISION
from token_id_capture.store.schema import metadata


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    return ScriptDirectory.from_config(config)


@pytest.fixture
async def migrated(tmp_path: Path) -> Path:
    """A new file, as the store makes it."""
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        return store.database


@contextlib.contextmanager
def stock(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def schema_of(path: Path, *types: str) -> dict[str, str]:
    """The statements that made the objects of these types, without their layout."""
    with stock(path) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {
        name: re.sub(r"\s*([(),])\s*", r"\1", re.sub(r"\s+", " ", statement)).strip()
        for kind, name, statement in rows
        if kind in types and name != "alembic_version"
    }


def test_alembic_finds_no_difference(migrated: Path) -> None:
    engine = create_engine(f"sqlite:///{migrated}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_the_statements_are_those_that_the_metadata_gives(migrated: Path, tmp_path: Path) -> None:
    created = tmp_path / "created.db"
    engine = create_engine(f"sqlite:///{created}")
    metadata.create_all(engine)
    engine.dispose()
    assert schema_of(migrated, "table", "index") == schema_of(created, "table", "index")


def test_every_table_is_strict(migrated: Path) -> None:
    with stock(migrated) as connection:
        strict = dict(connection.execute("SELECT name, strict FROM pragma_table_list WHERE type = 'table'").fetchall())
    assert {name for name in metadata.tables if not strict[name]} == set()


def test_a_new_file_is_what_all_migrations_make_one_after_the_other(migrated: Path, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'upgraded.db'}")
    with engine.begin() as connection:
        upgrade(connection)
    engine.dispose()

    def content(path: Path) -> tuple[object, ...]:
        with stock(path) as connection:
            made = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name")
            schema = made.fetchall()
            tables = {name for kind, name, _, _ in schema if kind == "table"} - {"capture_file", "writers"}
            rows = {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in tables}
            file = "SELECT length(file_id), abs(made_at - strftime('%s', 'now')) < 3600, copied_from FROM capture_file"
            return schema, rows, connection.execute(file).fetchall()

    assert content(migrated) == content(tmp_path / "upgraded.db")


def test_two_new_files_have_identities_of_their_own(tmp_path: Path) -> None:
    async def identity(path: Path) -> str | None:
        async with TokenCaptureStore(path) as store:
            return store.file_id

    first, second = (asyncio.run(identity(tmp_path / name)) for name in ("one.db", "two.db"))
    assert first is not None
    assert first != second


def test_the_head_is_the_revision_that_the_store_asks_for() -> None:
    assert scripts().get_heads() == [HEAD_REVISION]


def test_revisions_are_numbered_in_their_order() -> None:
    # The store tells a newer file from an older one by comparing them as text.
    revisions = [script.revision for script in scripts().walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)
    assert all(re.fullmatch(r"\d{4}", revision) for revision in revisions)


def test_the_file_says_whose_it_is(migrated: Path) -> None:
    with stock(migrated) as connection:
        pragmas = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in
                   ("application_id", "page_size", "auto_vacuum", "journal_mode")]  # fmt: skip
        assert pragmas == [APPLICATION_ID, 4096, 2, "wal"]
        assert connection.execute("SELECT count(*), min(n), max(n) FROM numbers").fetchone() == (1024, 0, 1023)


def test_a_file_of_a_newer_release_is_refused(migrated: Path) -> None:
    with stock(migrated) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = migrated.read_bytes()
    expected = f"captures.db has schema 9999, and this release knows schemas up to {HEAD_REVISION}: upgrade"
    for refusing in (TokenCaptureStore.open, TokenCaptureStore.list_rollouts):
        with pytest.raises(NewerSchemaError, match=expected):
            asyncio.run(using(migrated, refusing))
    assert migrated.read_bytes() == before


async def using(path: Path, method: Callable[[TokenCaptureStore], Awaitable[object]]) -> None:
    store = TokenCaptureStore(path)
    try:
        await method(store)
    finally:
        await store.close()


@pytest.mark.parametrize("statement", ["CREATE TABLE things (thing)", "CREATE TABLE alembic_version (version_num)"])
def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "things.db"
    with stock(path) as connection:
        connection.execute(statement)
    before = path.read_bytes()
    with pytest.raises(UnusableDatabaseError, match=r"things\.db is an SQLite database of another program"):
        asyncio.run(using(path, TokenCaptureStore.open))
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


def test_every_released_schema_has_its_file() -> None:
    revisions = {script.revision for script in scripts().walk_revisions()}
    assert {name.name.removesuffix(".db.gz") for name in FOLDER.iterdir()} == revisions


def test_the_newest_file_has_the_newest_schema(migrated: Path, tmp_path: Path) -> None:
    # Were a released revision edited, files in the field would differ from new ones: write a new revision.
    everything = ("table", "index", "view", "trigger")
    assert schema_of(frozen(HEAD_REVISION, tmp_path), *everything) == schema_of(migrated, *everything)

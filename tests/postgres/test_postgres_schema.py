"""A database on a server has the tables of a file, and its migrations give exactly those of ``postgres.schema``."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from support.captured import entry
from support.postgres import PostgresServer
from token_id_capture.errors import NewerSchemaError, UnusableDatabaseError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.postgres.schema import LOCAL_TABLES, postgres_metadata
from token_id_capture.store.schema import metadata


def sqlalchemy_url(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:", 1)


async def opened(url: str, *, create: bool = True) -> None:
    async with TokenCaptureStore(url, create=create):
        pass


def test_alembic_finds_no_difference(postgres_url: str) -> None:
    engine = create_engine(sqlalchemy_url(postgres_url))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), postgres_metadata()) == []
    engine.dispose()


def test_every_table_and_column_of_a_file_is_there(postgres_url: str) -> None:
    engine = create_engine(sqlalchemy_url(postgres_url))
    found = inspect(engine)
    for table in metadata.sorted_tables:
        if table.name not in LOCAL_TABLES:
            columns = {column["name"] for column in found.get_columns(table.name)}
            assert {column.name for column in table.columns} <= columns, table.name
    engine.dispose()


def test_every_key_begins_with_the_rollout(postgres_url: str) -> None:
    engine = create_engine(sqlalchemy_url(postgres_url))
    found = inspect(engine)
    keys = {name: found.get_pk_constraint(name)["constrained_columns"] for name in found.get_table_names()}
    unique = [one["column_names"] for name in keys for one in found.get_indexes(name) if one["unique"]]
    engine.dispose()
    of_database = {"alembic_version", "capture_file", "weight_version", "writers"}
    assert {name for name, key in keys.items() if key[0] != "rollout_id"} == of_database
    assert unique == []


def test_a_new_database_is_at_the_head(postgres: PostgresServer, postgres_url: str) -> None:
    with postgres.admin(postgres_url.partition("?")[0].rpartition("/")[2]) as admin:
        assert admin.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD_REVISION,)]


def test_several_processes_may_create_it_at_once(postgres: PostgresServer) -> None:
    url = postgres.url(postgres.new_database())

    async def together() -> None:
        await asyncio.gather(*(opened(url) for _ in range(6)))

    asyncio.run(together())
    asyncio.run(opened(url, create=False))


def test_what_is_not_there_or_not_ours_is_refused(postgres: PostgresServer) -> None:
    name = postgres.new_database()
    with pytest.raises(UnusableDatabaseError, match=f"no capture database at .*{name}"):
        asyncio.run(opened(postgres.url(name), create=False))
    with postgres.admin(name) as admin:
        admin.execute("CREATE TABLE alembic_version (version_num TEXT)")
        with pytest.raises(UnusableDatabaseError, match="tables of another program"):
            asyncio.run(opened(postgres.url(name)))
        admin.execute("DROP TABLE alembic_version")
        asyncio.run(opened(postgres.url(name)))
        admin.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(NewerSchemaError, match="has schema 9999"):
        asyncio.run(opened(postgres.url(name)))


def test_a_role_that_owns_no_table_captures_and_cannot_let_evidence_go(
    postgres: PostgresServer, postgres_url: str
) -> None:
    async def capture(url: str) -> None:
        async with TokenCaptureStore(url) as store:
            await store.put(entry("r", "c", [1], [2]))
            await store.mark_incomplete("r", "c", "capture_failed")
            snapshot = await store.freeze("r")
            await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", "capture_incomplete")
            assert not await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    refused = {
        "UPDATE snapshots SET incomplete = 0": "immutable",
        "DELETE FROM snapshot_entries": "evidence",
        "DELETE FROM snapshots": "evidence",
        "INSERT INTO snapshot_flags (rollout_id, snapshot_id, version, model_call_id, reason, detail, flagged_at) "
        "SELECT rollout_id, snapshot_id, version, '', '', '', 0 FROM snapshots": "immutable",
        "UPDATE build_outcomes SET outcome = 'delivered'": "append-only",
        "DELETE FROM build_outcomes": "kept for as long",
        "TRUNCATE snapshots CASCADE": "permission denied",
        "ALTER TABLE snapshots DISABLE TRIGGER ALL": "must be owner",
    }
    with postgres.admin(postgres_url.partition("?")[0].rpartition("/")[2]) as admin:
        admin.execute(
            "CREATE ROLE capture; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO capture"
        )
        try:
            asyncio.run(capture(f"{postgres_url}&options=-crole%3Dcapture"))
            with pytest.raises(psycopg.Error, match="are evidence"):
                admin.execute("TRUNCATE snapshots CASCADE")
            admin.execute("SET ROLE capture")
            for statement, reason in refused.items():
                with pytest.raises(psycopg.Error, match=reason):
                    admin.execute(statement.encode())
        finally:
            admin.execute("RESET ROLE; DROP OWNED BY capture; DROP ROLE capture")

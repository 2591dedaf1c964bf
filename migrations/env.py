"""How alembic reaches a capture database.

The store passes an open connection, with its gate held and a write transaction begun. A developer
passes a file: ``alembic -x database=captures.db upgrade head`` (no other process may use it then).
"""

from alembic import context
from sqlalchemy import Connection, create_engine

from token_id_capture.store.schema import metadata


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


connection = context.config.attributes.get("connection")
if connection is not None:
    _migrate(connection)
else:
    database = context.get_x_argument(as_dictionary=True).get("database")
    if not database:
        raise SystemExit("name the database: alembic -x database=PATH ...")
    with create_engine(f"sqlite:///{database}").begin() as own_connection:
        _migrate(own_connection)

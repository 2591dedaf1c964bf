"""The URL of a PostgreSQL server, which may hold a password. The standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from token_id_capture.errors import UnusableDatabaseError

_SCHEMES: Final = ("postgresql", "postgres")
_EXAMPLE: Final = "postgresql://user@host:5432/database"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A database on a server. As text it has neither password nor options."""

    conninfo: str = field(repr=False)
    """What libpq takes: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING"""
    shown: str
    """User, host, port and database: for people, logs and messages."""
    secrets: tuple[str, ...] = field(repr=False, default=())
    """What no message may hold."""

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """The name of the database."""
        return self.shown.rpartition("/")[2]

    def without_secrets(self, text: str) -> str:
        """The text of an error without what is secret in the URL."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def is_server_url(database: object) -> bool:
    """Whether this names a database on a server, and not a file."""
    return isinstance(database, ServerUrl) or (isinstance(database, str) and _scheme(database) in _SCHEMES)


def server_url(database: str | ServerUrl) -> ServerUrl:
    """The database that a URL names.

    Raises:
        UnusableDatabaseError: it cannot be read, and the message does not repeat it; or psycopg is not installed.
    """
    if isinstance(database, ServerUrl):
        return database
    if find_spec("psycopg") is None:
        raise UnusableDatabaseError("a database on a server needs psycopg: pip install 'token-id-capture[postgres]'")
    try:
        url = urlsplit(database)
        if url.netloc.count("@") > 1 or "@" in url.path or ("@" in url.query and "@" not in url.netloc):
            # libpq would take a part of the password for a host, and name it.
            raise ValueError("a special character")
        return ServerUrl(f"postgresql:{database.partition(':')[2]}", _shown(url), _secrets(url))
    except ValueError:
        raise UnusableDatabaseError(
            f"the URL of the database cannot be read: write it as {_EXAMPLE}, and encode special characters, as %40 "
            "instead of @ in a password"
        ) from None


def _scheme(text: str) -> str:
    # The driver is psycopg, whether SQLAlchemy's form of the URL says so or not.
    return text.partition("://")[0].lower().removesuffix("+psycopg") if "://" in text else ""


def _shown(url: SplitResult) -> str:
    options = parse_qs(url.query)
    user, host = url.username or _first(options, "user"), url.hostname or _first(options, "host")
    port = url.port or _first(options, "port")
    database = unquote(url.path).removeprefix("/") or _first(options, "dbname")
    return f"postgresql://{f'{unquote(user)}@' if user else ''}{host}{f':{port}' if port else ''}/{database}"


def _first(options: dict[str, list[str]], name: str) -> str:
    return options.get(name, [""])[0]


def _secrets(url: SplitResult) -> tuple[str, ...]:
    options = parse_qs(url.query)
    found = [url.password or "", *(word for name in ("password", "sslpassword") for word in options.get(name, []))]
    return tuple(sorted({form for word in found if word for form in (word, unquote(word))}, key=len, reverse=True))

"""What a gateway worker must know, as environment variables that begin with ``TOKCAP_``."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from token_id_capture.cli.options import LogFormat
from token_id_capture.server.wire.entries import SESSION_HEADERS
from token_id_capture.server.wire.request import Streaming

_PREFIX = "TOKCAP_"


class GatewaySettings(BaseSettings):
    """Times are in seconds, the body limit in bytes; ``server.gateway`` and ``server.upstream`` say what they do."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True)

    upstream: str
    database: str
    engine: str = "auto"
    body_limit: int = Field(default=64 * 2**20, gt=0)
    client_timeout: float = Field(default=300.0, gt=0, le=86_400)
    drain_seconds: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    connect_timeout: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    read_timeout: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    log_probs_mode: str | None = None
    streaming: Streaming = "auto"
    tokenize_prompts: bool = False
    session_headers: str = ",".join(SESSION_HEADERS)
    api_key_file: str | None = None
    upstream_api_key_file: str | None = None
    max_concurrent_calls: int = Field(default=4096, ge=0)
    log_format: LogFormat = "text"
    access_log: bool = False

    @field_validator("session_headers")
    @classmethod
    def _no_secrets(cls, names: str) -> str:
        secret = {"authorization", "cookie", "proxy-authorization", "x-api-key"} & set(header_names(names))
        if secret:
            raise ValueError(f"{', '.join(sorted(secret))} would be stored in the database for all who can read it")
        return names

    def as_environment(self) -> dict[str, str]:
        """The variables from which a worker reads the same settings."""
        values = self.model_dump(exclude_none=True)
        return {f"{_PREFIX}{name.upper()}": str(value) for name, value in values.items()}


def header_names(names: str) -> tuple[str, ...]:
    """Header names that are separated by commas, in lower case."""
    return tuple(name for name in (part.strip().lower() for part in names.split(",")) if name)

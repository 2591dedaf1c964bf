"""What a gateway worker must know, as environment variables that begin with ``TOKCAP_``."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from token_id_capture.cli.common import LogFormat

_PREFIX = "TOKCAP_"


class GatewaySettings(BaseSettings):
    """Times are in seconds, the body limit in bytes; ``server.gateway`` and ``server.upstream`` say what they do."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True)

    upstream: str
    database: str
    engine: str = "auto"
    body_limit: int = Field(default=64 * 2**20, gt=0)
    drain_seconds: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    connect_timeout: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    read_timeout: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    log_probs_mode: str | None = None
    api_key_file: str | None = None
    upstream_api_key_file: str | None = None
    max_concurrent_calls: int = Field(default=4096, ge=0)
    log_format: LogFormat = "text"
    access_log: bool = False

    def as_environment(self) -> dict[str, str]:
        """The variables from which a worker reads the same settings."""
        values = self.model_dump(exclude_none=True)
        return {f"{_PREFIX}{name.upper()}": str(value) for name, value in values.items()}

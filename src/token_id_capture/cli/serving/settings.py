"""What a worker of ``tokcap serve`` must know, as environment variables that begin with ``TOKCAP_``."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from token_id_capture.cli.options import LogFormat
from token_id_capture.server.defaults import ENGINE
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store.file.location import FREE_SPACE_FLOOR

PREFIX: Final = "TOKCAP_"


class WorkerSettings(BaseSettings, GatewaySettings):
    """The gateway's settings, and what only the command line has: addresses, files and logs."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    upstream: Annotated[tuple[str, ...], NoDecode]
    database: str
    database_id: str | None = None
    free_space_floor: int = Field(default=FREE_SPACE_FLOOR, ge=0)
    engine: str = ENGINE
    api_key_file: str | None = None
    upstream_api_key_file: str | None = None
    hand_off_key_file: str | None = None
    operator_key_file: str | None = None
    log_format: LogFormat = "text"
    access_log: bool = False

    @field_validator("upstream", mode="before")
    @classmethod
    def _addresses(cls, addresses: Any) -> Any:
        return tuple(addresses.split()) if isinstance(addresses, str) else tuple(addresses)

    def as_environment(self) -> dict[str, str]:
        """The variables from which a worker reads the same settings."""
        values = self.model_dump(exclude_none=True)
        for name in ("session_headers", "allowed_hosts"):
            values[name] = ",".join(values[name])
        values["upstream"] = " ".join(values["upstream"])
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}

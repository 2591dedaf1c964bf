"""The configuration block ``token_id_capture``. Plain data: reading it opens no file and no socket.

::

    model_call_capture_dir: /var/captures      # optional, used where ``dir`` is not set
    token_id_capture:
      enabled: true
      dir: /var/captures                       # token_captures.db is created inside
      max_mask_fraction: 0.5                   # stop a run that masks more than half of its rollouts

Instead of a directory, ``sink`` names a class of your own that takes the records. Who reads them
back is a separate choice: ``rebuild_response: false`` leaves that to a source of your own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from token_id_capture.errors import ConfigurationError
from token_id_capture.protocols import SINK_METHODS, TokenSink, installed_token_sink, mark_of, missing_methods

logger = logging.getLogger(__name__)


class TokenIdCaptureSettings(BaseModel):
    """The block itself. An unknown key is an error, as a misspelt one would silently do nothing.

    ``dir`` is an absolute directory, ``sink`` a ``module.path:ClassName`` that is constructed with
    ``sink_kwargs``. ``max_mask_fraction`` is from 0 to 1; a batch run stops once more than that
    fraction of at least ``mask_fraction_min_samples`` finalized rollouts is masked. ``None``: it
    never stops.

    ``lineage_store``, ``lineage_store_kwargs``, ``allow_unresolved_continuations`` and ``delta_records`` are
    settings of NeMo Gym's model server: they are accepted, so that one configuration serves both, and
    change nothing here, since a parent is proven by its tokens. ``external_staging`` is refused.
    """

    # A message about one bad value must not print the secrets that stand beside it.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    enabled: bool = False
    all_agents: bool = False
    dir: Path | None = None
    sink: str | None = None
    sink_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    lineage_store: str | None = None
    lineage_store_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    allow_unresolved_continuations: bool = False
    delta_records: bool = False
    external_staging: bool = False
    external_staging_backend: str | None = None
    control_auth_token_env: str | None = None
    rebuild_response: bool = True
    max_mask_fraction: float | None = None
    mask_fraction_min_samples: int = 50

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        # A template may carry settings of a capture that this run switches off: only types are
        # read then.
        if not self.enabled:
            return self
        if self.external_staging:
            raise ValueError(
                "token_id_capture.external_staging is not supported: tokens go into this store, not through a "
                "worker's staging; remove the setting"
            )
        fraction = self.max_mask_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"token_id_capture.max_mask_fraction must be from 0 to 1, not {fraction}")
        if self.mask_fraction_min_samples < 1:
            raise ValueError(
                f"token_id_capture.mask_fraction_min_samples must be at least 1, not {self.mask_fraction_min_samples}"
            )
        return self

    def too_many_masked(self, masked: int, finalized: int) -> bool:
        """Whether a batch must stop: of ``finalized`` rollouts, enough to count, more are masked than allowed.

        ``tokcap finalize`` and ``finalize.batch`` ask it after each row; ask it in a loop of your own, too.
        """
        limit = self.max_mask_fraction
        return limit is not None and finalized >= self.mask_fraction_min_samples and masked > limit * finalized


class TokenIdCaptureConfig(BaseModel):
    """The block and the one top-level key that it falls back to, out of a whole configuration.

    Other top-level keys belong to others and are ignored::

        config = TokenIdCaptureConfig.model_validate(global_config)

    Raises:
        pydantic.ValidationError (a ValueError): an unknown key in the block, a value that is wrong,
            or capture is enabled and nothing says where the records go.
    """

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    token_id_capture: TokenIdCaptureSettings = Field(default_factory=TokenIdCaptureSettings)
    model_call_capture_dir: Path | None = None

    @field_validator("token_id_capture", mode="before")
    @classmethod
    def _empty_block(cls, block: Any) -> Any:
        return {} if block is None else block

    @model_validator(mode="after")
    def _has_a_destination(self) -> Self:
        block = self.token_id_capture
        if not block.enabled:
            return self
        if block.sink is not None:
            if block.dir is not None:
                logger.warning(
                    "token_id_capture.sink takes the records, so nothing is written to token_id_capture.dir (%s)",
                    block.dir,
                )
            return self
        directory = self.resolved_dir()
        if directory is not None and not directory.is_absolute():
            raise ValueError(
                f"the capture directory {str(directory)!r} must be an absolute path: "
                "each server process may run in another working directory"
            )
        if directory is None and block.rebuild_response and installed_token_sink() is None:
            raise ValueError(
                "token_id_capture is enabled and nothing takes the records: set token_id_capture.dir to an absolute "
                "directory, or token_id_capture.sink to a class of your own, or install a sink first"
            )
        return self

    @property
    def enabled(self) -> bool:
        """Whether calls are captured at all."""
        return self.token_id_capture.enabled

    def resolved_dir(self) -> Path | None:
        """``token_id_capture.dir``, else ``model_call_capture_dir``, else None."""
        return self.token_id_capture.dir or self.model_call_capture_dir

    def build_sink(self) -> TokenSink | None:
        """Construct the configured sink; None if capture is off or no sink is configured.

        Call it once in each server process, at its start.

        Raises:
            ConfigurationError: the target is malformed or cannot be imported, its constructor
                refuses ``sink_kwargs``, or what it makes lacks a method of ``TokenSink``.
        """
        block = self.token_id_capture
        if not block.enabled or block.sink is None:
            return None
        sink_class = _load(block.sink)
        try:
            sink: TokenSink = sink_class(**block.sink_kwargs)
        except Exception as error:
            given = ", ".join(sorted(block.sink_kwargs)) or "none"
            raise ConfigurationError(
                f"token_id_capture.sink {block.sink!r} could not be constructed (sink_kwargs: {given}): "
                f"{type(error).__name__}: {error}"
            ) from error
        missing = missing_methods(sink, SINK_METHODS)
        if missing:
            raise ConfigurationError(
                f"token_id_capture.sink {block.sink!r} is not a token sink: it lacks {', '.join(missing)}"
            )
        try:
            mark_of(sink)
        except TypeError as error:
            raise ConfigurationError(f"token_id_capture.sink {block.sink!r} is not a token sink: {error}") from error
        return sink


def token_id_capture_config(global_config: Mapping[str, Any] | None) -> TokenIdCaptureConfig:
    """The capture settings of a whole configuration, which may be empty or None.

    Raises:
        pydantic.ValidationError (a ValueError): as for ``TokenIdCaptureConfig``.
    """
    return TokenIdCaptureConfig.model_validate(global_config or {})


def token_id_capture_enabled_for_agent(global_config: Mapping[str, Any], agent_name: str | None) -> bool:
    """Whether calls of this agent are captured.

    True for every agent with ``all_agents``; else if an entry of the agent's
    ``responses_api_agents`` sets ``token_id_capture: true``.

    Raises:
        pydantic.ValidationError (a ValueError): as ``TokenIdCaptureConfig``.
    """
    settings = TokenIdCaptureConfig.model_validate(global_config).token_id_capture
    if not settings.enabled or settings.all_agents:
        return settings.enabled
    server = global_config.get(agent_name) if agent_name else None
    agents = server.get("responses_api_agents") if isinstance(server, Mapping) else None
    if not isinstance(agents, Mapping):
        return False
    return any(isinstance(agent, Mapping) and agent.get("token_id_capture") is True for agent in agents.values())


def _load(target: str) -> Any:
    module_path, colon, class_name = target.partition(":")
    if not (module_path and colon and class_name) or ":" in class_name:
        raise ConfigurationError(f"token_id_capture.sink must read 'module.path:ClassName', not {target!r}")
    try:
        loaded = getattr(import_module(module_path), class_name)
    except Exception as error:
        raise ConfigurationError(
            f"token_id_capture.sink {target!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(loaded):
        raise ConfigurationError(f"token_id_capture.sink {target!r} is not a class but {type(loaded).__name__}")
    return loaded

"""Every setting of the gateway, each with its one default and its limits."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from token_id_capture.provenance import Policy
from token_id_capture.server.defaults import (
    CHAT_HISTORY,
    CONTINUITY,
    HISTORY,
    INLINE_SYSTEM,
    MAX_CONCURRENT_CALLS,
    STREAMING,
    HistorySetting,
    InlineSystemSetting,
    Streaming,
)

SESSION_HEADERS: Final = (
    "session-id",
    "thread-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "x-codex-parent-thread-id",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-id",
)
"""Headers by which harnesses tell their sessions and sub-agents apart; by default those present are stored."""

# A word of a header's name that says that its value is a secret: x-auth-token, api-key, set-cookie, ...
_SECRET_WORDS: Final = frozenset(
    {"apikey", "auth", "authorization", "bearer", "cookie", "cookie2", "credential", "credentials", "csrf", "jwt"}
    | {"key", "password", "secret", "signature", "token"}
)


class GatewaySettings(BaseModel):
    """How the gateway serves and captures. Times are in seconds."""

    model_config = ConfigDict(frozen=True)

    body_limit: int = Field(64 * 2**20, gt=0, description="The longest request body, in bytes.")
    body_bytes_in_flight: int = Field(
        2 * 2**30,
        gt=0,
        description="Bytes of request bodies that one worker holds at once; further calls get 503.",
    )
    client_timeout: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="How long a client may pause while it sends its request or reads the response.",
    )
    head_timeout: float = Field(
        10.0, gt=0, le=86_400, description="How long a connection may take to send the head of a request."
    )
    drain_seconds: float = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="How long the engine may still take to finish a call whose client hung up.",
    )
    connect_timeout: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="How long connecting to the engine may take."
    )
    read_timeout: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="The longest silence of the engine within a response."
    )
    log_probs_mode: str | None = Field(
        None,
        description="What the engine was started with, such as raw_logprobs; stored with each call, as no response "
        "says it.",
    )
    streaming: Streaming = Field(
        STREAMING,
        description="Whether to ask the engine for a stream: auto (if its streams have ids), always or never.",
    )
    tokenize_prompts: bool = Field(
        False, description="Ask the engine's tokenizer for prompt ids that its responses lack: more requests a call."
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="The engine's model, for calls in Messages, Responses or Gemini whatever model they name; "
        "responses repeat the client's name.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="The most tokens that such a call asks the engine for; by default as many as its client wants.",
    )
    inline_system: InlineSystemSetting = Field(
        INLINE_SYSTEM,
        description="System messages that follow other messages in such calls: keep, user (send the text as the "
        "user's), merge (into the first one), or auto (keep, or user if the engine's template refuses "
        "them).",
    )
    history: HistorySetting = Field(
        HISTORY,
        description="What to do about history that clients rewrote in such calls: exact undoes it, full also "
        "restores the reasoning that they dropped, off leaves it.",
    )
    chat_history: HistorySetting = Field(
        CHAT_HISTORY,
        description="The same for calls in chat completions, whose bytes are the client's own unless this is set.",
    )
    continuity: Policy = Field(
        Policy(CONTINUITY),
        description="Send the exact tokens of the call that a request continues: off, template (only if they decode "
        "to the same text) or exact.",
    )
    traces: bool = Field(
        False,
        description="Send an OpenTelemetry span of each call, by OTLP to the address that OTEL_EXPORTER_OTLP_ENDPOINT "
        "names; needs the extra traces.",
    )
    session_headers: Annotated[tuple[str, ...], NoDecode] = Field(
        SESSION_HEADERS, description="The request headers that are stored, separated by commas."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Names, separated by commas, under which a gateway without a key may be called on loopback, beside "
        "addresses, localhost and names without a dot.",
    )
    max_concurrent_calls: int = Field(
        MAX_CONCURRENT_CALLS,
        ge=0,
        description="Calls that one worker serves at once; further calls get 503. 0: no limit.",
    )

    @field_validator("session_headers", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        return tuple(filter(None, (name.strip() for name in names.split(",")))) if isinstance(names, str) else names

    @field_validator("session_headers")
    @classmethod
    def _without_secrets(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        lower = tuple(name.lower() for name in names)
        if secret := sorted(name for name in lower if _SECRET_WORDS & set(re.split(r"[-_.]", name))):
            raise ValueError(f"{', '.join(secret)} would be stored in the database for all who can read it")
        return lower

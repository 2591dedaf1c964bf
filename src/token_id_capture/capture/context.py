"""Which call the current request is. A model server's middleware sets it; whatever runs within can ask."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass

from token_id_capture.lifecycle import UNTOLD, CallOrigin
from token_id_capture.protocols import TokenSink
from token_id_capture.provenance import Translation


@dataclass
class CaptureContext:
    """The call that the current request is, and where its record goes.

    A ``token_sink`` of None says that another process records this call: nothing is captured and
    nothing is flagged. ``committed`` is set once the call's tokens are durable. ``origin`` is
    whose call it is, and ``translation`` the dialect in which the client made it. ``upstream`` is the address of the
    engine that answered.
    """

    rollout_id: str
    model_call_id: str
    token_sink: TokenSink | None
    model: str = ""
    committed: bool = False
    origin: CallOrigin = UNTOLD
    translation: Translation | None = None
    upstream: str | None = None

    def __str__(self) -> str:
        return f"call {self.model_call_id!r} of rollout {self.rollout_id!r}"


_current: ContextVar[CaptureContext | None] = ContextVar("token_id_capture_context", default=None)


def set_token_sink(context: CaptureContext | None) -> Token[CaptureContext | None]:
    """Make ``context`` the current one, in this task and those that it starts; None turns capture off."""
    return _current.set(context)


def reset_token_sink(token: Token[CaptureContext | None]) -> None:
    """Undo the ``set_token_sink`` that returned ``token``."""
    _current.reset(token)


def current_capture_context() -> CaptureContext | None:
    """The context of the request that is being served; None outside a captured request."""
    return _current.get()

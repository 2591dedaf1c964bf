"""Reasoning that travels through a client's history in the field that the client must not change.

A seal is standard base64 of a mark and the text, because google-genai accepts nothing else. It needs no
memory of the gateway's: it survives a restart, and a seal of another provider is ignored.
"""

from __future__ import annotations

import binascii
from typing import Any, Final

_MARK: Final = b"tokcap:1:"


def seal(text: str) -> str:
    """The text as an opaque value."""
    return binascii.b2a_base64(_MARK + text.encode("utf-8", "surrogatepass"), newline=False).decode()


def opened(sealed: Any) -> str | None:
    """The text of a seal of ours; None for anything else."""
    if not isinstance(sealed, str):
        return None
    try:
        content = binascii.a2b_base64(sealed, strict_mode=True)
        return content[len(_MARK) :].decode("utf-8", "surrogatepass") if content.startswith(_MARK) else None
    except ValueError:
        return None

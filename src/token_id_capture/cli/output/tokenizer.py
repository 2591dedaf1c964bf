"""Text of token ids, where the user has the policy's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from token_id_capture.cli.options import fail

if TYPE_CHECKING:
    from pathlib import Path

    from token_id_capture.explanation import Decode


def decoder(path: Path) -> Decode:
    """A function from token ids to text; ends the command if there is no tokenizer to be had."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail("--tokenizer needs the library tokenizers: pip install 'token-id-capture[tokenizers]'")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        fail(f"cannot read {path} as a tokenizer.json: {error}")
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))

"""Text of token ids, where the user has the policy's tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from token_id_capture.cli.options import fail

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from token_id_capture.explanation import Decode

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerVocabulary:
    """The texts of a ``tokenizer.json``: of many ids, or what a single one adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoders = set(_types(json.loads(tokenizer.to_str()).get("decoder")))
        self._byte_of = _byte_alphabet() if "ByteLevel" in decoders else {}
        self._falls_back = "ByteFallback" in decoders

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def piece(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; empty for an id that the vocabulary does not have."""
        name = self._special.get(token) or self._tokenizer.id_to_token(token) or ""
        if token not in self._special and name:
            if self._byte_of and all(character in self._byte_of for character in name):
                return bytes(self._byte_of[character] for character in name)
            if self._falls_back and (byte := _BYTE_TOKEN.fullmatch(name)):
                return bytes([int(byte[1], 16)])
            # Many decoders take a space from the beginning of a text, so it is looked at behind itself.
            alone = self.decode([token])
            return self.decode([token, token]).removeprefix(alone).encode()
        return name.encode()


def _types(decoder: object) -> Iterator[str]:
    """The types of a decoder and of those that it is a sequence of."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for one in decoder.get("decoders", ()):
            yield from _types(one)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them: a printable byte
    stands for itself, and the others are counted up from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def vocabulary(path: Path) -> TokenizerVocabulary:
    """The texts of a tokenizer's file; ends the command if the tokenizer cannot be loaded."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail("--tokenizer needs the library tokenizers: pip install 'token-id-capture[tokenizers]'")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        fail(f"cannot read {path} as a tokenizer.json: {error}")
    return TokenizerVocabulary(tokenizer)


def decoder(path: Path) -> Decode:
    """A function from token ids to text; ends the command if the tokenizer cannot be loaded."""
    return vocabulary(path).decode

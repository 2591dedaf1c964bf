"""Chat templates of published models, and random ones, rendered and tokenized as an engine does it.

The published ones are read from the installed package ``trl``, which collects them; see
``scripts/install``. Nothing of it is imported.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from token_id_capture.tokens import TokenIds

MODEL = Path(__file__).parent.parent / "data" / "model"
_SPECIAL = re.compile(r"(<[^<>\s]{1,40}>)")
_GENERATION_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


def published() -> dict[str, str]:
    """The sources of the templates that the package ``trl`` brings, by name."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package trl is not installed: run scripts/install")
    folder = Path(package.origin).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


class TemplateError(Exception):
    """The template refuses the conversation."""


class Vocabulary:
    """Byte pairs of the small test model; whatever looks like a tag is a token of its own, in any text."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._special: dict[str, int] = {}
        self._texts: dict[int, str] = {}

    def encode(self, text: str) -> TokenIds:
        return TokenIds(list(self._ids(text)))

    def _ids(self, text: str) -> Iterator[int]:
        for place, piece in enumerate(_SPECIAL.split(text)):
            if place % 2:
                number = self._special.setdefault(piece, 100_000 + len(self._special))
                self._texts[number] = piece
                yield number
            elif piece:
                yield from self.tokenizer.encode(piece, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is None or token >= 100_000:
                texts.append(self.tokenizer.decode(run, skip_special_tokens=False))
                run = []
                texts.append("" if token is None else self._texts[token])
            else:
                run.append(token)
        return "".join(texts)


class ChatTemplate:
    """A template in the environment that Transformers gives it, for messages as an engine parses them."""

    def __init__(self, source: str, vocabulary: Vocabulary, *, parts: bool = False, **arguments: Any) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: "01 Jan 2026"}
        plain = _GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
        self._template = environment.from_string(plain)
        self._vocabulary = vocabulary
        self._parts = parts
        self._arguments = arguments

    def text(self, messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
        """The prompt as text.

        Raises:
            TemplateError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[_parsed(message, self._parts) for message in messages],
                add_generation_prompt=generation,
                bos_token="<bos>",
                eos_token="<eos>",
                **self._arguments,
            )
        except Exception as error:
            raise TemplateError(str(error)) from error

    async def render(self, messages: Sequence[Mapping[str, Any]], generation: bool) -> TokenIds:
        return self._vocabulary.encode(self.text(messages, generation))


def _parsed(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    """Engines hand the arguments of a call to the template as the value that they write, and a text as a list of
    parts where the template wants one."""
    shown: dict[str, Any] = copy.deepcopy(dict(message))
    if parts and isinstance(shown.get("content"), str):
        shown["content"] = [{"type": "text", "text": shown["content"]}]
    for call in shown.get("tool_calls") or ():
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return shown


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)

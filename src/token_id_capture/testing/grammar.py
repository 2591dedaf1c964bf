"""What the test policy may say next: text, the end of a thought, or a well-formed call of a tool it was given.

The grammar reads every token, of prompts too. It learns the tools from the turn that defines them,
so what is allowed depends on the tokens alone and can be computed again from any sequence.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from token_id_capture.testing.template import (
    ARGUMENTS,
    ASSISTANT,
    BEGIN_OF_TURN,
    DOUBLE_SPACE,
    END_OF_CALL,
    END_OF_THOUGHT,
    END_OF_TURN,
    THINK,
    TOOL_CALL,
    TOOLS,
)


class Options(NamedTuple):
    """The tokens that may follow, and how much each is favoured (added to its logit)."""

    tokens: tuple[int, ...]
    biases: tuple[float, ...]


def _options(biases: dict[int, float]) -> Options:
    return Options(tuple(biases), tuple(biases.values()))


def _letter_bias(byte: int) -> float:
    character = chr(byte)
    if character == " ":
        return 3.0
    return 1.5 if character.islower() else -1.5


_PRINTABLE: Final = {byte: _letter_bias(byte) for byte in (10, *range(32, 127))}
_TEXT: Final = _options({**_PRINTABLE, END_OF_TURN: 1.5})
_FIRST_WITH_TOOLS: Final = _options({**_PRINTABLE, END_OF_TURN: 0.5, TOOL_CALL: 6.0})
_TEXT_WITH_TOOLS: Final = _options({**_PRINTABLE, END_OF_TURN: 1.5, TOOL_CALL: 0.5})
_AFTER_CALL: Final = _options({END_OF_TURN: 3.0, TOOL_CALL: 0.0})
_THOUGHT: Final = _options({**_PRINTABLE, END_OF_THOUGHT: 2.5})
_VALUE: Final = {**dict.fromkeys(b"abcdefghijklmnopqrstuvwxyz", 0.0), **dict.fromkeys(b" 0123456789", -1.0)}

# One step of the arguments' JSON: a byte that must come, a blank that may, or the value's characters.
_BLANK: Final = -1
_CHARACTERS: Final = -2


def _argument_steps(tool: dict[str, Any]) -> tuple[int, ...]:
    """The form of a tool's arguments: an object with the first (required) property, as a string."""
    parameters = tool.get("parameters") or {}
    properties = [*(parameters.get("required") or ()), *(parameters.get("properties") or ())]
    if not properties:
        return (*b"{", _BLANK, *b"}")
    key = json.dumps(str(properties[0])).encode()
    return (*b"{", _BLANK, *key, *b":", _BLANK, *b'"', _CHARACTERS, *b'"', _BLANK, *b"}")


class Grammar:
    """Where in a conversation a sequence of tokens has come. Copy it with ``copy.copy``."""

    def __init__(self) -> None:
        self._state = "text"
        self._collected = b""
        self._tools: dict[bytes, tuple[int, ...]] = {}
        self._steps: tuple[int, ...] = ()
        self._step = 0
        self._value_started = False

    def advance(self, token: int) -> None:
        """Read one token. A token that was not allowed is read as well as it can be."""
        if token == BEGIN_OF_TURN:
            self._state = "role"
        elif token == END_OF_TURN:
            if self._state == "tools":
                self._tools = _read_tools(self._collected)
            self._state = "text"
        elif self._state == "role":
            self._state = {ASSISTANT: "first", TOOLS: "tools"}.get(token, "text")
            self._collected = b""
        elif token == THINK and self._state == "first":
            self._state = "thought"
        elif token == END_OF_THOUGHT and self._state == "thought":
            self._state = "first"
        elif token == TOOL_CALL and self._state in ("first", "answer", "called"):
            self._state, self._collected = "name", b""
        elif token == ARGUMENTS and self._state == "name":
            self._state, self._step, self._value_started = "arguments", 0, False
            self._steps = self._tools.get(self._collected, ())
        elif token == END_OF_CALL and self._state == "arguments":
            self._state = "called"
        elif token < 256:
            self._advance_byte(token)
        elif token == DOUBLE_SPACE:
            self._advance_byte(32)

    def _advance_byte(self, byte: int) -> None:
        if self._state == "first":
            self._state = "answer"
        elif self._state in ("name", "tools"):
            self._collected += bytes((byte,))
        elif self._state == "arguments" and self._step < len(self._steps):
            self._advance_arguments(byte)

    def _advance_arguments(self, byte: int) -> None:
        step = self._steps[self._step]
        if step == _CHARACTERS and byte in _VALUE:
            self._value_started = True
        elif step == byte or (step == _BLANK and byte == 32):
            self._step += 1
        elif step in (_BLANK, _CHARACTERS):
            self._step += 2  # the blank was left out, or the value ended: this is the byte after it

    def options(self) -> Options:
        """What may follow; never empty."""
        match self._state:
            case "first":
                return _FIRST_WITH_TOOLS if self._tools else _TEXT
            case "thought":
                return _THOUGHT
            case "answer":
                return _TEXT_WITH_TOOLS if self._tools else _TEXT
            case "name":
                return self._name_options()
            case "arguments":
                return self._argument_options()
            case "called":
                return _AFTER_CALL
            case _:
                return _TEXT

    def _name_options(self) -> Options:
        read = len(self._collected)
        going_on = [name for name in self._tools if name.startswith(self._collected)]
        biases = {name[read]: 0.0 for name in going_on if len(name) > read}
        if self._collected in self._tools or not biases:
            biases[ARGUMENTS] = 0.0
        return _options(biases)

    def _argument_options(self) -> Options:
        if self._step == len(self._steps):
            return _options({END_OF_CALL: 0.0})
        step = self._steps[self._step]
        if step == _BLANK:
            return _options({32: 0.0, self._steps[self._step + 1]: 0.0})
        if step == _CHARACTERS:
            return _options({**_VALUE, self._steps[self._step + 1]: 2.0} if self._value_started else _VALUE)
        return _options({step: 0.0})


def _read_tools(definition: bytes) -> dict[bytes, tuple[int, ...]]:
    try:
        functions = [tool["function"] for tool in json.loads(definition)]
        return {str(function["name"]).encode(): _argument_steps(function) for function in functions}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}  # not a definition that the template wrote: no tools

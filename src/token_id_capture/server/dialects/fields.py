"""Typed reading of client JSON. Each problem names its field, as clients show the message to their users."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

Place: TypeAlias = "str | int | tuple[Place, ...]"
"""Where something stands in a request, from the outside in. It becomes a path such as ``tools.3.name`` in an error."""

_LONGEST_SHOWN: Final = 60


class InvalidRequestError(ValueError):
    """The client's request cannot be translated; ``field`` is the path of what is wrong.

    A conversation has thousands of places and mostly no error, so its readers do not carry their place with them:
    they name a member, and the loops around them add the rest to the error.
    """

    def __init__(self, field: Place, problem: str) -> None:
        super().__init__(problem)
        self.field = _path(field)

    def within(self, field: str, items: Iterable[object], item: object) -> None:
        """Add to the path that the field stands in ``item``, one of the ``items`` of the list ``field``."""
        place = next(index for index, one in enumerate(items) if one is item)
        self.field = ".".join(filter(None, (field, str(place), self.field)))

    def __str__(self) -> str:
        problem = super().__str__()
        return f"{self.field}: {problem}" if self.field else problem


def read_text(value: Any, field: Place) -> str:
    """A string."""
    if not isinstance(value, str):
        raise _mismatch(value, field, "a string")
    return value


def read_object(value: Any, field: Place) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _mismatch(value, field, "an object")
    return value


def read_list(value: Any, field: Place) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise _mismatch(value, field, "an array")
    return value


def read_objects(value: Any, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects."""
    if not isinstance(value, list):
        raise _mismatch(value, field, "an array")
    for item in value:
        if not isinstance(item, dict):
            error = _mismatch(item, "", "an object")
            error.within(field, value, item)
            raise error
    return value


def read_flag(value: Any, field: Place) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise _mismatch(value, field, "a boolean")
    return value


def read_number(value: Any, field: Place) -> int | float:
    """A JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _mismatch(value, field, "a number")
    return value


def read_count(value: Any, field: Place) -> int:
    """An integer of at least 1."""
    if type(value) is not int or value < 1:
        raise _mismatch(value, field, "an integer of at least 1")
    return value


def read_integer(value: Any, field: Place) -> int:
    """An integer."""
    if type(value) is not int:
        raise _mismatch(value, field, "an integer")
    return value


def read_texts(value: Any, field: Place) -> list[str]:
    """A list of strings."""
    return [read_text(item, (field, index)) for index, item in enumerate(read_list(value, field))]


def shown(value: Any) -> str:
    """A value as an error shows it: in short, as it may be of any length."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def unsupported(value: Any, field: Place, known: str) -> InvalidRequestError:
    """The error for a ``type`` or a name that the gateway cannot translate."""
    return InvalidRequestError(field, f"{shown(value)} cannot be translated to a chat completion; {known}")


def _path(place: Place) -> str:
    return ".".join(map(_path, place)) if isinstance(place, tuple) else str(place)


def _mismatch(value: Any, field: Place, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(field, f"must be {wanted}, not {shown(value)}")

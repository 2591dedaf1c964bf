"""What type a field of JSON values has, found from the values themselves.

Objects become structs, in which a key that a value lacks is null; an object without keys is null where none has a
key. Values that no single type fits become text, namely their JSON: those of several types, text that is not
Unicode, integers beyond 64 bits, and objects of very many keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

_MOST_KEYS: Final = 256
"""An object with more keys is a table of its own, such as one by task; as a struct it would have a column a key."""
_DEEPEST: Final = 16
_IN_64_BITS: Final = range(-(2**63), 2**63)
_EXACT: Final = 2**53
"""The largest integer up to which a double has every integer."""


class _Type(Enum):
    """The types that a value may have."""

    FLAG = "flag"
    INTEGER = "integer"
    LARGE_INTEGER = "large integer"
    NUMBER = "number"
    TEXT = "text"
    LIST = "list"
    OBJECT = "object"
    OTHER = "other"


# Types of which one column can hold all values as they are.
_NUMBERS: Final = frozenset({_Type.INTEGER, _Type.NUMBER})
_INTEGERS_ALONE: Final = frozenset({_Type.INTEGER, _Type.LARGE_INTEGER})
_OF_TYPE: Final = {bool: _Type.FLAG, float: _Type.NUMBER}


class Shape:
    """The type of all values that were added to it; None has every type."""

    def __init__(self, depth: int = 0) -> None:
        self._types: set[_Type] = set()
        self._fields: dict[str, Shape] = {}
        self._items: Shape | None = None
        self._depth = depth

    def add(self, value: Any) -> None:
        """Widen the type, so that it fits ``value`` too."""
        if value is None:
            return
        found = _type_of(value) if self._depth < _DEEPEST else _Type.OTHER
        self._types.add(found)
        if found is _Type.OBJECT:
            self._add_object(value)
        elif found is _Type.LIST:
            self._items = self._items or Shape(self._depth + 1)
            self._items._add_all(value)

    def _add_object(self, value: Mapping[str, Any]) -> None:
        for name, item in value.items():
            field = self._fields.get(name)
            if field is None:
                if len(self._fields) == _MOST_KEYS or not _is_unicode(name):
                    self._types.add(_Type.OTHER)
                    return
                field = self._fields[name] = Shape(self._depth + 1)
            field.add(item)

    def _add_all(self, values: list[Any]) -> None:
        kinds = set(map(type, values))
        # Token ids and log probabilities are most of the values of records, and need not be looked at one by one.
        if kinds == {int}:
            values = [min(values), max(values)]
        elif kinds == {float}:
            values = values[:1]
        for value in values:
            self.add(value)

    @property
    def is_json(self) -> bool:
        """Whether its values are written as JSON text."""
        if len(self._types) > 1:
            return self._types not in (_NUMBERS, _INTEGERS_ALONE)
        return _Type.OTHER in self._types

    @property
    def _is_empty(self) -> bool:
        """Whether its values are objects without any key, which no column can hold."""
        return self._types == {_Type.OBJECT} and not self._fields

    @property
    def _differs(self) -> bool:
        """Whether something of its values is written as anything but itself."""
        parts = [*self._fields.values(), *([self._items] if self._items else [])]
        return self.is_json or self._is_empty or any(part._differs for part in parts)

    def arrow_type(self, arrow: Any) -> Any:
        """The type in Arrow, whose module is given; of nothing but nulls it is text."""
        if self.is_json or self._is_empty or not self._types:
            return arrow.string()
        if self._fields:
            return arrow.struct([(name, field.arrow_type(arrow)) for name, field in self._fields.items()])
        if self._items is not None:
            return arrow.list_(self._items.arrow_type(arrow))
        if _Type.NUMBER in self._types:
            return arrow.float64()
        if _Type.FLAG in self._types:
            return arrow.bool_()
        return arrow.string() if _Type.TEXT in self._types else arrow.int64()

    def written(self, values: list[Any]) -> list[Any]:
        """The values as the column of this type takes them."""
        return [self._written(value) for value in values] if self._differs else values

    def _written(self, value: Any) -> Any:
        if value is None or self._is_empty:
            return None
        if self.is_json:
            return json.dumps(value, separators=(",", ":"))  # which knows infinity, large numbers and half surrogates
        if self._fields:
            return {name: self._fields[name]._written(item) for name, item in value.items()}
        if self._items is not None:
            return self._items.written(value)
        return value


def _type_of(value: Any) -> _Type:
    kind = type(value)
    if kind is int:
        if -_EXACT <= value <= _EXACT:
            return _Type.INTEGER
        return _Type.LARGE_INTEGER if value in _IN_64_BITS else _Type.OTHER
    if kind is str:
        return _Type.TEXT if _is_unicode(value) else _Type.OTHER
    if kind in _OF_TYPE:
        return _OF_TYPE[kind]
    return _Type.LIST if kind is list else _Type.OBJECT if kind is dict else _Type.OTHER


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON allows."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

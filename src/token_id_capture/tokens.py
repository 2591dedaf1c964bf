"""Packed sequences of token ids and log probabilities.

A prompt of a long rollout has tens of thousands of ids, and each is compared, hashed, stored and
joined several times. ``TokenIds`` and ``LogProbs`` convert an engine's list once, into one flat
buffer, and from then on all of this runs at the speed of ``memcmp``. Slices share the buffer of
the sequence that they come from, and joined sequences are copied only when somebody reads them.

On disk both are little-endian: four bytes an id (unsigned), eight bytes a log probability (IEEE
754 double).
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, Self, TypeVar, overload

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from token_id_capture.errors import InvalidEntryError

_Number = TypeVar("_Number", int, float)


class _Packed(Sequence[_Number]):
    """An immutable sequence of numbers over one buffer; see ``TokenIds`` and ``LogProbs``."""

    __slots__ = ("_base", "_items", "_length", "_parts", "_start")

    typecode: ClassVar[Any]
    itemsize: ClassVar[int]
    item_schema: ClassVar[dict[str, Any]]

    _base: bytes
    _items: memoryview[Any] | None
    _length: int
    _parts: tuple[Self, Self] | None
    _start: int

    def __init__(self, values: Iterable[_Number] = ()) -> None:
        if type(values) is type(self):
            values._settle()
            self._base, self._start, self._length = values._base, values._start, values._length
        else:
            self._base = self._pack(values)
            self._start, self._length = 0, len(self._base) // self.itemsize
        self._items = None
        self._parts = None

    @classmethod
    def of(cls, values: Iterable[_Number]) -> Self:
        """``values`` as they are if they are packed already, else packed."""
        return values if type(values) is cls else cls(values)

    @classmethod
    def _pack(cls, values: Iterable[Any]) -> bytes:
        raise NotImplementedError

    @classmethod
    def _over(cls, base: bytes, start: int, length: int) -> Self:
        sequence = cls.__new__(cls)
        sequence._base, sequence._start, sequence._length = base, start, length
        sequence._items = None
        sequence._parts = None
        return sequence

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read back what ``tobytes`` gave (little-endian); the values are not checked again.

        Raises:
            InvalidEntryError: the number of bytes is not a multiple of the item size.
        """
        if len(data) % cls.itemsize:
            raise InvalidEntryError(f"{len(data)} bytes do not divide into items of {cls.itemsize} bytes")
        return cls._over(cls._native(bytes(data)), 0, len(data) // cls.itemsize)

    @classmethod
    def _native(cls, data: bytes) -> bytes:
        """Swap between little-endian and this machine's order (its own inverse)."""
        if sys.byteorder == "little":
            return data
        swapped = array(cls.typecode, data)
        swapped.byteswap()
        return swapped.tobytes()

    @classmethod
    def joined(cls, first: Self, second: Self) -> Self:
        """``first`` followed by ``second``, copied only when its items are needed.

        Neighbours in one buffer, as the store reads them, are never copied.
        """
        if not first:
            return second
        if not second:
            return first
        settled = first._parts is None and second._parts is None
        first_end = first._start + first._length * cls.itemsize
        if settled and first._base is second._base and first_end == second._start:
            return cls._over(first._base, first._start, first._length + second._length)
        sequence = cls._over(b"", 0, len(first) + len(second))
        sequence._parts = (first, second)
        return sequence

    def _settle(self) -> None:
        """Copy the parts of a joined sequence into one buffer, iteratively: chains can be deep."""
        if self._parts is None:
            return
        pieces: list[memoryview[Any]] = []
        waiting: list[_Packed[_Number]] = [self]
        while waiting:
            piece = waiting.pop()
            if piece._parts is not None:
                waiting.extend(piece._parts)
            else:
                pieces.append(piece._bytes())
        self._base = b"".join(reversed(pieces))
        self._parts = None

    def _bytes(self) -> memoryview[Any]:
        if self._parts is not None:
            self._settle()
        start = self._start
        return memoryview(self._base)[start : start + self._length * self.itemsize]

    def _view(self) -> memoryview[Any]:
        if self._items is None:
            self._items = self._bytes().cast(self.typecode)
        return self._items

    def tobytes(self) -> bytes:
        """The items, little-endian; ``len(self) * itemsize`` bytes."""
        self._settle()
        return self._native(self._base[self._start : self._start + self._length * self.itemsize])

    def buffer(self) -> memoryview[Any]:
        """The items as a read-only view of bytes in this machine's order, without a copy."""
        return self._bytes()

    def tolist(self) -> list[_Number]:
        """The items as a plain list."""
        items: Any = self._bytes().cast(self.typecode).tolist()
        return items  # type: ignore[no-any-return]

    def startswith(self, *parts: Self) -> bool:
        """Whether the first items are those of ``parts``, one part after the other."""
        length, itemsize = 0, self.itemsize
        for part in parts:
            length += part._length
            if part._parts is not None:
                part._settle()
        if length > self._length:
            return False
        if self._parts is not None:
            self._settle()
        # The last part first: of sequences that nearly agree, it is the one that differs.
        base, position = self._base, self._start + length * itemsize
        for part in reversed(parts):
            position -= part._length * itemsize
            here = part._base is base and part._start == position
            if not here and part._length and not base.startswith(part._bytes(), position):
                return False
        return True

    def common_prefix_length(self, other: Self) -> int:
        """The number of leading items in which the two agree."""
        shorter = min(self._length, other._length) * self.itemsize
        self._settle()
        return common_start(self._base, other._bytes()[:shorter], self._start) // self.itemsize

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> _Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> _Number | Self:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if self._parts is not None:
                self._settle()
            if step != 1:
                return self._over(self._view()[index].tobytes(), 0, len(range(start, stop, step)))
            return self._over(self._base, self._start + start * self.itemsize, max(0, stop - start))
        value: _Number = self._view()[index]
        return value

    def __iter__(self) -> Iterator[_Number]:
        return iter(self._bytes().cast(self.typecode))

    def __add__(self, other: Iterable[_Number]) -> Self:
        return self.joined(self, other if type(other) is type(self) else type(self)(other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self._length == other._length and self.startswith(other)
        if isinstance(other, list | tuple | array):
            if self._length != len(other):
                return False
            try:
                return self.startswith(type(self)(other))
            except InvalidEntryError:
                return False
        return NotImplemented

    def __hash__(self) -> int:
        return hash(bytes(self._bytes()))

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return (type(self).from_bytes, (self.tobytes(),))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:8]))
        rest = ", ..." if self._length > 8 else ""
        return f"{type(self).__name__}([{shown}{rest}], length={self._length})"

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        # A set or a mapping is iterable too, but has no order that anybody meant.
        if not isinstance(value, list) and (
            isinstance(value, str | bytes | bytearray | Set | Mapping) or not isinstance(value, Iterable)
        ):
            raise PydanticCustomError("packed_sequence", "not a sequence of numbers")
        try:
            return cls(value)
        except InvalidEntryError as error:
            raise PydanticCustomError("packed_sequence", "{problem}", {"problem": str(error)}) from error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.tolist()),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "array", "items": dict(cls.item_schema)}


class TokenIds(_Packed[int]):
    """Token ids: integers from 0 to 2**32 - 1, four bytes each.

    ``True`` and ``False`` are the integers 1 and 0 to Python, and so they are here: looking at the
    type of each item of a long prompt would cost more than packing it.

    Raises:
        InvalidEntryError: an item is negative, too large, or no integer.
    """

    __slots__ = ()
    typecode = "I"
    itemsize = 4
    item_schema: ClassVar[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}

    @classmethod
    def _pack(cls, values: Iterable[Any]) -> bytes:
        if isinstance(values, str | bytes | bytearray):
            raise InvalidEntryError("token ids must be a sequence of integers, not text or bytes")
        items, packed = _listed(values), array("I")
        try:
            # From a list this way, since the constructor takes each item through the sequence protocol.
            packed.fromlist(items)
        except (OverflowError, TypeError) as error:
            raise InvalidEntryError(f"token ids must be integers from 0 to 4294967295 ({error})") from error
        return packed.tobytes()


class LogProbs(_Packed[float]):
    """Log probabilities: finite doubles, eight bytes each; booleans count as numbers, as above.

    Raises:
        InvalidEntryError: an item is not a number, or is NaN or infinite.
    """

    __slots__ = ()
    typecode = "d"
    itemsize = 8
    item_schema: ClassVar[dict[str, Any]] = {"type": "number"}

    @classmethod
    def _pack(cls, values: Iterable[Any]) -> bytes:
        if isinstance(values, str | bytes | bytearray):
            raise InvalidEntryError("log probabilities must be a sequence of numbers, not text or bytes")
        items = _listed(values)
        try:
            packed = _doubles(items)
            # A sum is finite only if every item is, unless it overflows; only then look at each.
            plausible = math.isfinite(sum(items))
        except (OverflowError, TypeError) as error:
            raise InvalidEntryError(f"log probabilities must be numbers ({error})") from error
        if not plausible:
            for position, value in enumerate(items):
                if not math.isfinite(value):
                    raise InvalidEntryError(f"log probability {position} is {value}, which is not a finite number")
        return packed


def common_start(text: bytes, other: bytes | memoryview[Any], start: int = 0) -> int:
    """How many bytes of ``text`` from ``start`` on are those of ``other``.

    Halving compares whole runs, which is faster than byte by byte.
    """
    run = memoryview(other)[: len(text) - start]
    if text.startswith(run, start):
        return len(run)
    low, high = 0, len(run)
    while high - low > 1:
        middle = (low + high) // 2
        if text.startswith(run[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low


def _listed(values: Iterable[Any]) -> list[Any]:
    # What C reads of a list is not what a class derived from it gives out, should that differ.
    return values if type(values) is list else list(values)


def _doubles(items: list[Any]) -> bytes:
    try:
        return struct.pack(f"{len(items)}d", *items)
    except struct.error:
        # Slower, but it says of which type the wrong item is.
        return array("d", items).tobytes()


assert array("I").itemsize == TokenIds.itemsize, "this platform has no four-byte unsigned int"

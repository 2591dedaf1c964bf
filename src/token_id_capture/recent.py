"""Bounded memory of what was used last; what falls out is found again elsewhere, or costs only time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Item = TypeVar("_Item")


class Newest(OrderedDict[_Key, _Value]):
    """A dict of the ``most`` keys that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class RecentByRollout(Generic[_Item]):
    """The last few items of each rollout, ``capacity`` bytes in all.

    ``size`` tells the bytes of an item. A rollout has several where its calls branch, as those of sub-agents do.
    Rollouts that were used longest ago are forgotten first. Safe to use from several threads.
    """

    def __init__(self, size: Callable[[_Item], int], capacity: int, *, each: int = 4) -> None:
        self.held = 0
        self._size = size
        self._capacity = capacity
        self._each = each
        self._rollouts: OrderedDict[str, list[_Item]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, rollout_id: str) -> list[_Item]:
        """What is remembered of a rollout, the newest last; not to be changed."""
        with self._lock:
            items = self._rollouts.get(rollout_id)
            if items is None:
                return []
            self._rollouts.move_to_end(rollout_id)
            return items

    def remember(self, rollout_id: str, item: _Item, keep: Callable[[_Item], bool]) -> None:
        """Add an item to those of the rollout that ``keep`` says are still of use."""
        with self._lock:
            before = self._rollouts.pop(rollout_id, [])
            items = self._rollouts[rollout_id] = [*filter(keep, before), item][-self._each :]
            self.held += self._sizes(items) - self._sizes(before)
            while self.held > self._capacity and self._rollouts:
                self.held -= self._sizes(self._rollouts.popitem(last=False)[1])

    def forget(self, rollout_id: str) -> None:
        """Drop what is remembered of a rollout."""
        with self._lock:
            self.held -= self._sizes(self._rollouts.pop(rollout_id, []))

    def _sizes(self, items: list[_Item]) -> int:
        return sum(map(self._size, items))

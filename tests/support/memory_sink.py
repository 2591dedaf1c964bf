"""A sink in memory that can be told to fail, for tests of what calls a sink."""

from __future__ import annotations

from token_id_capture.records import TokenEntry


class PlainSink:
    """Only what every sink has. ``failures`` maps a method's name to the error that it raises."""

    def __init__(self, **failures: Exception) -> None:
        self.failures = failures
        self.entries: list[TokenEntry] = []
        self.marks: list[tuple[str, str, str]] = []
        self.calls: list[str] = []

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if method in self.failures:
            raise self.failures[method]

    async def put(self, entry: TokenEntry) -> None:
        self._enter("put")
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        self._enter("mark_incomplete")
        self.marks.append((rollout_id, model_call_id, reason))

    async def close(self) -> None:
        self._enter("close")


class MemorySink(PlainSink):
    """With intents."""

    def __init__(self, **failures: Exception) -> None:
        super().__init__(**failures)
        self.open: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str, str]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self._enter("begin_call")
        self.open.append((rollout_id, model_call_id))

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        self._enter("refuse_call")
        self.open.remove((rollout_id, model_call_id))
        self.refused.append((rollout_id, model_call_id, detail))

    async def put(self, entry: TokenEntry) -> None:
        await super().put(entry)
        key = (entry.rollout_id, entry.model_call_id)
        if key in self.open:
            self.open.remove(key)

"""How much of the answers of running rollouts is read and kept."""

from __future__ import annotations

from typing import Any

import pytest

from token_id_capture.provenance import StoredAnswer
from token_id_capture.server.dialects.chat import History
from token_id_capture.server.translation.answers import AnswerMemory


def said(call_id: str, arguments: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Stored:
    """What is stored of each rollout; ``reads`` are the rows that were handed out."""

    def __init__(self) -> None:
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.reads = 0

    async def answers_since(self, rollout_id: str, order: int) -> list[StoredAnswer]:
        found = list(enumerate(self.answers.get(rollout_id, []), 1))[order:]
        self.reads += len(found)
        return [StoredAnswer(number, message) for number, message in found]


async def test_each_stored_call_is_read_once_however_long_the_rollout_is() -> None:
    stored = Stored()
    memory = AnswerMemory(stored)
    history: list[dict[str, Any]] = []
    for turn in range(50):
        stored.answers.setdefault("r", []).append(said(f"c{turn}", f'{{"n":  {turn}}}'))
        history.append(said(f"c{turn}", f'{{"n":{turn}}}'))
        messages = [dict(message) for message in history]
        assert await memory.restore("r", messages, History.EXACT) == turn + 1
        assert messages == stored.answers["r"]
    assert stored.reads == 50


async def test_the_oldest_rollouts_are_forgotten_and_read_again() -> None:
    stored = Stored()
    memory = AnswerMemory(stored, most_bytes=5000)
    for number in range(20):
        stored.answers[f"r{number}"] = [said("c", '{"n":  1}')]
        assert await memory.restore(f"r{number}", [said("c", '{"n":1}')], History.EXACT) == 1
    assert len(memory._rollouts) < 10
    assert await memory.restore("r0", [said("c", '{"n":1}')], History.EXACT) == 1


async def test_of_calls_with_one_id_the_newest_that_says_the_same_is_taken() -> None:
    stored = Stored()
    stored.answers["r"] = [said("f:0", '{"n": 1}'), said("f:0", '{"n":   1}'), said("f:0", '{"n": 2}')]
    messages = [said("f:0", '{"n":1}')]
    assert await AnswerMemory(stored).restore("r", messages, History.EXACT) == 1
    assert messages == [said("f:0", '{"n":   1}')]


@pytest.mark.parametrize("function", [None, "look", {}, {"name": "look"}, {"name": "look", "arguments": None}])
async def test_a_call_that_an_engine_wrote_oddly_changes_nothing(function: Any) -> None:
    stored = Stored()
    stored.answers["r"] = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}]
    messages = [said("c", "{}")]
    assert await AnswerMemory(stored).restore("r", messages, History.FULL) == 0
    assert messages == [said("c", "{}")]

"""What is remembered of chat templates stays small."""

from __future__ import annotations

from collections.abc import Sequence

from token_id_capture.server.continuity.template import WORDS, Message, TemplateMemory
from token_id_capture.tokens import TokenIds


async def test_what_a_template_writes_behind_an_answer_is_kept_without_the_rest_of_the_rendering() -> None:
    async def render(messages: Sequence[Message], generation: bool) -> TokenIds:
        return TokenIds([*range(10_000), ord(messages[-1]["content"]), 5])

    stand_ins = [{"role": "assistant", "content": word} for word in WORDS]
    ending = await TemplateMemory().ending(b"", [], stand_ins, render)
    assert ending == [5]
    assert ending.buffer().obj == ending.tobytes()

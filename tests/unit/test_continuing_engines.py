"""What each engine adapter sends and asks for continuity, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from token_id_capture.protocols import offers
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import EngineAnswerError
from token_id_capture.server.engines.continuing import ContinuesPrefixes, ContinuesPrompts
from token_id_capture.server.engines.message import MessageEngine
from token_id_capture.server.engines.sglang import SglangEngine
from token_id_capture.server.engines.vllm import VllmEngine
from token_id_capture.tokens import TokenIds

IDS = TokenIds([3, 1, 2])
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Asked:
    """Remembers the question and gives the same answer to each."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.path = ""
        self.question: dict[str, Any] = {}

    async def __call__(self, path: str, question: Mapping[str, Any]) -> Any:
        self.path, self.question = path, dict(question)
        return self.answer


def test_each_adapter_has_the_extension_that_its_engine_allows() -> None:
    kinds = {name: make_engine(name) for name in ("vllm", "sglang", "message", "llama-cpp")}
    assert [name for name, engine in kinds.items() if offers(engine, ContinuesPrompts)] == ["vllm", "sglang"]
    assert [name for name, engine in kinds.items() if offers(engine, ContinuesPrefixes)] == ["message"]


def test_a_prompt_is_given_in_the_field_of_the_engine() -> None:
    assert VllmEngine().prompt_fields([3, 1, 2]) == {"kv_transfer_params": {"prompt_token_ids": [3, 1, 2]}}
    assert SglangEngine().prompt_fields([3, 1, 2]) == {"input_ids": [3, 1, 2]}
    assert MessageEngine().prefix_fields([3, 1, 2]) == {"required_prefix_token_ids": [3, 1, 2]}


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        (VllmEngine(), "kv_transfer_params"),
        (SglangEngine(), "input_ids"),
        (MessageEngine(), "required_prefix_token_ids"),
    ],
)
def test_a_client_that_says_itself_what_the_prompt_is_is_noticed(engine: Any, field: str) -> None:
    assert engine.prompt_field_of({"messages": MESSAGES}) is None
    assert engine.prompt_field_of({field: [1]}) == field
    assert engine.prompt_field_of({field: None, "add_generation_prompt": True, "echo": False}) is None
    for name, value in (
        ("chat_template", "x"),
        ("documents", []),
        ("truncate_prompt_tokens", 0),
        ("continue_final_message", True),
        ("echo", True),
        ("add_special_tokens", True),
        ("add_generation_prompt", False),
    ):
        assert engine.prompt_field_of({name: value}) == name


@pytest.mark.parametrize(("engine", "path"), [(VllmEngine(), "/tokenize"), (SglangEngine(), "/v1/tokenize")])
async def test_messages_are_rendered_with_all_that_the_template_sees(engine: Any, path: str) -> None:
    body = {
        "model": "m",
        "messages": [],
        "tools": TOOLS,
        "temperature": 1,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"preserve_thinking": True},
    }
    ask = Asked({"tokens": [3, 1, 2], "count": 3, "max_model_len": 100})
    rendered = await engine.render(body, MESSAGES, False, ask)
    assert (rendered.ids, rendered.limit, ask.path) == (IDS, 100, path)
    assert ask.question == {
        "model": "m",
        "messages": MESSAGES,
        "tools": TOOLS,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"preserve_thinking": True, "reasoning_effort": "low"},
    }
    await engine.render({"messages": []}, MESSAGES, True, ask)
    assert ask.question == {"messages": MESSAGES, "add_generation_prompt": True}


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"tokens": []}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [1, "x"]}]
)
@pytest.mark.parametrize("engine", [VllmEngine(), SglangEngine()])
async def test_an_answer_without_ids_is_an_error_of_the_engine(engine: Any, answer: Any) -> None:
    with pytest.raises(EngineAnswerError, match="tokenize answered"):
        await engine.render({}, MESSAGES, True, Asked(answer))


async def test_texts_come_from_the_detokenizer_endpoint() -> None:
    ask = Asked({"prompt": "<s>Hi", "text": "<s>Hi"})
    assert await VllmEngine().text({"model": "m"}, IDS, ask) == "<s>Hi"
    assert (ask.path, ask.question) == ("/detokenize", {"model": "m", "tokens": [3, 1, 2]})
    assert await SglangEngine().text({"model": "m"}, IDS, ask) == "<s>Hi"
    assert ask.path == "/v1/detokenize"
    assert ask.question == {"model": "m", "tokens": [3, 1, 2], "skip_special_tokens": False}
    for engine in (VllmEngine(), SglangEngine()):
        with pytest.raises(EngineAnswerError, match="without a text"):
            await engine.text({}, IDS, Asked({"prompt": None}))

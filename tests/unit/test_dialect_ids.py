"""Translated Messages requests prompt with the very ids that vLLM's own ``/v1/messages`` gives them."""

from __future__ import annotations

from typing import Any

import pytest

from support.chat_templates import MODEL, ChatTemplate, Vocabulary, published
from support.dialect_ids import kept_ids, recorded_messages


def template_of(name: str) -> str:
    return published()[name] if name != "plain" else (MODEL / "chat_template.jinja").read_text(encoding="utf-8")


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a template that expects texts: parts are lines of one."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}


@pytest.mark.parametrize("name", ["plain", "qwen3"])
def test_recorded_requests_have_the_ids_of_vllms_own_messages_endpoint(name: str) -> None:
    kept = kept_ids(name)
    vocabulary, source = Vocabulary(), template_of(name)
    requests = recorded_messages()
    assert {request.name for request in requests} == kept.keys()
    for request in requests:
        chat = request.translated().body
        arguments = chat.get("chat_template_kwargs", {})
        template = ChatTemplate(source, vocabulary, tools=chat.get("tools"), **arguments)
        text = template.text([flat(message) for message in chat["messages"]], chat.get("add_generation_prompt", True))
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == kept[request.name], request.name

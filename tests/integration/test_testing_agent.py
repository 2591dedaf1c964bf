"""The test agent: what it says to the model and what it makes of the response."""

from __future__ import annotations

from typing import Any

import pytest

from token_id_capture.testing.agent import Answer, BrokenCallError, CallRefusedError, ChatAgent, NotConnectedError
from token_id_capture.testing.engine import BrokenResponse, EngineCall, PolicyEngine
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import render_chat

TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"properties": {"zone": {"type": "string"}}}}}]


def make_agent(url: str, **options: Any) -> ChatAgent:
    return ChatAgent(f"{url}/v1", "policy", [{"role": "user", "content": "hello"}], tools=TOOLS, **options)


async def converse(url: str, turns: int, **options: Any) -> tuple[ChatAgent, list[Answer]]:
    answers = []
    async with make_agent(url, **options) as agent:
        for turn in range(turns):
            agent.options = {"max_tokens": 50, "seed": turn}
            answers.append(await agent.ask())
            agent.accept(answers[-1], "go on")
    return agent, answers


async def test_streamed_and_whole_responses_lead_to_the_same_conversation() -> None:
    told: list[tuple[str, str]] = []

    def run_tool(name: str, arguments: str) -> str:
        told.append((name, arguments))
        return f"answer to {arguments}"

    async with serve_engine() as url:
        whole, whole_answers = await converse(url, 8, run_tool=run_tool)
        asked, told = told, []
        streamed, streamed_answers = await converse(url, 8, run_tool=run_tool, stream=True)
    # Ids of tool calls are minted for each response; the prompt has everything else.
    assert render_chat(whole.messages, TOOLS) == render_chat(streamed.messages, TOOLS)
    assert [one.finish_reason for one in whole_answers] == [one.finish_reason for one in streamed_answers]
    assert [one.completion_tokens for one in whole_answers] == [one.completion_tokens for one in streamed_answers]
    assert asked == told
    assert {name for name, _ in told} == {"now"}


async def test_the_answer_to_a_tool_call_names_the_call() -> None:
    async with serve_engine() as url:
        agent, _ = await converse(url, 8)
    calls = [call["id"] for message in agent.messages for call in message.get("tool_calls") or ()]
    assert calls
    assert [message["tool_call_id"] for message in agent.messages if message["role"] == "tool"] == calls


async def test_a_refusal_carries_the_answer_of_the_server() -> None:
    async with serve_engine(PolicyEngine(model="another")) as url, make_agent(url) as agent:
        with pytest.raises(CallRefusedError, match=r"HTTP 404.*does not exist") as caught:
            await agent.ask()
    assert caught.value.status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_response_and_a_missing_server_are_told_apart(stream: bool) -> None:
    async def cut(call: EngineCall) -> BrokenResponse:
        return BrokenResponse(after_frames=2)

    async with serve_engine(PolicyEngine(on_call=cut)) as url, make_agent(url, stream=stream) as agent:
        with pytest.raises(BrokenCallError):
            await agent.ask()
    async with make_agent(url, stream=stream) as agent:
        with pytest.raises(NotConnectedError):
            await agent.ask()
    assert agent.messages == [{"role": "user", "content": "hello"}]

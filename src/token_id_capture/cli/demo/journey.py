"""Eight agents at once, through the gateway, with a retry, a compaction and a killed worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from token_id_capture.cli.demo.processes import DemoFailedError, EngineProcess
from token_id_capture.cli.demo.stories import (
    HELD_TEXT,
    MISHAP_TURN,
    MODEL,
    STORIES,
    SUMMARY,
    TOOLS,
    TURNS,
    Story,
    run_tool,
)
from token_id_capture.cli.output.progress import Show
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.agent import Answer, BrokenCallError, CallRefusedError, ChatAgent, NotConnectedError

# A worker is started again in about a second; a loaded machine may need longer.
_PATIENCE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05


@dataclass
class Rollout:
    """A finished rollout as its harness saw it."""

    story: Story
    final_message: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    kept_tokens: int = 0
    """Tokens of the answers that the agent went on from, by the engine's own count."""
    tool_calls: int = 0
    killed_pid: int | None = None

    def record(self) -> dict[str, Any]:
        """The rollout record, as a training framework would write it."""
        return {
            "_ng_rollout_id": self.story.rollout_id,
            "reward": self.tool_calls / TURNS,
            "response": {
                "id": f"resp_{self.story.rollout_id}",
                "object": "response",
                "model": MODEL,
                "output": _output_items(self.final_message),
            },
        }


CALLS: Final = len(STORIES) * TURNS + sum(story.retries for story in STORIES)
"""The calls that get an answer."""
AT_WORK: Final = f"{len(STORIES)} agents at work"


class Journey:
    """One run of all stories at once."""

    def __init__(self, gateway: str, engine: EngineProcess, database: Path, show: Show) -> None:
        self._gateway = gateway
        self._engine = engine
        self._database = database
        self._show = show
        self._doing = AT_WORK
        self._answered = 0
        self._between_turns = asyncio.Barrier(len(STORIES))

    async def run(self) -> list[Rollout]:
        """Live through every story at once.

        Raises:
            DemoFailedError: an agent could not continue.
        """
        rollouts = [Rollout(story) for story in STORIES]
        try:
            async with asyncio.TaskGroup() as group:
                for rollout in rollouts:
                    group.create_task(self._live(rollout))
        except* DemoFailedError as failures:
            raise failures.exceptions[0] from None
        return rollouts

    async def _live(self, rollout: Rollout) -> None:
        story = rollout.story
        agent = ChatAgent(
            f"{self._gateway}/ng-rollout/{story.rollout_id}/training-token-capture/v1",
            MODEL,
            [{"role": "user", "content": f"Tell me about the town, agent {story.rollout_id}."}],
            stream=story.stream,
            tools=TOOLS,
            run_tool=run_tool,
            options={"max_tokens": 96, "temperature": 1.0},
        )
        async with agent:
            for turn in range(TURNS):
                await self._between_turns.wait()
                if turn == MISHAP_TURN:
                    await self._mishap(rollout, agent)
                answer = await self._ask(rollout, agent)
                rollout.kept_tokens += answer.completion_tokens
                rollout.tool_calls += len(answer.message.get("tool_calls") or ())
                rollout.final_message = answer.message
                agent.accept(answer, "Go on.")

    async def _mishap(self, rollout: Rollout, agent: ChatAgent) -> None:
        """What befalls this agent alone; the others wait, so that no call of theirs is in flight."""
        if rollout.story.loses:
            agent.messages.append({"role": "user", "content": HELD_TEXT})
            rollout.killed_pid = await self._lose_a_call(rollout, agent)
        await self._between_turns.wait()
        if rollout.story.retries:
            await self._ask(rollout, agent)
        if rollout.story.compacts:
            # The answer that is scored ends what follows; what came before is a sequence of its own.
            rollout.kept_tokens = 0
            agent.messages[:] = [{"role": "system", "content": SUMMARY}, {"role": "user", "content": "Go on."}]

    async def _ask(self, rollout: Rollout, agent: ChatAgent) -> Answer:
        rollout.calls += 1
        try:
            answer = await _patiently(agent)
        except (ConnectionError, TimeoutError, CallRefusedError) as error:
            raise DemoFailedError(f"a call of {rollout.story.rollout_id} failed: {error}") from error
        self._answered += 1
        self._show(self._doing, self._answered, CALLS)
        return answer

    async def _lose_a_call(self, rollout: Rollout, agent: ChatAgent) -> int:
        """Kill the worker that serves this agent's call; returns its process id."""
        rollout.calls += 1
        asking = asyncio.create_task(agent.ask())
        held = asyncio.create_task(self._engine.held())
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.wait((asking, held), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    held.result()
                    pid = await self._serving_process(rollout.story.rollout_id)
                    os.kill(pid, signal.SIGKILL)
                    self._doing = f"{AT_WORK}, gateway worker {pid} killed"
                await asking
        except BrokenCallError as error:
            if held.done():
                return pid
            raise DemoFailedError(f"the call that was to be lost never reached the engine: {error}") from error
        except (TimeoutError, CallRefusedError, NotConnectedError) as error:
            raise DemoFailedError(f"the call that was to be lost did not break off: {error!r}") from error
        finally:
            asking.cancel()
            held.cancel()
        raise DemoFailedError("the call that was to be lost got a response although its worker was killed")

    async def _serving_process(self, rollout_id: str) -> int:
        """The process that holds the rollout's open call, as the database knows it."""
        async with TokenCaptureStore(self._database, create=False) as store:
            intents = (await store.describe_rollout(rollout_id)).intents
        open_intents = [intent for intent in intents if intent.outcome is None]
        if len(open_intents) != 1 or open_intents[0].writer_host != socket.gethostname():
            raise DemoFailedError(f"expected one open call of {rollout_id} on this host, found {open_intents}")
        return open_intents[0].writer_pid


async def _patiently(agent: ChatAgent) -> Answer:
    """Ask; while nobody listens, ask again: nothing was sent then, so nothing is lost."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            try:
                return await agent.ask()
            except NotConnectedError:
                await asyncio.sleep(_POLL_SECONDS)


def _output_items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message as output items of the Responses API."""
    items: list[dict[str, Any]] = []
    if message.get("content"):
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
            }
        )
    return items

"""What the engine says: a policy that follows a script instead of sampling.

The script is read off the prompt alone, so that parallel agents need no state: with each tool result in the
prompt the next step is taken. Texts and arguments are written as harnesses like to rewrite them: trailing white
space, keys in an odd order, spaces in the JSON, a number with a useless fraction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from token_id_capture.testing.engine import EngineCall, Failure
from token_id_capture.testing.policy import Policy, SampledToken
from token_id_capture.testing.template import (
    ARGUMENTS,
    BEGIN_OF_TURN,
    END_OF_CALL,
    END_OF_THOUGHT,
    END_OF_TURN,
    SYSTEM,
    THINK,
    TOOL,
    TOOL_CALL,
    TOOLS,
    USER,
    decode,
    encode,
)

ANSWER: Final = "The file says alpha, in 6 bytes."
"""The last words of a task that went well."""
SUB_AGENT: Final = "SUB-AGENT"
"""In the task of an agent that the main agent starts."""
TWO_AGENTS: Final = "TWO-AGENTS"
"""In the task of a main agent that is to start two others."""

SUMMARY: Final = "THE-SUMMARY: notes.txt says alpha."
"""What the policy says when a harness asks it to summarise its history."""
_SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# mini-swe-agent ends on a command that prints this, and never on words alone.

_SHELLS: Final = ("Bash", "exec_command", "bash", "run_shell_command", "terminal")
_STARTERS: Final = ("Agent", "Task", "task")


class ScriptedPolicy(Policy):
    """Says what the script says. Its log probabilities are made up, and none is a placeholder.

    ``at_length``: its first command prints 19 kB more, which is reason to compact.
    """

    def __init__(self, *, at_length: bool = False) -> None:
        super().__init__()
        self._first = "cat notes.txt; seq 4000" if at_length else "cat notes.txt"

    def sample(self, prompt: Sequence[int], *, max_tokens: int, **unused: Any) -> Iterator[SampledToken]:
        for token in _tokens(list(prompt), self._first)[:max_tokens]:
            yield SampledToken(token, -0.25)


class OneLongPrompt:
    """Refuses the first ``most`` prompts with two tool results, in vLLM's words, at which harnesses compact."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.refused = 0

    async def __call__(self, call: EngineCall) -> Failure | None:
        messages = call.body.get("messages", ())
        if self.refused >= self._most or sum(message["role"] == "tool" for message in messages) < 2:
            return None
        self.refused += 1
        return Failure(
            400,
            "This model's maximum context length is 20000 tokens. However, your prompt contains at least 20001 input "
            "tokens. Please reduce the length of the input prompt.",
        )


def _tokens(prompt: list[int], first: str) -> list[int]:
    turns = _turns(prompt)
    tools = {
        tool["function"]["name"]: tool["function"] for turn in turns[:1] if turn[0] == TOOLS for tool in _json(turn)
    }
    thought = [*encode("What is next? "), END_OF_THOUGHT] if prompt[-1] == THINK else []
    results = sum(turn[0] == TOOL for turn in turns)
    said = " ".join(decode(turn[1:]) for turn in turns if turn[0] in (USER, SYSTEM))
    last = next((decode(turn[1:]) for turn in reversed(turns) if turn[0] == USER), "")
    results += SUMMARY in said
    return [*thought, *_step(tools, results, said, last, first), END_OF_TURN]


def _step(tools: dict[str, Any], results: int, said: str, last: str, first: str) -> list[int]:
    if SUMMARY not in last and "summar" in last.lower():
        return encode(f"<summary>{SUMMARY}</summary>")
    shell = next((name for name in _SHELLS if name in tools), None)
    starter = next((name for name in _STARTERS if name in tools), None)
    if shell is None:
        return encode("A title")
    if TWO_AGENTS in said and SUB_AGENT not in said and starter is not None:
        if results:
            return encode(ANSWER)
        kind = "general" if starter == "task" else "general-purpose"
        return [token for number in (1, 2) for token in _call(starter, _order(number, kind))]
    if results >= 2 and _SUBMIT not in said:
        return encode(ANSWER)
    command = (first, "wc -c notes.txt", f"echo {_SUBMIT}; echo '{ANSWER}'")[results]
    return [*encode("I will look.  \n\n" if not results else ""), *_call(shell, _arguments(tools[shell], command))]


def _order(number: int, kind: str) -> str:
    order = {"subagent_type": kind, "prompt": f"{SUB_AGENT} {number}: what does notes.txt say?"}
    return json.dumps({**order, "description": f"agent {number}"})


def _arguments(shell: dict[str, Any], command: str) -> str:
    """Arguments in another order than the schema's, with white space that a parser drops."""
    known = shell["parameters"]["properties"]
    name = "cmd" if "cmd" in known else "command"
    more = '"description": "Show caf\\u00e9 notes", ' if "description" in known else ""
    more += '"timeout": 10000.0, ' if "timeout" in known else ""
    return "{" + more + f' "{name}":{json.dumps(command)} ' + "}"


def _call(name: str, arguments: str) -> list[int]:
    return [TOOL_CALL, *encode(name), ARGUMENTS, *encode(arguments), END_OF_CALL]


def _turns(prompt: list[int]) -> list[list[int]]:
    """The turns of a prompt, each without its marks."""
    starts = [place for place, token in enumerate(prompt) if token == BEGIN_OF_TURN]
    return [prompt[start + 1 : end] for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True)]


def _json(turn: list[int]) -> Any:
    return json.loads(re.sub(r"\s+$", "", decode(turn[1:])))

"""What a store gets, prepared as bytes before the clock starts.

Three forms of the same calls. ``arrays``: a JSON object of the token arrays and the text. ``response``:
vLLM's whole answer to a chat. ``packed``: the least that must reach the disk, which is the new
tokens in four bytes each, log probabilities in eight, and the text.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmark.workloads import Rollout, Workload

FORMS = ("arrays", "response", "packed")


@dataclass(slots=True, frozen=True)
class Call:
    """One call of a rollout, as bytes of one of the three forms."""

    rollout_id: str
    call_id: str
    body: bytes


def write_inputs(workload: Workload, directory: Path, forms: tuple[str, ...]) -> None:
    """Write a file of bodies and an index for each form; the parent does this once a workload."""
    builders = {"arrays": _arrays, "response": write_response, "packed": _packed}
    index: dict[str, list[Any]] = {form: [] for form in forms}
    files = {form: (directory / form).open("wb") for form in forms}
    for rollout in workload.draw():
        for form, file in files.items():
            bodies = [builders[form](rollout, call) for call in range(workload.calls)]
            start = file.tell()
            file.writelines(bodies)
            index[form].append([rollout.rollout_id, start, rollout.call_ids, [len(body) for body in bodies]])
    for form, file in files.items():
        file.close()
        (directory / f"{form}.json").write_text(json.dumps(index[form]))


def read_inputs(directory: Path, form: str, *, part: int = 0, parts: int = 1, suffix: str = "") -> list[list[Call]]:
    """The calls of every rollout, or of every ``parts``-th; an inner list is one rollout's."""
    rollouts = json.loads((directory / f"{form}.json").read_text())[part::parts]
    with (directory / form).open("rb") as file:
        return [list(_calls(file, rollout_id + suffix, *rest)) for rollout_id, *rest in rollouts]


def _calls(file: Any, rollout_id: str, start: int, call_ids: list[str], sizes: list[int]) -> Iterator[Call]:
    file.seek(start)
    for call_id, size in zip(call_ids, sizes, strict=True):
        yield Call(rollout_id, call_id, file.read(size))


def record_of(call: Call, prompt: Any, generation: Any, log_probs: Any, text: str) -> dict[str, Any]:
    """The fields of the call's record, the same for every store."""
    return {
        "rollout_id": call.rollout_id,
        "model_call_id": call.call_id,
        "model": "policy",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": log_probs,
        "output_items": [{"type": "message", "role": "assistant", "content": text}],
        "token_item_index": 0,
        "created_at": 1767225600.25,
        "response_id": f"chatcmpl-{call.call_id}",
        "finish_reason": "stop",
    }


def _arrays(rollout: Rollout, call: int) -> bytes:
    start, end = rollout.generation_span(call)
    return b'{"prompt_token_ids":%b,"generation_token_ids":%b,"generation_log_probs":%b,"text":%b}' % (
        rollout.ids_json(*rollout.prompt_span(call)),
        rollout.ids_json(start, end),
        orjson.dumps(rollout.log_probs[start:end]),
        orjson.dumps("".join(rollout.words(start, end))),
    )


def write_response(rollout: Rollout, call: int) -> bytes:
    """vLLM's whole answer to a chat."""
    start, end = rollout.generation_span(call)
    words = rollout.words(start, end)
    content = [
        {"token": word, "logprob": log_prob, "bytes": list(word.encode()), "top_logprobs": []}
        for word, log_prob in zip(words, rollout.log_probs[start:end], strict=True)
    ]
    message = {"role": "assistant", "content": "".join(words), "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "reasoning": None}
    ends = (
        {"id": f"chatcmpl-{rollout.call_ids[call]}", "object": "chat.completion", "created": 1767225600},
        {"model": "policy", "choices": []},
        {"service_tier": None, "system_fingerprint": "vllm-0.32.0-542ce30f"},
        {"usage": {"prompt_tokens": start, "total_tokens": end, "completion_tokens": end - start}},
        {"prompt_logprobs": None},
    )
    head = orjson.dumps({key: value for part in ends for key, value in part.items()})
    choice = b'{"index":0,"message":%b,"logprobs":{"content":%b},"finish_reason":"stop","stop_reason":null,' % (
        orjson.dumps(message),
        orjson.dumps(content),
    )
    choice += b'"token_ids":%b,"routed_experts":null}' % rollout.ids_json(start, end)
    tail = b',"prompt_token_ids":%b,"prompt_text":null,"kv_transfer_params":null,"metrics":null}'
    before, after = head.split(b'"choices":[]')
    prompt = rollout.ids_json(*rollout.prompt_span(call))
    return b'%b"choices":[%b]%b' % (before, choice, after[:-1]) + tail % prompt


def _packed(rollout: Rollout, call: int) -> bytes:
    start, end = rollout.generation_span(call)
    known = sum(rollout.generation_span(call - 1)[1:]) if call else 0
    ids, log_probs = array("I", rollout.token_ids[known:end]), array("d", rollout.log_probs[start:end])
    if sys.byteorder == "big":
        ids.byteswap()
        log_probs.byteswap()
    text = "".join(rollout.words(start, end))
    rest = record_of(Call(rollout.rollout_id, rollout.call_ids[call], b""), start, len(ids), known, text)
    return ids.tobytes() + log_probs.tobytes() + orjson.dumps(rest)

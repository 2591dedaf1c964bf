"""What the clients ask and the engine answers, as bytes that are ready before the clock starts."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from benchmark.inputs import write_response
from benchmark.workloads import Rollout, Workload

SHAPES = {
    shape.name: shape
    for shape in (
        Workload("chat", rollouts=16, calls=4, first_prompt=512, generated=256, added=128),
        Workload("agent", rollouts=16, calls=4, first_prompt=18_500, generated=256, added=700),
    )
}
MODEL = "bench-{}ms"
"""A model's name tells the engine how long to wait after each event of a stream, in milliseconds."""


@dataclass(frozen=True)
class Question:
    """What a client sends for one call: its number for the engine, and the body but for number and model."""

    number: int
    messages: bytes

    def body(self, *, streamed: bool, pause_ms: int = 0) -> bytes:
        """The request's body, in which nothing of the capture is asked for."""
        return b'{"model":"%b","seed":%d,"stream":%b,"temperature":1.0,"messages":%b}' % (
            MODEL.format(pause_ms).encode(),
            self.number,
            b"true" if streamed else b"false",
            self.messages,
        )


def questions(shape: Workload) -> list[list[Question]]:
    """The calls of each rollout, in turn; each has all of its prompt in the messages, as agents send it."""
    return [
        [Question(number * shape.calls + call, _messages(rollout, call)) for call in range(shape.calls)]
        for number, rollout in enumerate(shape.draw())
    ]


def whole_responses(shape: Workload) -> list[bytes]:
    """The engine's answer to each question, by number."""
    return [write_response(rollout, call) for rollout in shape.draw() for call in range(shape.calls)]


def streamed_responses(shape: Workload) -> list[list[bytes]]:
    """The events of the same answers, one a token, as vLLM sends them."""
    return [_events(rollout, call) for rollout in shape.draw() for call in range(shape.calls)]


def _messages(rollout: Rollout, call: int) -> bytes:
    messages = [{"role": "system", "content": "You work on a repository."}]
    done = 0
    for earlier in range(call):
        begin, end = rollout.generation_span(earlier)
        messages.append({"role": "user", "content": "".join(rollout.words(done, begin))})
        messages.append({"role": "assistant", "content": "".join(rollout.words(begin, end))})
        done = end
    messages.append({"role": "user", "content": "".join(rollout.words(done, rollout.prompt_span(call)[1]))})
    return orjson.dumps(messages)


def _events(rollout: Rollout, call: int) -> list[bytes]:
    begin, end = rollout.generation_span(call)
    head = b'{"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1767225600,"model":"policy","choices":[' % (
        rollout.call_ids[call].encode()
    )
    prompt = rollout.ids_json(*rollout.prompt_span(call))
    events = [
        b'%b{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"prompt_token_ids":%b}' % (head, prompt)
    ]
    for position, word in zip(range(begin, end), rollout.words(begin, end), strict=True):
        entry = {
            "token": word,
            "logprob": rollout.log_probs[position],
            "bytes": list(word.encode()),
            "top_logprobs": [],
        }
        events.append(
            b'%b{"index":0,"delta":{"content":%b},"logprobs":{"content":[%b]},"finish_reason":%b,"token_ids":%b}]}'
            % (
                head,
                orjson.dumps(word),
                orjson.dumps(entry),
                b'"stop","stop_reason":null' if position == end - 1 else b"null",
                rollout.ids_json(position, position + 1),
            )
        )
    events.append(
        b'%b],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}' % (head, begin, end, end - begin)
    )
    return [b"data: %b\n\n" % data for data in (*events, b"[DONE]")]

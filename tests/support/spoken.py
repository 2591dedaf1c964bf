"""One generation in the words of every engine, for tests that hold for all of them.

Where there are recordings of an engine, these responses have their shape; SGLang's follow its sources
(release 0.5). They are short, and wrong where a test wants it: ``count`` is what the engine says it
generated, ``named`` the ids that its log probabilities are for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson


@dataclass(frozen=True)
class Spoken:
    """What was generated, token by token."""

    prompt: list[Any] = field(default_factory=lambda: [1, 2, 3])
    ids: list[Any] = field(default_factory=lambda: [10, 11, 12])
    log_probs: list[Any] = field(default_factory=lambda: [-0.5, -0.25, -0.125])
    texts: list[str] = field(default_factory=lambda: ["Hel", "lo", ""])
    finish: str = "stop"
    count: int | None = None
    named: list[Any] | None = None

    @property
    def counted(self) -> int:
        return len(self.ids) if self.count is None else self.count

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt), "completion_tokens": self.counted}

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def entries(self, id_name: str | None = None, texts: list[str] | None = None) -> list[dict[str, Any]]:
        """The entries of ``logprobs.content``."""
        found = []
        for position, log_prob in enumerate(self.log_probs):
            entry: dict[str, Any] = {"token": (texts or self.texts)[position], "logprob": log_prob, "top_logprobs": []}
            if id_name is not None:
                entry[id_name] = (self.named or self.ids)[position]
            found.append(entry)
        return found

    def spelled(self) -> list[str]:
        return [f"token_id:{token}" for token in self.named or self.ids]

    def pairs(self, end: int | None = None, start: int = 0) -> list[list[Any]]:
        """``output_token_logprobs`` of SGLang."""
        named = self.named or self.ids
        return [[log_prob, token, None] for log_prob, token in zip(self.log_probs, named, strict=True)][start:end]


Parts: TypeAlias = dict[str, Any]


def body(*, chat: bool = False, stream: bool = False, **choice: Any) -> dict[str, Any]:
    """The frame of an OpenAI response or chunk around one choice."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    return {"id": "response-1", "object": kind, "created": 7, "model": "tiny", "choices": [{"index": 0, **choice}]}


def message(spoken: Spoken, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": spoken.text, **more}


def events(*chunks: Any, names: dict[int, str] | None = None, done: bool = True) -> bytes:
    """Server-sent events; ``names`` gives some of them an ``event`` line."""
    frames = []
    for position, chunk in enumerate(chunks):
        name = (names or {}).get(position)
        frames.append((f"event: {name}\n" if name else "").encode() + b"data: " + orjson.dumps(chunk) + b"\n\n")
    return b"".join([*frames, *([b"data: [DONE]\n\n"] if done else [])])


def usage_chunk(spoken: Spoken, kind: str = "chat.completion.chunk") -> dict[str, Any]:
    return {"id": "response-1", "object": kind, "created": 7, "model": "tiny", "choices": [], "usage": spoken.usage}


def steps(spoken: Spoken) -> range:
    return range(len(spoken.ids))


def vllm_chat(spoken: Spoken) -> Any:
    choice: Parts = {
        "message": message(spoken),
        "logprobs": {"content": spoken.entries()},
        "finish_reason": spoken.finish,
    }
    response = body(chat=True, **choice, stop_reason=None, token_ids=spoken.ids)
    return {**response, "usage": spoken.usage, "prompt_token_ids": spoken.prompt}


def vllm_chat_stream(spoken: Spoken) -> bytes:
    first = body(chat=True, stream=True, delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None)
    chunks = [{**first, "prompt_token_ids": spoken.prompt}]
    for step in steps(spoken):
        finish = spoken.finish if step == len(spoken.ids) - 1 else None
        entries = {"content": spoken.entries()[step : step + 1]}
        delta = {"content": spoken.texts[step]}
        chunks.append(
            body(
                chat=True,
                stream=True,
                delta=delta,
                logprobs=entries,
                finish_reason=finish,
                token_ids=spoken.ids[step : step + 1],
            )
        )
    return events(*chunks, usage_chunk(spoken))


def vllm_spelled(spoken: Spoken) -> Any:
    """With ``return_tokens_as_token_ids``, and no ids but those."""
    response = vllm_chat(spoken)
    response["choices"][0] |= {"token_ids": None, "logprobs": {"content": spoken.entries(texts=spoken.spelled())}}
    return response


def vllm_spelled_beside(spoken: Spoken) -> Any:
    """With ``return_tokens_as_token_ids`` beside the ids."""
    response = vllm_chat(spoken)
    response["choices"][0]["logprobs"] = {"content": spoken.entries(texts=spoken.spelled())}
    return response


def vllm_completion(spoken: Spoken) -> Any:
    logprobs = {"tokens": spoken.texts, "token_logprobs": spoken.log_probs, "top_logprobs": None, "text_offset": []}
    choice: Parts = {
        "text": spoken.text,
        "logprobs": logprobs,
        "finish_reason": spoken.finish,
        "token_ids": spoken.ids,
    }
    return {**body(**choice, prompt_token_ids=spoken.prompt), "usage": spoken.usage}


def vllm_completion_stream(spoken: Spoken) -> bytes:
    chunks = []
    for step in steps(spoken):
        logprobs = {"tokens": [spoken.texts[step]], "token_logprobs": [spoken.log_probs[step]]}
        choice: Parts = {
            "text": spoken.texts[step],
            "logprobs": logprobs,
            "finish_reason": spoken.finish if step == len(spoken.ids) - 1 else None,
            "prompt_token_ids": None if step else spoken.prompt,
            "token_ids": spoken.ids[step : step + 1],
        }
        chunks.append(body(**choice))
    return events(*chunks, usage_chunk(spoken, "text_completion"))


def vllm_generate(spoken: Spoken) -> Any:
    entries = [{"token_id": entry["token_id"], "logprob": entry["logprob"]} for entry in spoken.entries("token_id")]
    choice: Parts = {
        "index": 0,
        "finish_reason": spoken.finish,
        "token_ids": spoken.ids,
        "logprobs": {"content": entries},
    }
    response = {"request_id": "response-1", "model": "tiny", "usage": spoken.usage, "choices": [choice]}
    return {**response, "prompt_token_ids": spoken.prompt}


def vllm_generate_stream(spoken: Spoken) -> bytes:
    chunks: list[Any] = []
    for step in steps(spoken):
        choice: Parts = {
            "index": 0,
            "finish_reason": spoken.finish if step == len(spoken.ids) - 1 else None,
            "token_ids": spoken.ids[step : step + 1],
            "logprobs": {"content": spoken.entries("token_id")[step : step + 1]},
        }
        chunks.append({"request_id": "response-1", "usage": None, "choices": [choice]})
    chunks[0]["prompt_token_ids"] = spoken.prompt
    return events(*chunks, {"request_id": "response-1", "usage": spoken.usage, "choices": []})


def litellm_chat(spoken: Spoken) -> Any:
    """As LiteLLM 1.110 passes on what vLLM sent."""
    response = vllm_chat(spoken)
    response["choices"][0]["provider_specific_fields"] = {"token_ids": response["choices"][0].pop("token_ids")}
    response["choices"][0]["message"]["provider_specific_fields"] = {"reasoning": None}
    return response


def litellm_chat_stream(spoken: Spoken) -> bytes:
    """The ids in the delta's fields, the prompt in the chunk's."""
    frames = [orjson.loads(line[6:]) for line in vllm_chat_stream(spoken).splitlines() if line.startswith(b"data: {")]
    for frame in frames:
        if "prompt_token_ids" in frame:
            frame["provider_specific_fields"] = {"prompt_token_ids": frame.pop("prompt_token_ids")}
        for choice in frame["choices"]:
            if "token_ids" in choice:
                choice["delta"]["provider_specific_fields"] = {"token_ids": choice.pop("token_ids")}
    return events(*frames)


def message_chat(spoken: Spoken) -> Any:
    arrays = {
        "prompt_token_ids": spoken.prompt,
        "generation_token_ids": spoken.ids,
        "generation_log_probs": spoken.log_probs,
    }
    choice: Parts = {"message": message(spoken, **arrays), "finish_reason": spoken.finish}
    return {**body(chat=True, **choice), "usage": spoken.usage}


def message_chat_stream(spoken: Spoken) -> bytes:
    whole = message_chat(spoken)["choices"][0]["message"]
    first = body(chat=True, stream=True, delta={"role": "assistant", "content": spoken.text}, finish_reason=None)
    arrays = {key: value for key, value in whole.items() if "token" in key or "log" in key}
    last = body(chat=True, stream=True, delta=arrays, finish_reason=spoken.finish)
    return events(first, last, usage_chunk(spoken))


def sglang_meta(spoken: Spoken, *, pairs: list[list[Any]], total: int, finish: bool = True) -> dict[str, Any]:
    return {
        "id": "response-1",
        "finish_reason": {"type": spoken.finish, "matched": None} if finish else None,
        "prompt_tokens": len(spoken.prompt),
        "completion_tokens": spoken.counted if finish else total,
        "cached_tokens": 0,
        "weight_version": "step-7",
        "output_token_logprobs": pairs,
        "output_token_logprobs_length": total,
    }


def sglang_chat(spoken: Spoken) -> Any:
    choice: Parts = {
        "message": {**message(spoken), "reasoning_content": None, "tool_calls": None},
        "logprobs": {"content": spoken.entries()},
        "finish_reason": spoken.finish,
        "matched_stop": None,
        "prompt_token_ids": spoken.prompt,
        "response_token_ids": spoken.ids,
        "meta_info": sglang_meta(spoken, pairs=spoken.pairs(), total=len(spoken.ids)),
    }
    return {**body(chat=True, **choice), "usage": spoken.usage, "metadata": {"weight_version": "step-7"}}


def sglang_old_chat(spoken: Spoken) -> Any:
    """A build that knows only ``return_prompt_token_ids`` and ``return_meta_info``."""
    response = sglang_chat(spoken)
    del response["choices"][0]["response_token_ids"]
    return response


def sglang_extended_chat(spoken: Spoken) -> Any:
    """A server that was started to send ``sglext`` with every response."""
    response = sglang_chat(spoken)
    for name in ("response_token_ids", "prompt_token_ids", "meta_info"):
        del response["choices"][0][name]
    return {**response, "sglext": {"input_ids": spoken.prompt, "output_ids": [spoken.ids]}}


def sglang_chat_chunks(spoken: Spoken) -> list[dict[str, Any]]:
    chunks = [body(chat=True, stream=True, delta={"role": "assistant", "content": ""}, finish_reason=None)]
    for step in steps(spoken):
        entries = {"content": spoken.entries()[step : step + 1]}
        delta = {"content": spoken.texts[step]}
        chunks.append(body(chat=True, stream=True, delta=delta, logprobs=entries, finish_reason=None))
    chunks.append(body(chat=True, stream=True, delta={}, finish_reason=spoken.finish))
    extension = {"input_ids": spoken.prompt, "output_ids": [spoken.ids]}
    return [*chunks, {**usage_chunk(spoken), "usage": None, "sglext": extension}, usage_chunk(spoken)]


def sglang_chat_stream(spoken: Spoken) -> bytes:
    return events(*sglang_chat_chunks(spoken))


def sglang_framed_chat_stream(spoken: Spoken) -> bytes:
    chunks = sglang_chat_chunks(spoken)
    return events(*chunks, names={len(chunks) - 2: "sglext_ids"})


def sglang_generate(spoken: Spoken) -> Any:
    meta = sglang_meta(spoken, pairs=spoken.pairs(), total=len(spoken.ids))
    return {"text": spoken.text, "output_ids": spoken.ids, "prompt_token_ids": spoken.prompt, "meta_info": meta}


def sglang_generate_stream(spoken: Spoken, *, incremental: bool) -> bytes:
    chunks = []
    for step in steps(spoken):
        start = step if incremental else 0
        last = step == len(spoken.ids) - 1
        meta = sglang_meta(spoken, pairs=spoken.pairs(step + 1, start), total=step + 1, finish=last)
        text, ids = "".join(spoken.texts[start : step + 1]), spoken.ids[start : step + 1]
        chunks.append({"text": text, "output_ids": ids, "prompt_token_ids": spoken.prompt, "meta_info": meta})
    return events(*chunks)


def llama_chat(spoken: Spoken) -> Any:
    choice: Parts = {
        "finish_reason": spoken.finish,
        "message": message(spoken),
        "logprobs": {"content": spoken.entries("id")},
    }
    return {**body(chat=True, **choice), "usage": spoken.usage}


def llama_completion(spoken: Spoken) -> Any:
    choice: Parts = {
        "text": spoken.text,
        "logprobs": {"content": spoken.entries("id")},
        "finish_reason": spoken.finish,
    }
    return {**body(**choice), "usage": spoken.usage}


def llama_completion_stream(spoken: Spoken) -> bytes:
    chunks = []
    for step in steps(spoken):
        entries = {"content": spoken.entries("id")[step : step + 1]}
        chunks.append(body(text=spoken.texts[step], logprobs=entries, finish_reason=None))
    return events(*chunks, body(text="", finish_reason=spoken.finish), usage_chunk(spoken, "text_completion"))


def llama_native_part(spoken: Spoken, start: int, end: int, *, stop: bool) -> dict[str, Any]:
    part = {
        "index": 0,
        "content": "".join(spoken.texts[start:end]),
        "tokens": spoken.ids[start:end],
        "stop": stop,
        "tokens_predicted": spoken.counted if stop else end,
        "tokens_evaluated": len(spoken.prompt),
        "completion_probabilities": spoken.entries("id")[start:end],
    }
    stop_type = {"stop": "eos", "length": "limit"}.get(spoken.finish, spoken.finish)
    return {**part, "model": "tiny", "stop_type": stop_type} if stop else part


def llama_native(spoken: Spoken) -> Any:
    return llama_native_part(spoken, 0, len(spoken.ids), stop=True)


def llama_native_stream(spoken: Spoken) -> bytes:
    parts = [llama_native_part(spoken, step, step + 1, stop=False) for step in steps(spoken)]
    end = llama_native_part(spoken, len(spoken.ids), len(spoken.ids), stop=True)
    del end["completion_probabilities"]
    return events(*parts, end, done=False)

"""The ways in which engines say one generation: the engine adapter, the client's request, and the response.

What holds for all engines is tested for each of ``WAYS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from support.spoken import (
    Spoken,
    litellm_chat,
    litellm_chat_stream,
    llama_chat,
    llama_completion,
    llama_completion_stream,
    llama_native,
    llama_native_stream,
    message_chat,
    message_chat_stream,
    sglang_chat,
    sglang_chat_stream,
    sglang_extended_chat,
    sglang_framed_chat_stream,
    sglang_generate,
    sglang_generate_stream,
    sglang_old_chat,
    vllm_chat,
    vllm_chat_stream,
    vllm_completion,
    vllm_completion_stream,
    vllm_generate,
    vllm_generate_stream,
    vllm_spelled,
    vllm_spelled_beside,
)
from token_id_capture.server.engines import make_engine
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.testing.replay import Recording, Replayed, replay

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Way:
    """How one engine says it: the engine adapter, the client's request, and the response."""

    engine: str
    path: str
    request: dict[str, Any]
    response: Callable[[Spoken], Any]
    options: GatewaySettings = field(default_factory=GatewaySettings)

    def recording(self, spoken: Spoken, status: int = 200) -> Recording:
        said = self.response(spoken)
        stream = isinstance(said, bytes)
        kind = "text/event-stream" if stream else "application/json"
        payload = said if stream else orjson.dumps(said)
        return Recording(self.engine, "POST", self.path, orjson.dumps(self.request), status, kind, payload)

    @property
    def answers(self) -> dict[str, Recording]:
        """What llama-server's tokenizer says."""
        told = (("/apply-template", {"prompt": "rendered"}), ("/tokenize", {"tokens": Spoken().prompt}))
        return {
            path: Recording(path, "POST", path, b"", 200, "application/json", orjson.dumps(answer))
            for path, answer in told
        }


_ASKED = {"model": "tiny", "messages": MESSAGES}
_PROMPT = {"model": "tiny", "prompt": "hi"}
_IDS = {"model": "tiny", "prompt": Spoken().prompt}
_TOKENS = {"token_ids": Spoken().prompt, "sampling_params": {"max_tokens": 8}}
_INPUT = {"input_ids": Spoken().prompt, "sampling_params": {"max_new_tokens": 8}}
_ALWAYS = GatewaySettings(streaming="always")
_TOKENIZER = GatewaySettings(tokenize_prompts=True)

WAYS: dict[str, Way] = {
    "vllm-chat": Way("vllm", CHAT, _ASKED, vllm_chat),
    "vllm-chat-stream": Way("vllm", CHAT, {**_ASKED, **STREAM}, vllm_chat_stream),
    "vllm-chat-not-streamed": Way("vllm", CHAT, {**_ASKED, **STREAM}, vllm_chat, GatewaySettings(streaming="never")),
    "vllm-spelled": Way("vllm", CHAT, _ASKED, vllm_spelled),
    "vllm-spelled-beside": Way("vllm", CHAT, _ASKED, vllm_spelled_beside),
    "vllm-completion": Way("vllm", COMPLETIONS, _PROMPT, vllm_completion),
    "vllm-completion-stream": Way("vllm", COMPLETIONS, {**_PROMPT, **STREAM}, vllm_completion_stream),
    "vllm-generate": Way("vllm", "/inference/v1/generate", _TOKENS, vllm_generate),
    "vllm-generate-stream": Way("vllm", "/inference/v1/generate", {**_TOKENS, **STREAM}, vllm_generate_stream),
    "litellm-chat": Way("vllm", CHAT, _ASKED, litellm_chat),
    "litellm-chat-stream": Way("vllm", CHAT, {**_ASKED, **STREAM}, litellm_chat_stream),
    "message-chat": Way("message", CHAT, _ASKED, message_chat),
    "message-chat-stream": Way("message", CHAT, {**_ASKED, **STREAM}, message_chat_stream),
    "sglang-chat": Way("sglang", CHAT, _ASKED, sglang_chat),
    "sglang-old-chat": Way("sglang", CHAT, _ASKED, sglang_old_chat),
    "sglang-extended-chat": Way("sglang", CHAT, _ASKED, sglang_extended_chat),
    "sglang-chat-not-streamed": Way("sglang", CHAT, {**_ASKED, **STREAM}, sglang_chat),
    "sglang-chat-stream": Way("sglang", CHAT, {**_ASKED, **STREAM}, sglang_chat_stream, _ALWAYS),
    "sglang-framed-chat-stream": Way("sglang", CHAT, {**_ASKED, **STREAM}, sglang_framed_chat_stream, _ALWAYS),
    "sglang-completion": Way("sglang", COMPLETIONS, _PROMPT, vllm_completion),
    "sglang-completion-stream": Way("sglang", COMPLETIONS, {**_PROMPT, **STREAM}, vllm_completion_stream),
    "sglang-generate": Way("sglang", "/generate", _INPUT, sglang_generate),
    "sglang-generate-cumulative": Way(
        "sglang",
        "/generate",
        {**_INPUT, "stream": True},
        lambda spoken: sglang_generate_stream(spoken, incremental=False),
    ),
    "sglang-generate-incremental": Way(
        "sglang",
        "/generate",
        {**_INPUT, "stream": True},
        lambda spoken: sglang_generate_stream(spoken, incremental=True),
    ),
    "llama-chat": Way("llama-cpp", CHAT, _ASKED, llama_chat, _TOKENIZER),
    "llama-chat-not-streamed": Way("llama-cpp", CHAT, {**_ASKED, **STREAM}, llama_chat, _TOKENIZER),
    "llama-completion": Way("llama-cpp", COMPLETIONS, _IDS, llama_completion),
    "llama-completion-text": Way("llama-cpp", COMPLETIONS, _PROMPT, llama_completion, _TOKENIZER),
    "llama-completion-stream": Way("llama-cpp", COMPLETIONS, {**_IDS, **STREAM}, llama_completion_stream),
    "llama-native": Way("llama-cpp", "/completion", _IDS, llama_native),
    "llama-native-stream": Way("llama-cpp", "/completion", {**_IDS, "stream": True}, llama_native_stream),
}

SEEN_BY_AUTO = [
    name
    for name, way in WAYS.items()
    if way.path in (CHAT, COMPLETIONS)
    and way.options == GatewaySettings()
    and not name.endswith("-not-streamed")
    and not name.startswith("llama-")
]
"""The ways that a gateway understands which was not told the engine."""


async def replayed(way: Way, spoken: Spoken | None = None, *, engine: str = "", **more: Any) -> Replayed:
    """What becomes of a way's call; ``more`` is for ``replay``, and ``recording`` another response."""
    recording = more.pop("recording", None) or way.recording(spoken or Spoken())
    asked = {"request": orjson.dumps(way.request), "answers": way.answers, "settings": way.options}
    return await replay(recording, make_engine(engine or way.engine), **{**asked, **more})


def parts(body: bytes) -> list[Any]:
    """A response, or the chunks of a stream."""
    lines = [line.partition(b":")[2] for line in body.splitlines() if line.startswith(b"data:")]
    return [orjson.loads(line) for line in lines if b"[DONE]" not in line] if lines else [orjson.loads(body)]

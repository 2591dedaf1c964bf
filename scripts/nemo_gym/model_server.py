"""An unmodified model server of NeMo Gym around a stub model, configured with our sink and resolver.

Its tokens are characters, so a history that is echoed has the very ids that were sampled. Started by
``end_to_end.py`` with uvicorn and two workers; each worker builds its own endpoints.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest.mock import MagicMock

from fastapi import FastAPI
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient

CONFIG = "TOKCAP_GYM_CONFIG"


class StubModel(SimpleResponsesAPIModel):
    """Answers with the number of the items that it was sent."""

    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        raise NotImplementedError

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        items = body.model_dump(mode="json")["input"]
        answer = f"answer {len(items)}"
        message = {
            "id": f"msg_{len(items)}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": answer, "annotations": []}],
            "prompt_token_ids": [ord(letter) for item in items for letter in text_of(item)],
            "generation_token_ids": [ord(letter) for letter in answer],
            "generation_log_probs": [-0.5] * len(answer),
        }
        return NeMoGymResponse.model_validate(
            {
                "id": f"resp_{os.urandom(8).hex()}",
                "created_at": 1.0,
                "model": "stub",
                "object": "response",
                "output": [message],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
            }
        )


def text_of(item: dict[str, Any]) -> str:
    """What an item of a request says."""
    content = item.get("content")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


def app() -> FastAPI:
    """The server's own ASGI application, with the configuration of the environment."""
    config = BaseResponsesAPIModelConfig(
        host="", port=0, openai_api_key="none", entrypoint="", name="stub", num_workers=2
    )
    client = MagicMock(spec=ServerClient)
    client.global_config_dict = json.loads(os.environ[CONFIG])
    return StubModel(config=config, server_client=client).setup_webserver()

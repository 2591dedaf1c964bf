"""Functions of Gym's ``records`` that have the names of ours and another meaning.

Ours take a response and return content with the carrier's index; Gym's work on lists of items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from token_id_capture.records import TOKEN_FIELDS


def strip_token_fields(items: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """The items without token arrays, and the index of the one that carried them.

    Raises:
        ValueError: several items carry generated ids.
    """
    carriers = [at for at, item in enumerate(items) if item.get("generation_token_ids") is not None]
    if len(carriers) > 1:
        raise ValueError("multiple output items carry token metadata")
    stripped = [{name: value for name, value in item.items() if name not in TOKEN_FIELDS} for item in items]
    return stripped, carriers[0] if carriers else None


def response_to_output_items(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a response says, as items of a Responses ``output``; token arrays stay on them.

    A Responses payload has items already. A Messages payload becomes reasoning items and one message,
    a chat payload one message a choice.
    """
    output = payload.get("output")
    if isinstance(output, list) and output:
        return [item for item in output if isinstance(item, dict)]
    if payload.get("type") == "message" and payload.get("role") == "assistant":
        return list(_from_blocks(payload.get("content") or []))
    messages = (choice.get("message") for choice in payload.get("choices") or [] if isinstance(choice, Mapping))
    return [{"type": "message", "role": "assistant", **message} for message in messages if isinstance(message, dict)]


def _from_blocks(blocks: Iterable[Any]) -> Iterable[dict[str, Any]]:
    said: list[Any] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            text = block.get("thinking")
            summary = [{"type": "summary_text", "text": text}] if isinstance(text, str) else []
            yield {"type": "reasoning", "summary": summary}
        elif kind == "redacted_thinking":
            sealed = {} if block.get("data") is None else {"encrypted_content": block["data"]}
            yield {"type": "reasoning", "summary": [], **sealed}
        else:
            said.append(block)
    if said:
        yield {"type": "message", "role": "assistant", "content": said}


def usage(prompts: Sequence[int], generations: Sequence[int]) -> dict[str, int]:
    """Token counts as Gym counts them, from the lengths of a chain's prompts and generations.

    ``input_tokens`` is the first prompt alone; ours counts everything that was not sampled.
    """
    return {"input_tokens": prompts[0] if prompts else 0, "output_tokens": sum(generations)}

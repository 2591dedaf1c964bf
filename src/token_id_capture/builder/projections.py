"""The two forms in which a chain is delivered.

The *response* form is the one that NeMo Gym's trainers read: each generated item carries the whole
prompt that led to it, so its size grows with the square of the number of turns. That is the
format's nature. The flat ``Trajectory`` holds each token once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from token_id_capture.builder.chains import BuildOutput, Chain
from token_id_capture.records import strip_token_fields
from token_id_capture.tokens import LogProbs, TokenIds


@dataclass(frozen=True)
class Trajectory:
    """One training sequence of N tokens; all three have length N.

    ``loss_mask`` is 1 where the policy sampled the token and 0 elsewhere; there ``log_probs`` is 0.0.
    """

    token_ids: TokenIds
    loss_mask: list[int]
    log_probs: LogProbs


def project_chain_trajectory(chain: Chain, trained: Sequence[bool] | None = None) -> Trajectory:
    """The chain as one flat sequence; time and size are linear in its tokens.

    ``trained`` has an item a call: whether its tokens have loss; without it all have.

    Raises:
        InvalidEntryError: the chain is not contiguous.
    """
    chain.validate()
    token_ids = chain.root_prompt
    if chain.links:
        last = chain.links[-1].entry
        token_ids = TokenIds.joined(last.prompt_token_ids, last.generation_token_ids)
    loss_mask = [0] * len(token_ids)
    log_probs = bytearray(len(token_ids) * LogProbs.itemsize)
    for position, link in enumerate(chain.links):
        if trained is not None and not trained[position]:
            continue
        start = len(link.entry.prompt_token_ids)
        sampled = slice(start, start + len(link.entry.generation_token_ids))
        loss_mask[sampled] = [1] * (sampled.stop - start)
        log_probs[start * LogProbs.itemsize : sampled.stop * LogProbs.itemsize] = (
            link.entry.generation_log_probs.tobytes()
        )
    return Trajectory(token_ids, loss_mask, LogProbs.from_bytes(bytes(log_probs)))


def project_main_chain_trajectory(output: BuildOutput) -> Trajectory:
    """The main chain as one flat sequence.

    Raises:
        InvalidEntryError: there is no main chain, or it is not contiguous.
    """
    return project_chain_trajectory(output.main_chain())


def project_chain_to_output_items(chain: Chain, trained: Sequence[bool] | None = None) -> list[dict[str, Any]]:
    """The chain as items of a response's ``output``, in NeMo Gym's form.

    One item a call carries ``prompt_token_ids`` (the whole contiguous prompt),
    ``generation_token_ids``, ``generation_log_probs`` and, if captured, ``routed_experts``: the item
    at ``token_item_index``, else the last one, else an empty assistant message. The size grows with
    the square of the number of turns; ``project_chain_trajectory`` does not. ``trained`` has an item a call:
    those of which it is false carry no arrays, so that nobody trains on them.

    Raises:
        InvalidEntryError: the chain is not contiguous.
    """
    chain.validate()
    if not chain.links:
        return []
    last = chain.links[-1].entry
    # All prompts are slices of one list, so each token is one object however often it is listed.
    tokens = TokenIds.joined(last.prompt_token_ids, last.generation_token_ids).tolist()
    items: list[dict[str, Any]] = []
    for position, link in enumerate(chain.links):
        entry = link.entry
        start = len(entry.prompt_token_ids)
        content = [strip_token_fields(item) for item in entry.output_items]
        if not content:
            content = [{"type": "message", "role": "assistant", "content": []}]
        items += content
        if trained is not None and not trained[position]:
            continue
        carrier = content[-1 if entry.token_item_index is None else entry.token_item_index]
        carrier["prompt_token_ids"] = tokens[:start]
        carrier["generation_token_ids"] = tokens[start : start + len(entry.generation_token_ids)]
        carrier["generation_log_probs"] = entry.generation_log_probs.tolist()
        if entry.routed_experts is not None:
            carrier["routed_experts"] = entry.routed_experts
    return items


def project_main_chain_response(rollout_id: str, output: BuildOutput, *, model: str = "") -> dict[str, Any]:
    """The main chain as an object of the Responses shape.

    ``usage`` counts sampled tokens as output and all others of the sequence as input. Without
    ``model`` the name is the one that the last call recorded.

    Raises:
        InvalidEntryError: there is no main chain, or it is not contiguous.
    """
    return project_chain_response(rollout_id, output.main_chain(), model=model)


def project_chain_response(
    rollout_id: str, chain: Chain, trained: Sequence[bool] | None = None, *, model: str = ""
) -> dict[str, Any]:
    """Any chain in the form of ``project_main_chain_response``; ``trained`` as in ``project_chain_to_output_items``.

    Raises:
        InvalidEntryError: the chain is not contiguous.
    """
    items = project_chain_to_output_items(chain, trained)
    last = chain.links[-1].entry
    total = len(last.prompt_token_ids) + len(last.generation_token_ids)
    sampled = sum(len(link.entry.generation_token_ids) for link in chain.links)
    return {
        "id": f"rebuilt-{rollout_id}",
        "object": "response",
        "created_at": int(last.created_at),
        "model": model or last.model,
        "output": items,
        "usage": {"input_tokens": total - sampled, "output_tokens": sampled, "total_tokens": total},
    }


def assert_prefix_contiguity(response: Mapping[str, Any]) -> None:
    """Check that each generated item's prompt continues the sequence of the one before.

    Raises:
        AssertionError: one does not; the message names the item and the first position, from 0.
    """
    expected: list[int] = []
    for index, item in enumerate(response.get("output") or []):
        if not isinstance(item, Mapping) or item.get("generation_token_ids") is None:
            continue
        prompt, generation = list(item.get("prompt_token_ids") or []), list(item["generation_token_ids"])
        if prompt[: len(expected)] != expected:
            pairs = enumerate(zip(prompt, expected, strict=False))
            position = next((at for at, (found, wanted) in pairs if found != wanted), len(prompt))
            raise AssertionError(
                f"output item {index} does not continue the items before it: its prompt of {len(prompt)} tokens "
                f"differs at position {position} from their {len(expected)} tokens"
            )
        log_probs = item.get("generation_log_probs") or []
        if len(log_probs) != len(generation):
            raise AssertionError(
                f"output item {index} has {len(generation)} generated tokens and {len(log_probs)} log probabilities"
            )
        expected = prompt + generation

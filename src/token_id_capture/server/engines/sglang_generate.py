"""SGLang's ``/generate``: text or ids in, one object or an array of them out.

A response has ``text``, ``output_ids`` and ``prompt_token_ids``, and in its ``meta_info`` the id, the
counts, the finish reason and ``output_token_logprobs``, whose entries are log probability, token id
and text or null. With ``n`` above 1 or a batch it is an array of such objects.

Each chunk of a stream repeats all that came before, or with ``--incremental-streaming-output`` only
goes on from there. ``output_token_logprobs_length`` and ``completion_tokens`` count from the start in
both cases, so they tell which it is. A chunk that fits neither way spoils the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from token_id_capture.server.engines.base import ChoiceTokens, array, is_token_list, same_prompt
from token_id_capture.server.engines.weights import with_version
from token_id_capture.server.text.json_splice import Hidden
from token_id_capture.tokens import TokenIds

# What return_logprob adds to meta_info.
_LOG_PROB_MEMBERS: Final = (
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "input_top_logprobs",
    "output_top_logprobs",
)


def read_pairs(meta: Mapping[str, Any]) -> list[tuple[Any, Any]] | None:
    """The log probability and token id of each of ``output_token_logprobs``; two None where there is no entry."""
    entries = array(meta.get("output_token_logprobs"))
    if entries is None:
        return None
    return [(entry[0], entry[1]) if isinstance(entry, list) and len(entry) >= 2 else (None, None) for entry in entries]


def hidden_in_generate(body: Mapping[str, Any]) -> tuple[Hidden, ...]:
    """What a client did not ask for, in an object and in each object of an array."""
    names = [] if body.get("return_prompt_token_ids") else ["prompt_token_ids"]
    if not body.get("return_logprob"):
        names += (f"meta_info.{name}" for name in _LOG_PROB_MEMBERS)
    return tuple(Hidden.at(path, cut=True) for name in names for path in (name, f"*.{name}"))


@dataclass
class _Choice:
    """One choice as far as it has come. A pair is a log probability and the id that it is for."""

    text: str = ""
    ids: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None
    prompt: list[Any] | TokenIds | None = None
    count: Any = None
    version: str | None = None
    versions: list[Any] | None = None
    experts: Any = None
    problem: str | None = None

    def add(self, response: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Take what one object says of the choice."""
        self.count = meta.get("completion_tokens")
        self.prompt, problem = same_prompt(self.prompt, array(response.get("prompt_token_ids")) or None)
        self.problem = self.problem or problem
        self.experts = self.experts if meta.get("routed_experts") is None else meta["routed_experts"]
        total = meta.get("output_token_logprobs_length")
        total = self.count if total is None else total
        repeats, before = True, len(self.ids or self.pairs or ())
        ids = array(response.get("output_ids"))
        if ids is not None:
            self.ids, repeats = self._joined(self.ids or [], ids, total)
        pairs = read_pairs(meta)
        if pairs is not None:
            self.pairs, repeats = self._joined(self.pairs or [], pairs, total)
        version = meta.get("weight_version")
        if version is not None:
            told = with_version(self.version, self.versions, str(version), before, len(self.ids or self.pairs or ()))
            self.version, self.versions = told
        text = response.get("text")
        if isinstance(text, str):
            self.text = text if repeats else self.text + text

    def _joined(self, known: list[Any], new: list[Any], total: Any) -> tuple[list[Any], bool]:
        """``known`` with what a chunk says, of ``total`` items now; and whether it repeated what was known."""
        if not known:
            return new, True
        if type(total) is int:
            if len(new) == total and new[: len(known)] == known:
                return new, True
            if len(known) + len(new) == total:
                return known + new, False
            if len(known) == total and known[-len(new) :] == new:
                return known, False  # an aborted call sends its last token once more
        self.problem = self.problem or f"a chunk with {len(new)} tokens after {len(known)} makes {total}"
        return known + new, False


class GenerateReader:
    """A ``Reader`` for one response to the request ``body``."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        given = body.get("input_ids")
        self._given = given if is_token_list(given) else None
        self._choices: dict[int, _Choice] = {}

    def add(self, part: Any) -> Mapping[str, Any]:
        """Take an object, or an array of them, and return it as a chat with the whole messages so far."""
        shown: list[dict[str, Any]] = []
        response_id = None
        for position, response in enumerate(part if isinstance(part, list) else [part]):
            meta = response.get("meta_info") if isinstance(response, Mapping) else None
            if not isinstance(meta, Mapping):
                continue
            index = response.get("index")
            index = index if type(index) is int else position
            response_id = response_id or meta.get("id")
            choice = self._choices.setdefault(index, _Choice())
            choice.add(response, meta)
            message = {"role": "assistant", "content": choice.text}
            shown.append({"index": index, "message": message, "finish_reason": _finish_reason(meta)})
        return {"id": response_id, "choices": shown, "usage": {"completion_tokens": self._count()}}

    def tokens(self) -> dict[int, ChoiceTokens]:
        """What was collected, by choice index."""
        return {
            index: ChoiceTokens(
                prompt_ids=choice.prompt or self._given,
                ids=choice.ids,
                log_probs=None if choice.pairs is None else [pair[0] for pair in choice.pairs],
                log_prob_ids=None if choice.pairs is None else [pair[1] for pair in choice.pairs],
                routed_experts=choice.experts,
                weight_version=choice.version,
                weight_versions=choice.versions,
                problem=choice.problem,
            )
            for index, choice in self._choices.items()
        }

    def _count(self) -> int | None:
        counts = [choice.count for choice in self._choices.values()]
        return sum(counts) if counts and set(map(type, counts)) == {int} else None


def _finish_reason(meta: Mapping[str, Any]) -> Any:
    """The type of the finish reason, such as ``stop``, ``length`` or ``abort``; None while there is none."""
    reason = meta.get("finish_reason")
    return reason.get("type") if isinstance(reason, Mapping) else reason

"""What the gateway must know of an engine, and nothing else.

The gateway does the rest the same way for all of them: it sends the request, passes the response on,
compares counts, and stores. ``engines/__init__.py`` says how one is chosen; a class outside this
package that keeps the protocol ``Engine`` can be chosen too, and ``token_id_capture.testing.replay``
tries it on recorded traffic.

An engine adapter only finds things. It need not check them: arrays that are missing, too short or of the
wrong type are refused later, for all engines alike. What only the engine adapter can see goes into
``ChoiceTokens.problem``. Nothing that an engine sends may make an engine adapter raise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from token_id_capture.server.engines.weights import merged_spans, only_version, with_version
from token_id_capture.server.text.json_splice import Hidden
from token_id_capture.tokens import LogProbs, TokenIds


class Endpoint(Enum):
    """The kinds of generation endpoints whose calls are captured."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    COMPLETIONS = "completions"
    """OpenAI's text completions."""
    GENERATE = "generate"
    """An engine's own endpoint. Its reader gives parts back in the shape of chat completions."""


OPENAI_PATHS: Final[Mapping[str, Endpoint]] = MappingProxyType(
    {
        "/v1/chat/completions": Endpoint.CHAT,
        "/chat/completions": Endpoint.CHAT,
        "/v1/completions": Endpoint.COMPLETIONS,
        "/completions": Endpoint.COMPLETIONS,
    }
)
"""Where OpenAI-compatible engines serve."""


@dataclass(frozen=True, slots=True)
class PackedLogProbs:
    """The ``logprobs`` of a chat's choice, read without its entries; none of them named a token's id."""

    values: LogProbs


@dataclass
class ChoiceTokens:
    """What a response says of the tokens of one choice; None where it says nothing.

    ``ids`` and ``log_probs`` have one item for each generated token, unchecked unless they are packed.
    ``log_prob_ids`` are the ids that the log probability entries name, and ``texts`` the tokens as
    they write them: where all of them read ``token_id:N`` they give the ids. Both stand in for
    ``ids`` where there are none, and otherwise have to agree with them.

    ``routed_experts`` is opaque. ``weight_versions`` are the engine's spans of weight versions as
    it sent them, ``weight_version`` the one that made the whole choice. ``problem`` says in words
    why the tokens cannot be what was generated.
    """

    prompt_ids: list[Any] | TokenIds | None = None
    ids: list[Any] | TokenIds | None = None
    log_probs: list[Any] | LogProbs | None = None
    log_prob_ids: list[Any] | None = None
    texts: list[Any] | None = None
    routed_experts: Any = None
    weight_version: str | None = None
    weight_versions: list[Any] | None = None
    problem: str | None = None


class Reader(Protocol):
    """Collects the tokens of one response, which is one part, or as many as a stream has chunks."""

    def add(self, part: Any) -> Mapping[str, Any]:
        """Take the next part: parsed JSON, an object except where an engine's own endpoint sends arrays.

        Returns it in the shape of the OpenAI endpoints: ``choices`` with ``index``,
        ``finish_reason`` and content, ``usage.completion_tokens``, ``id`` and ``model``. For them
        that is the part itself. A stream of ``Endpoint.GENERATE`` has in each ``choices[].message``
        the whole message so far. Unknown shapes are passed over, never an error.
        """
        ...

    def tokens(self) -> dict[int, ChoiceTokens]:
        """What was collected, by choice index; empty if no part carried token arrays."""
        ...


class Engine(Protocol):
    """How one engine is asked for token ids and log probabilities, and where it puts them.

    ``body`` is the client's request, and ``body["stream"]`` says how the engine is asked, which is
    not always how the client asked.
    """

    @property
    def paths(self) -> Mapping[str, Endpoint]:
        """The paths whose POST requests are captured; ``OPENAI_PATHS`` and the engine's own."""
        ...

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """Whether a stream would carry every id and log probability.

        If not, the engine is asked for a whole response, and the client's stream is made from it.
        Not asked for ``Endpoint.GENERATE``, which always streams as the client asked.
        """
        ...

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """The top-level fields to set in the request, whatever the client sent there."""
        ...

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """A reader for the response to this request."""
        ...

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What the client of this request did not ask for, in responses and in stream chunks."""
        ...


def keeps_connections(engine: Engine) -> bool:
    """Whether a connection may be used for several calls: yes, unless the engine has ``keeps_connections = False``.

    A call on a connection that its server is just closing is lost, and cannot be sent again.
    """
    return bool(getattr(engine, "keeps_connections", True))


def reads_packed_arrays(engine: Engine) -> bool:
    """Whether its readers take ``TokenIds`` for an array of ids, and ``PackedLogProbs`` for log probabilities.

    Long prompts are read faster then. Only if the engine's own class has ``reads_packed_arrays = True``:
    one that is derived from it may read otherwise.
    """
    return bool(vars(type(engine)).get("reads_packed_arrays", False))


ENGINE_METHODS: Final = ("can_stream", "request_fields", "reader", "hidden")

Ask: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Posts a JSON object to a path of the engine, and gives the parsed response."""


class EngineAnswerError(Exception):
    """The engine answered a question of ``Ask`` with an error, or with something else than was asked."""


class TokenizesPrompts(Protocol):
    """Optional extension of an engine whose responses lack the prompt's ids, but which has a tokenizer endpoint."""

    async def prompt_ids(self, endpoint: Endpoint, body: Mapping[str, Any], ask: Ask) -> list[Any]:
        """The ids of this request's prompt, as the engine's own template and tokenizer make them.

        Raises:
            EngineAnswerError: the engine does not say.
        """
        ...


class DeltaReader:
    """A ``Reader`` for responses in OpenAI's shape whose parts each carry the tokens that are new in them.

    ``read`` finds the arrays of one part, by choice index. A bound method of a reader would make a
    cycle, and its tokens would stay until the garbage collector comes.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], dict[int, ChoiceTokens]]) -> None:
        self._read = read
        self._tokens: dict[int, ChoiceTokens] = {}

    def add(self, part: Any) -> Mapping[str, Any]:
        """Append the part's arrays; prompt ids come once, with the first part that has them."""
        if not isinstance(part, dict):
            return {}
        for index, new in self._read(part).items():
            if index in self._tokens:
                _extend(self._tokens[index], new)
            else:
                self._tokens[index] = _owned(new)
        return part

    def tokens(self) -> dict[int, ChoiceTokens]:
        """What was collected, by choice index."""
        return self._tokens


def _owned(tokens: ChoiceTokens) -> ChoiceTokens:
    """The same with lists that can be extended: the part's own lists may be shared with other readers."""
    for name in ("ids", "log_probs", "log_prob_ids", "texts"):
        if isinstance(values := getattr(tokens, name), list):
            setattr(tokens, name, list(values))
    return tokens


def _extend(known: ChoiceTokens, new: ChoiceTokens) -> None:
    """Add what a further part says of a choice."""
    before = _sampled(known)
    known.ids = _joined(known.ids, new.ids)
    known.log_probs = _joined(known.log_probs, new.log_probs)
    known.log_prob_ids = _joined(known.log_prob_ids, new.log_prob_ids)
    known.texts = _joined(known.texts, new.texts)
    known.prompt_ids, problem = same_prompt(known.prompt_ids, new.prompt_ids)
    known.problem = known.problem or new.problem or problem
    if new.routed_experts is not None:
        known.routed_experts = new.routed_experts
    if new.weight_versions is not None:
        known.weight_versions = merged_spans(known.weight_versions, new.weight_versions)
        known.weight_version = only_version(known.weight_versions)
    elif new.weight_version is not None:
        known.weight_version, known.weight_versions = with_version(
            known.weight_version, known.weight_versions, new.weight_version, before, _sampled(known)
        )


def _sampled(tokens: ChoiceTokens) -> int:
    """How many tokens of a choice have come."""
    return max(len(tokens.ids or ()), len(tokens.log_probs or ()))


_Prompt: TypeAlias = list[Any] | TokenIds | None


def same_prompt(known: _Prompt, new: _Prompt) -> tuple[_Prompt, str | None]:
    """The prompt of a choice that two places tell, and the problem if they tell different ones."""
    if known is None or new is None or known is new:
        return (new if known is None else known), None
    return known, None if known == new else "the response names two different prompts"


_Values = TypeVar("_Values", bound=list[Any] | TokenIds | LogProbs)


def _joined(known: list[Any] | _Values | None, new: list[Any] | _Values | None) -> list[Any] | _Values | None:
    if new is None:
        return known
    if known is None:
        return list(new) if isinstance(new, list) else new
    if isinstance(known, list):
        known.extend(new)
        return known
    return [*known, *new]


def choices_of(response: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The choices of a response or chunk with their indices; anything that is not a choice is skipped."""
    choices = response.get("choices")
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if isinstance(choice, dict):
            index = choice.get("index")
            yield (index if type(index) is int else position), unwrapped(choice)


PROVIDER_FIELDS: Final = "provider_specific_fields"
"""Where LiteLLM puts the members of a response, a choice, a message or a delta that OpenAI does not have."""


def unwrapped(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """A response, choice or message with the members that LiteLLM moved aside, also from its message or delta."""
    moved: dict[str, Any] = {}
    for inner in (holder.get("delta"), holder.get("message"), holder):
        fields = inner.get(PROVIDER_FIELDS) if isinstance(inner, dict) else None
        if isinstance(fields, dict):
            moved.update(fields)
    return {**moved, **{key: value for key, value in holder.items() if value is not None}} if moved else holder


def array(value: object) -> list[Any] | None:
    """``value`` if it is a list; None for all else."""
    return value if isinstance(value, list) else None


def id_array(value: object) -> list[Any] | TokenIds | None:
    """``value`` if it is a list or packed; None for all else."""
    return value if isinstance(value, list | TokenIds) else None


def entries_of(log_probs: object) -> list[Mapping[str, Any]] | None:
    """The entries of ``logprobs.content``; anything that is not an object becomes an empty one."""
    content = array(log_probs.get("content")) if isinstance(log_probs, dict) else None
    return None if content is None else [entry if isinstance(entry, dict) else {} for entry in content]


def is_token_list(value: object) -> bool:
    """Whether a prompt is given as token ids rather than as text or as several prompts."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}

"""What is decided on the prompt of one call, and what is known of it once the engine has answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from token_id_capture import reasons
from token_id_capture.provenance import Continuity, HistoryLink, Mode
from token_id_capture.records import TokenEntry
from token_id_capture.server.continuity.candidates import link_of
from token_id_capture.server.continuity.canonical import History
from token_id_capture.server.wire.response import EngineResponse
from token_id_capture.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Plan:
    """``fields`` are added to the request. ``begins_with`` is what the engine's prompt has to begin with, and
    ``whole`` says that it is all of it. ``history`` is None where an answer to the request could not be
    recognised later. ``distrust`` is called with a reason if the engine read another prompt, and ``count``
    once the call is captured.
    """

    provenance: Continuity
    history: History | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    begins_with: TokenIds | None = None
    whole: bool = False
    distrust: Callable[[str], None] = lambda reason: None
    count: Callable[[Continuity], None] = lambda made: None

    def settled(self, prompt: TokenIds) -> Continuity:
        """How the prompt was made, now that the engine told what it read."""
        expected, made = self.begins_with, self.provenance
        if expected is None:
            return made
        if not prompt.startswith(expected) or (self.whole and len(prompt) != len(expected)):
            reason = reasons.ENGINE_IGNORED_IDS if made.mode is Mode.SPLICED else reasons.RENDER_DIFFERS
            self.distrust(reason)
            return replace(made, mode=Mode.PLAIN, reason=reason)
        return replace(made, added=len(prompt) - made.kept)

    def unsent(self) -> Plan:
        """The same for a request that could not be edited."""
        made = replace(self.provenance, mode=Mode.PLAIN, reason=reasons.CONTINUITY_FAILED)
        return Plan(made, self.history, count=self.count)

    def recorded(self, entries: Sequence[TokenEntry], response: EngineResponse) -> list[HistoryLink | None]:
        """Write into the entries of a response's choices how their prompt was made.

        Returns for each of them by what a later request is recognised as its continuation.
        """
        made = self.settled(entries[0].prompt_token_ids)
        for entry in entries:
            entry.continuity = made
        self.count(made)
        if self.history is None:
            return []
        pairs = zip(entries, response.choices, strict=True)
        return [link_of(self.history, choice) if entry.generation_token_ids else None for entry, choice in pairs]

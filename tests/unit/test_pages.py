"""What pages are made from: alignments, parts of messages, pieces of texts, bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from token_id_capture.cli.output.tokenizer import TokenizerVocabulary
from token_id_capture.explanation import call_tree
from token_id_capture.lifecycle import State
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry
from token_id_capture.report.alignment import Step, steps_between
from token_id_capture.report.calls import CallPages
from token_id_capture.report.charts import MOST_SLOTS, binned, cut, doubling_bins
from token_id_capture.report.model import CallData
from token_id_capture.report.records import group_of, told_by
from token_id_capture.report.segments import Part, segments_of
from token_id_capture.store.read.evidence import Evidence
from token_id_capture.tokens import TokenIds


def made(old: Sequence[int], new: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """The new sequence again, of the old one and of what the steps put in."""
    found: list[int] = []
    for start, copied, added in steps:
        found += old[start : start + copied]
        found += new[len(found) : len(found) + added]
    return found


few_tokens = st.lists(st.integers(0, 3), max_size=120)


@given(old=few_tokens, new=few_tokens)
def test_steps_make_the_new_sequence_of_the_old_one(old: list[int], new: list[int]) -> None:
    steps = steps_between(TokenIds(old), TokenIds(new))
    assert made(old, new, steps) == new
    assert [start for start, _, _ in steps] == sorted(start for start, _, _ in steps)


def test_a_message_that_was_replaced_is_all_that_is_put_in() -> None:
    old = list(range(5_000))
    new = [*old[:1_000], *range(90_000, 90_300), *old[1_400:], 7, 8, 9]
    steps = steps_between(TokenIds(old), TokenIds(new))
    assert steps == ((0, 1_000, 300), (1_400, 3_600, 3))


CHATS: dict[str, list[tuple[str, ...]]] = {
    "ChatML": [("<|im_start|>", "user\n", "hi"), ("<|im_start|>", "assistant\n", "<think>", "x", "</think>", "yes")],
    "Llama": [
        ("<|start_header_id|>", "user", "<|end_header_id|>", "hi"),
        ("<|start_header_id|>", "ipython", "<|end_header_id|>", "7"),
    ],
    "DeepSeek": [("<｜User｜>", "hi"), ("<｜Assistant｜>", "<think>", "x")],  # noqa: RUF001
    "Qwen's tools": [("<|im_start|>", "user\n", "<tool_response>", "7"), ("<|im_start|>", "assistant\n", "yes")],
}
PARTS = {
    "ChatML": [(0, Part.USER), (3, Part.ASSISTANT), (5, Part.REASONING), (8, Part.ASSISTANT)],
    "Llama": [(0, Part.USER), (4, Part.TOOL)],
    "DeepSeek": [(0, Part.USER), (2, Part.ASSISTANT), (3, Part.REASONING)],
    "Qwen's tools": [(0, Part.TOOL), (4, Part.ASSISTANT)],
}


@pytest.mark.parametrize("template", CHATS)
def test_messages_are_found_by_the_words_of_the_template(template: str) -> None:
    assert list(segments_of([piece for message in CHATS[template] for piece in message])) == PARTS[template]


def test_a_system_message_that_explains_tool_calls_makes_none() -> None:
    pieces = ["<|im_start|>", "system\n", "Write <tool_call>", "{}", "</tool_call>", "<|im_end|>"]
    assert segments_of(pieces) == ((0, Part.SYSTEM),)
    assert segments_of(["I call ", "<tool", "_call>", "{}"], within=Part.ASSISTANT) == ((1, Part.TOOL_CALL),)


def test_pieces_of_a_byte_level_vocabulary_join_to_the_text() -> None:
    # "ö" is two bytes, each a token of its own: C3 is "Ã" in the alphabet of GPT-2, and B6 "¶".
    tokenizer = Tokenizer(BPE(vocab={"h": 0, "Ġ": 1, "Ã": 2, "¶": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    vocabulary = TokenizerVocabulary(tokenizer)
    ids = [0, 1, 2, 3, 4]
    assert [vocabulary.piece(token) for token in ids] == [b"h", b" ", b"\xc3", b"\xb6", b"<|end|>"]
    assert b"".join(map(vocabulary.piece, ids)).decode() == vocabulary.decode(ids) == "h ö<|end|>"
    assert vocabulary.piece(99) == b""


def test_pieces_of_a_vocabulary_with_marked_spaces_keep_them() -> None:
    tokenizer = Tokenizer(BPE(vocab={"▁a": 0, "b": 1, "<0xC3>": 2, "<0xB6>": 3}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = TokenizerVocabulary(tokenizer)
    assert [vocabulary.piece(token) for token in range(4)] == [b" a", b"b", b"\xc3", b"\xb6"]


def pages_of(entries: Sequence[TokenEntry]) -> CallPages:
    tree = call_tree(entries)
    snapshot = TokenCaptureSnapshot("r", tuple(entries), incomplete=False, snapshot_id="", version=0)
    return CallPages(Evidence("r", State.OPEN, 0.0, None, None, snapshot, ()), tree, None)


def entry(number: int, prompt: Sequence[int], sampled: Sequence[int]) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=f"call-{number:04}",
        prompt_token_ids=prompt,
        generation_token_ids=sampled,
        generation_log_probs=[-1.0] * len(sampled),
        created_at=1e9 + number,
    )


def test_each_token_is_embedded_once_however_deep_the_chain_is() -> None:
    history = list(range(2_000))
    entries = [entry(turn, history[: 2 * turn + 1], history[2 * turn + 1 : 2 * turn + 2]) for turn in range(900)]
    pages = pages_of(entries)
    assert [call.base for call in pages.calls] == [None, *range(1, 900)]
    assert sum(cost(call) for call in pages.calls) == 1_800


def cost(call: CallData) -> int:
    return sum(added for _, _, added in call.steps) + call.sampled


def test_a_history_that_is_edited_at_its_beginning_in_every_call_is_not_embedded_again() -> None:
    entries, history = [], list(range(400))
    for turn in range(40):
        edited = [*history[:10], 70_000 + turn, *history[11:]]
        entries.append(entry(turn, edited, range(80_000 + 100 * turn, 80_000 + 100 * turn + 20)))
        history = [*edited, *entries[-1].generation_token_ids, *range(50_000 + 10 * turn, 50_000 + 10 * turn + 5)]
    pages = pages_of(entries)
    assert sum(cost(call) for call in pages.calls) < 400 + 40 * (20 + 5 + 2)


def test_calls_beyond_the_budget_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    history = list(range(100))
    entries = [entry(turn, history[: 10 * turn + 5], history[10 * turn + 5 : 10 * turn + 10]) for turn in range(5)]
    monkeypatch.setattr("token_id_capture.report.calls.TOKEN_BUDGET", 25)
    pages = pages_of(entries)
    assert ([call.embedded for call in pages.calls], pages.left_out) == ([True, True, False, False, False], 3)


@given(first=st.floats(0, 4e9), length=st.floats(0, 1e9))
def test_slots_hold_both_ends_and_are_not_too_many(first: float, length: float) -> None:
    slots = cut(first, first + length)
    assert 1 <= slots.number <= MOST_SLOTS
    assert slots.start <= first
    assert first + length < slots.start + slots.number * slots.width + 1e-6 * (1 + first)


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_bins_hold_every_value(values: list[int]) -> None:
    bins = doubling_bins(max(values))
    assert sum(binned(values, bins)) == len(values)
    assert bins[-1] <= max(values) or max(values) == 0


def test_a_record_tells_reward_and_group() -> None:
    records: list[dict[str, Any]] = [
        {"_ng_task_index": 3, "_ng_rollout_index": 1, "reward": 1},
        {"rollout_id": "maze-7", "reward": None, "group": "maze"},
        {"reward": 1.0},
    ]
    told = told_by(records)
    assert {name: (one.reward, one.group) for name, one in told.items()} == {
        "3-1": (1.0, "3"),
        "maze-7": (None, "maze"),
    }
    assert [group_of(name) for name in ("math-17-0", "math-17-0-a2", "alone")] == ["math-17", "math-17", ""]

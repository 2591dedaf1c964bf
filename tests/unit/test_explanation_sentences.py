"""What explain says in sentences: every reason, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.call_trees import call
from token_id_capture import reasons
from token_id_capture.explanation import (
    Explanation,
    Finding,
    OpenCall,
    StoredRollout,
    explain,
)
from token_id_capture.explanation.remedies import (
    CALLED_AND_LOST,
    CALLED_AND_REFUSED,
    CALLED_TOO_LATE,
    REMEDIES,
    SENTENCES,
)
from token_id_capture.lifecycle import BuildOutcome, Flag, Outcome, State
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry


def stored(entries: Sequence[TokenEntry] = (), incomplete: bool = False, **more: Any) -> StoredRollout:
    snapshot = TokenCaptureSnapshot("r", tuple(entries), incomplete, snapshot_id="s", version=1)
    return StoredRollout("r", more.pop("state", "frozen"), snapshot, **more)


ONE = [call("only", [1], [2])]


def finding(explanation: Explanation, reason: str) -> Finding:
    return next(one for one in explanation.findings if one.reason == reason)


def test_every_reason_has_a_sentence_and_a_remedy() -> None:
    every = {**reasons.FLAG_REASONS, **reasons.BUILD_REASONS, **reasons.RELEASE_REASONS}
    assert every == SENTENCES
    assert set(REMEDIES) == set(every)
    assert all(text.endswith(".") for text in (*SENTENCES.values(), *REMEDIES.values()))


def test_every_reason_of_the_module_is_in_one_of_its_tables() -> None:
    constants = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert constants == {*SENTENCES, *reasons.CONTINUITY_REASONS}


@pytest.mark.parametrize("reason", reasons.FLAG_REASONS)
def test_every_flag_is_explained_with_its_call_and_particulars(reason: str) -> None:
    explanation = explain(stored(ONE, True, flags=[Flag("only", reason, "so it is")]))
    assert explanation.outcome == "masked"
    assert [one.reason for one in explanation.findings] == [reasons.CAPTURE_INCOMPLETE, reason]
    found = finding(explanation, reason)
    assert (found.what, found.remedy) == (SENTENCES[reason], REMEDIES[reason])
    assert found.calls == (("only", "so it is"),)


BUILDS: dict[str, StoredRollout] = {
    reasons.ABORTED_CALL: stored([call("only", [1], [2], finish_reason="abort")]),
    reasons.CAPTURE_INCOMPLETE: stored(ONE, incomplete=True),
    reasons.EMPTY_GENERATIONS: stored([call("only", [1], [])]),
    reasons.MULTIPLE_CHAINS: stored([call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 5], [6])]),
    reasons.MULTIPLE_ROOTS: stored([call("a", [1], [2]), call("b", [3], [4])]),
    reasons.NOTHING_RECORDED: stored(),
    reasons.UNRESOLVED_RETRY: stored([call("a", [1], [2]), call("b", [1], [3])]),
    reasons.BUILD_FAILED: stored([call("a", [1], [2], rollout_id="another")]),
}


@pytest.mark.parametrize("reason", BUILDS)
def test_every_outcome_of_a_build_is_explained(reason: str) -> None:
    explanation = explain(BUILDS[reason])
    assert explanation.findings[0].reason == reason
    assert explanation.findings[0].remedy
    assert explanation.headline.endswith(f": {reason}.")


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ({"flags": [Flag("only", reasons.NO_TOKEN_IDS, "")]}, CALLED_AND_LOST),
        ({"open_calls": [OpenCall("only", "process 1")]}, CALLED_AND_LOST),
        ({"refused_calls": ["only"]}, CALLED_AND_REFUSED),
        ({"late_calls": ["only"]}, CALLED_TOO_LATE),
        ({}, REMEDIES[reasons.NOTHING_RECORDED]),
    ],
)
def test_nobody_is_sent_to_check_the_url_of_a_harness_that_called(known: Any, remedy: str) -> None:
    explanation = explain(stored(incomplete=bool(known.keys() & {"flags", "open_calls"}), **known))
    assert finding(explanation, reasons.NOTHING_RECORDED).remedy == remedy


def test_a_call_whose_answer_came_after_the_freeze_says_so() -> None:
    lost = [OpenCall("slow", "process 1"), OpenCall("dead", "process 1")]
    explanation = explain(stored(ONE, True, open_calls=lost, late_calls=["slow"]))
    assert finding(explanation, reasons.CALL_LOST).calls == (
        ("slow", "begun by process 1; its answer came after the rollout was frozen"),
        ("dead", "begun by process 1"),
    )


@pytest.mark.parametrize("reason", [*reasons.BUILD_REASONS, *reasons.RELEASE_REASONS])
def test_every_recorded_reason_is_explained_when_the_captures_are_gone(reason: str) -> None:
    recorded = [BuildOutcome(1, Outcome.RELEASED, reason, {"reasons": [f"{reason}: for a test"]})]
    explanation = explain(stored(state=State.RETIRED, recorded=recorded))
    assert explanation.outcome == "retired"
    found = finding(explanation, reason)
    assert (found.what, found.calls) == (SENTENCES[reason], (("", "for a test"),))


def test_what_was_pruned_is_explained_with_the_age_that_is_in_its_reason() -> None:
    explanation = explain(
        stored(state=State.RETIRED, recorded=[BuildOutcome(1, Outcome.RELEASED, "pruned: older than 14d")])
    )
    assert explanation.headline.endswith("is: released, pruned: older than 14d.")
    (found,) = explanation.findings
    assert (found.reason, found.what, found.remedy) == (
        reasons.PRUNED,
        SENTENCES[reasons.PRUNED],
        REMEDIES[reasons.PRUNED],
    )
    assert found.calls == (("", "older than 14d"),)


def test_a_reason_of_somebody_else_is_named_and_not_explained() -> None:
    explanation = explain(stored(ONE, recorded=[BuildOutcome(1, Outcome.MASKED, "reward_is_nan")]))
    assert explanation.headline == "It is frozen. The latest outcome is: masked, reward_is_nan."
    found = finding(explanation, "reward_is_nan")
    assert "does not define this reason" in found.what
    assert "Built again now, it would be: deliverable." in explanation.notes


def test_a_sound_rollout_is_said_to_be_sound_in_every_state() -> None:
    form = "deliverable: 1 call forms one sequence of 2 tokens, 1 of them sampled."
    assert explain(stored(ONE, state=State.OPEN)).headline == f"It is open. Frozen now, it would be {form}"
    assert explain(stored(ONE)).headline.endswith(f"Built now, it would be {form}")
    delivered = explain(stored(ONE, recorded=[BuildOutcome(1, Outcome.DELIVERED, "")]))
    assert delivered.headline == f"It was delivered, and is {form}"
    assert (delivered.findings, delivered.notes) == ((), ())
    retired = explain(stored(state=State.RETIRED, recorded=[BuildOutcome(1, Outcome.DELIVERED, "")]))
    assert retired.headline == "It is retired, and its captures are deleted: it was delivered, unmasked."


def test_an_open_call_names_its_process_and_may_still_run_while_the_rollout_is_open() -> None:
    lost = [OpenCall("lost", "process 7 on here")]
    for state, detail in (
        ("open", "begun by process 7 on here; the rollout is open, so it may still run"),
        ("frozen", "begun by process 7 on here"),
    ):
        explanation = explain(stored(ONE, True, state=state, open_calls=lost))
        assert finding(explanation, reasons.CALL_LOST).calls == (("lost", detail),)


def test_a_mark_after_the_outcome_is_noticed() -> None:
    snapshot = TokenCaptureSnapshot("r", tuple(ONE), incomplete=True, snapshot_id="s", version=3)
    flags = [Flag("only", reasons.ID_MISMATCH, "")]
    rollout = StoredRollout("r", State.FROZEN, snapshot, flags, recorded=[BuildOutcome(2, Outcome.DELIVERED, "")])
    explanation = explain(rollout)
    assert "The outcome was recorded for version 2; later flags raised the version to 3." in explanation.notes
    assert "Built again now, it would be: masked, capture_incomplete." in explanation.notes


def test_what_was_left_out_without_harm_is_noted() -> None:
    entries = [
        call("a", [1], [2]),
        call("b", [1], [3]),
        call("c", [1, 2, 4], [5]),
        call("d", [1, 2, 4], [5]),
        call("e", [1, 2], []),
    ]
    explanation = explain(stored(entries, refused_calls=["x"], late_calls=["y", "z"]))
    assert explanation.outcome == "deliverable"
    assert explanation.notes == (
        "Left out as retries, of which another answer was continued: call 2.",
        "Left out as copies, token for token, of another call: call 4.",
        "Left out because nothing was generated: call 5.",
        "1 call was refused by the engine before it generated anything; nothing is missing there.",
        "2 calls came too late, after the rollout was closed for writing, and changed nothing.",
    )


def test_of_many_divergences_some_are_told_and_the_others_counted() -> None:
    entries = [call(f"c{n}", [n, n], [1]) for n in range(20)]
    found = finding(explain(stored(entries)), reasons.MULTIPLE_ROOTS)
    assert (len(found.divergences), found.more_divergences) == (5, 14)


def test_choices_that_nothing_continues_are_explained_as_choices_and_retries_as_retries() -> None:
    choices = explain(stored([call("a", [1], [2]), call("a.1", [1], [3])]))
    found = finding(choices, reasons.UNRESOLVED_RETRY)
    assert found.what == "The last call asked for several choices (n > 1) and nothing says which of them was used."
    assert "n = 1" in found.remedies[0]
    for retries in ([call("a", [1], [2]), call("b", [1], [3])], [call("a", [1], [2]), call("a.x", [1], [3])]):
        found = finding(explain(stored(retries)), reasons.UNRESOLVED_RETRY)
        assert (found.what, "n = 1" in found.remedies[0]) == (reasons.BUILD_REASONS[reasons.UNRESOLVED_RETRY], False)
    continued = explain(stored([call("a", [1], [2]), call("a.1", [1], [3]), call("b", [1, 2, 4], [5])]))
    assert "Left out as choices of a call of which another choice was continued: call 2." in continued.notes

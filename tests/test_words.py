"""One word for one thing: the words that CONTRIBUTING retired stand nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "src").rglob("*.md"),
    *(ROOT / "src").rglob("*.html"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "CHANGELOG.md",
    ROOT / "README.md",
]

# Only what has no other meaning here; "room" for space and "mark" for a mark of text are fine.
RETIRED = {
    r"repl(y|ies|ied)": "response, or answered",
    r"verdicts?": "outcome",
    r"fence[sd]?": "tombstone",
    r"(let|lets|letting) (\w+ )?go": "release",
    r"departures?": "divergence",
    r"announced (call|before)s?": "intent",
    r"strateg(y|ies)": "engine adapter",
    r"(hand|hands|handed|handing) (\w+ ){0,2}on": "deliver",
    r"but for": "except",
    r"writer gate": "writer lock",
    r"a (agent|answer|engine|entry|id|intent|open|outcome)": "an",
}

# Keys of the JSON that commands print: programs read them.
KEPT = {"cli/output/explain_text.py": {"verdict", "departures"}}


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_said_no_more(word: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PAGES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
        if match[0] not in _kept(path)
    ]
    assert not found, f"say {RETIRED[word]}"


def test_every_retired_word_would_be_found() -> None:
    said = "reply verdict fenced let it go departures announced calls strategies handed it on but for writer gate"
    said += " a outcome"
    assert all(re.search(rf"\b(?:{word})\b", said) for word in RETIRED)


def _kept(path: Path) -> set[str]:
    return next((words for place, words in KEPT.items() if path.as_posix().endswith(place)), set())

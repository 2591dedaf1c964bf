"""A disk that fails for moments, and then loses power: what was acknowledged is there, again and again.

Needs a C compiler: the calls of SQLite to the kernel are recorded and failed by a preloaded library of the tests.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torturing.check import Findings
from torturing.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import interposer
from support.children import Children, until
from support.lost_states import lost_states
from support.programs import said

_FAULTS = ("database_write_faults", "database_sync_faults")
_INSTANTS = 25


def run_disk(plan: Plan, directory: Path, seconds: float, stopped: Callable[[], bool]) -> Findings:
    """Live through outages, alone and beside another process, and lose power at many instants of each life."""
    findings = Findings()
    if reason := interposer.why_not():
        findings.counts["not run: " + reason] += 1
        return findings
    directory.mkdir()
    dice = random.Random(f"{plan.seed}/disk")
    children = Children(interposer.build(directory))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not stopped():
            life = directory / f"life-{findings.counts['lives']}"
            life.mkdir()
            _live(children, life, dice, findings)
            if findings.violations:
                return findings
            shutil.rmtree(life)
    finally:
        children.close()
    return findings


def _live(children: Children, life: Path, dice: random.Random, findings: Findings) -> None:
    control, trace, database = interposer.Control(life / "control"), life / "trace", life / "data" / "captures.db"
    watched = {"control": control.path, "trace": trace}
    database.parent.mkdir()
    if dice.random() < 0.5:
        other = life / "other.acknowledged"
        children.start("keep_open", database, other, output=life / "other.output", **watched)
        until(lambda: said(other), "the other process to open the database")
    arguments = (database, life / "life.acknowledged", control.path, dice.choice(_FAULTS), False, dice.randrange(2**32))
    child = children.start("life_with_outages", *arguments, output=life / "output", **watched)
    if child.wait() != 0:
        findings.add("error", f"a writer ended badly: {child.text()[-500:]}")
    children.end_all()
    operations = list(interposer.read_trace(trace))
    left = life / "left"
    left.mkdir()
    for problem in lost_states(operations, left, instants=_INSTANTS, seed=dice.randrange(2**32)):
        findings.add("lost", f"{problem} (kept in {life})")
    findings.counts["lives"] += 1
    findings.counts["injected errors"] += control.injected
    findings.counts["losses of power"] += 2 * _INSTANTS

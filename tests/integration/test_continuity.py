"""With ``--continuity`` a rollout is one exact sequence, however its harness restates the history."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.multi_turn import greatest_difference, run
from support.replay import Gateway, running_gateway
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.policy import Policy
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import Habits

DROPS = Habits(reasoning=True)
TIDIES = Habits(reasoning=True, tidies=True)
PLAIN = Habits(tidies=True)


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, engine: PolicyEngine, continuity: str, **options: Any) -> AsyncIterator[Gateway]:
    async with (
        serve_engine(engine) as url,
        running_gateway(
            tmp_path / "captures.db", upstream=url, engine="vllm", continuity=continuity, **options
        ) as found,
    ):
        yield found


@pytest.mark.parametrize("habits", [PLAIN, DROPS, TIDIES], ids=["tidying", "dropping", "both"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_rollout_is_one_sequence_with_exact(tmp_path: Path, habits: Habits, stream: bool) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=habits), "exact") as found:
        rollouts = await run(found.url, found.store, 12, stream=stream)
    print(rollouts.outcomes)
    assert rollouts.delivered == 12
    assert set(rollouts.outcomes) <= {"first", "spliced", "clean"}
    assert max(greatest_difference(build, Policy()) for build in rollouts.builds.values()) < 1e-9

"""What ``scripts/continuity-yield`` holds against each spliced call is true, and a call that is not right is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.multi_turn import run
from support.replay import serving
from token_id_capture.provenance import Policy
from token_id_capture.server.app import create_app
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import Habits

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("policy", "habits"),
    [(Policy.EXACT, Habits(reasoning=True, tidies=True)), (Policy.TEMPLATE, Habits(merges=True))],
)
async def test_spliced_calls_are_what_was_sampled_and_what_the_template_writes_and_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, habits: Habits
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from e2e.splices import check_splices, tapped_url

    database = tmp_path / "captures.db"
    async with serve_engine(PolicyEngine(habits=habits)) as engine:
        async with tapped_url(engine) as (url, tap):
            settings = GatewaySettings(continuity=policy)
            app = create_app(url, TokenCaptureStore(database), engine="vllm", settings=settings)
            async with serving(app) as (gateway, _), TokenCaptureStore(database) as store:
                found = await run(gateway, store, 9, turns=4)
        exchanges = tap.exchanges()
        checked = await check_splices(engine, policy, found.entries, exchanges)
        assert checked.calls == found.outcomes["spliced"] > 0
        assert checked.problems == []

        other_words = [replace(one, request=one.request.replace(b"Go on", b"Go off")) for one in exchanges]
        other_prompt = [
            replace(one, body=one.body.replace(b'"prompt_token_ids":[', b'"prompt_token_ids":[7,')) for one in exchanges
        ]
        for falsified in (other_words, other_prompt):
            assert (await check_splices(engine, policy, found.entries, falsified)).problems

"""Which sink and which source a configuration means, and when a batch that masks too much must stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from token_id_capture.config import TokenIdCaptureSettings
from token_id_capture.integrations.from_config import sink_from_config, source_from_config
from token_id_capture.protocols import install_token_sink, install_token_source
from token_id_capture.store import TokenCaptureStore


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    yield
    install_token_sink(None)
    install_token_source(None)


def config(**block: Any) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, **block}}


def test_a_directory_means_the_store_in_it(tmp_path: Path) -> None:
    for found in (sink_from_config(config(dir=tmp_path)), source_from_config(config(dir=tmp_path))):
        assert isinstance(found, TokenCaptureStore)
        assert Path(found.database).parent == tmp_path


def test_what_is_installed_goes_before_the_directory(tmp_path: Path) -> None:
    installed = TokenCaptureStore(tmp_path / "other.db")
    install_token_sink(installed)
    install_token_source(installed)
    assert sink_from_config(config(dir=tmp_path)) is installed
    assert source_from_config(config(dir=tmp_path)) is installed


def test_a_configured_sink_goes_before_an_installed_one_and_has_no_source_of_its_own(tmp_path: Path) -> None:
    install_token_sink(TokenCaptureStore(tmp_path / "other.db"))
    block = config(
        sink="token_id_capture.store:TokenCaptureStore", sink_kwargs={"database": str(tmp_path / "configured.db")}
    )
    sink = sink_from_config(block)
    assert isinstance(sink, TokenCaptureStore)
    assert Path(sink.database).name == "configured.db"
    assert source_from_config(block) is None


def test_nothing_is_captured_or_rebuilt_that_is_switched_off(tmp_path: Path) -> None:
    assert sink_from_config(config(enabled=False, dir=tmp_path)) is None
    assert source_from_config(config(enabled=False, dir=tmp_path)) is None
    assert source_from_config(config(rebuild_response=False, dir=tmp_path)) is None
    assert sink_from_config(config(rebuild_response=False, dir=tmp_path)) is not None


@pytest.mark.parametrize(
    ("masked", "finalized", "stops"), [(4, 4, False), (3, 6, False), (4, 6, True), (50, 100, False), (51, 100, True)]
)
def test_a_batch_stops_once_more_than_the_fraction_of_enough_rollouts_is_masked(
    masked: int, finalized: int, stops: bool
) -> None:
    settings = TokenIdCaptureSettings(max_mask_fraction=0.5, mask_fraction_min_samples=5)
    assert settings.too_many_masked(masked, finalized) is stops
    assert not TokenIdCaptureSettings().too_many_masked(masked, finalized)

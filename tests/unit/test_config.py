"""The configuration block: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from token_id_capture import reasons
from token_id_capture.capture.context import CaptureContext
from token_id_capture.capture.recorder import CallRecorder
from token_id_capture.config import (
    TokenIdCaptureConfig,
    TokenIdCaptureSettings,
    token_id_capture_enabled_for_agent,
)
from token_id_capture.errors import ConfigurationError
from token_id_capture.protocols import TokenSink, install_token_sink
from token_id_capture.records import TokenEntry
from token_id_capture.server.middleware import TokenCaptureMiddleware


class MemorySink:
    def __init__(self, endpoint: str = "", *, token: str = "") -> None:
        if endpoint == "unreachable":
            raise ConnectionError("nobody listens there")
        self.endpoint = endpoint

    async def put(self, entry: TokenEntry) -> None: ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None: ...

    async def close(self) -> None: ...


class SinkWithoutMark:
    mark_incomplete = "not a method"

    async def put(self, entry: TokenEntry) -> None: ...

    async def close(self) -> None: ...


class SinkOfNeMoGym(MemorySink):
    """Its marks have no reason."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:  # type: ignore[override]
        self.endpoint = f"{rollout_id} {model_call_id}"


class SinkWithAnotherMark(MemorySink):
    async def mark_incomplete(self, rollout_id: str) -> None: ...  # type: ignore[override]


NOT_A_CLASS = 3


@pytest.fixture
def no_installed_sink() -> Iterator[None]:
    install_token_sink(None)
    yield
    install_token_sink(None)


pytestmark = pytest.mark.usefixtures("no_installed_sink")


def config(top: dict[str, Any] | None = None, **block: Any) -> TokenIdCaptureConfig:
    return TokenIdCaptureConfig.model_validate({**(top or {}), "token_id_capture": block})


def test_capture_is_off_in_an_empty_configuration() -> None:
    assert not TokenIdCaptureConfig.model_validate({}).enabled


def test_an_empty_block_is_the_defaults() -> None:
    read = TokenIdCaptureConfig.model_validate({"token_id_capture": None})
    assert read.token_id_capture == TokenIdCaptureSettings()


def test_the_defaults_are_those_that_are_documented() -> None:
    assert TokenIdCaptureSettings().model_dump() == {
        "enabled": False,
        "all_agents": False,
        "dir": None,
        "sink": None,
        "lineage_store": None,
        "lineage_store_kwargs": {},
        "allow_unresolved_continuations": False,
        "delta_records": False,
        "external_staging": False,
        "external_staging_backend": None,
        "control_auth_token_env": None,
        "sink_kwargs": {},
        "rebuild_response": True,
        "max_mask_fraction": None,
        "mask_fraction_min_samples": 50,
    }


def test_a_misspelt_key_is_an_error_even_while_disabled() -> None:
    with pytest.raises(ValueError, match="max_masked_fraction"):
        config(max_masked_fraction=0.5)


def test_other_top_level_keys_are_ignored(tmp_path: Path) -> None:
    assert config({"policy_model": {"port": 1}}, enabled=True, dir=str(tmp_path)).enabled


def test_settings_are_kept_and_not_checked_while_disabled() -> None:
    block = config(enabled=False, dir="relative", sink="nonsense", max_mask_fraction=7, mask_fraction_min_samples=0)
    assert block.token_id_capture.dir == Path("relative")
    assert block.token_id_capture.sink == "nonsense"
    assert block.token_id_capture.max_mask_fraction == 7
    assert block.build_sink() is None


def test_enabled_needs_somewhere_to_write() -> None:
    with pytest.raises(ValueError, match=r"set token_id_capture\.dir"):
        config(enabled=True)


def test_the_directory_falls_back_to_that_of_the_model_calls(tmp_path: Path) -> None:
    top = {"model_call_capture_dir": str(tmp_path / "calls")}
    assert config(top, enabled=True).resolved_dir() == tmp_path / "calls"
    assert config(top, enabled=True, dir=tmp_path / "own").resolved_dir() == tmp_path / "own"


@pytest.mark.parametrize("key", ["dir", "model_call_capture_dir"])
def test_a_relative_directory_is_refused_by_name(key: str) -> None:
    whole: dict[str, Any] = {"token_id_capture": {"enabled": True}}
    (whole["token_id_capture"] if key == "dir" else whole)[key] = "some/where"
    with pytest.raises(ValueError, match="'some/where' must be an absolute path"):
        TokenIdCaptureConfig.model_validate(whole)


def test_an_installed_sink_needs_no_directory() -> None:
    install_token_sink(MemorySink())
    assert config(enabled=True).resolved_dir() is None


def test_without_rebuilding_no_directory_is_needed() -> None:
    assert config(enabled=True, rebuild_response=False).enabled


def test_a_sink_beside_a_directory_warns_that_nothing_is_written_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config(enabled=True, dir=tmp_path, sink=f"{__name__}:MemorySink")
    assert f"nothing is written to token_id_capture.dir ({tmp_path})" in caplog.text


def test_a_sink_alone_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config({"model_call_capture_dir": "/captures"}, enabled=True, sink=f"{__name__}:MemorySink")
    assert not caplog.records


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_mask_fraction_outside_zero_to_one_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        config(enabled=True, dir=tmp_path, max_mask_fraction=fraction)


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_both_ends_of_the_mask_fraction_are_allowed(tmp_path: Path, fraction: float) -> None:
    assert config(enabled=True, dir=tmp_path, max_mask_fraction=fraction).enabled


def test_the_least_number_of_samples_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        config(enabled=True, dir=tmp_path, mask_fraction_min_samples=0)


def test_the_sink_is_built_with_its_arguments() -> None:
    sink = config(enabled=True, sink=f"{__name__}:MemorySink", sink_kwargs={"endpoint": "e"}).build_sink()
    assert type(sink).__name__ == "MemorySink"
    assert sink.endpoint == "e"  # type: ignore[union-attr]


def test_no_sink_is_built_for_a_directory(tmp_path: Path) -> None:
    assert config(enabled=True, dir=tmp_path).build_sink() is None


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("no_colon", {}, "'module.path:ClassName'"),
        (":Class", {}, "'module.path:ClassName'"),
        ("module:", {}, "'module.path:ClassName'"),
        ("a:b:c", {}, "'module.path:ClassName'"),
        ("no_such_module_here:Sink", {}, "ModuleNotFoundError"),
        (f"{__name__}:Nothing", {}, "AttributeError"),
        (f"{__name__}:NOT_A_CLASS", {}, "is not a class but int"),
        (f"{__name__}:MemorySink", {"port": 1}, r"\(sink_kwargs: port\): TypeError"),
        (f"{__name__}:MemorySink", {"endpoint": "unreachable"}, "ConnectionError: nobody listens there"),
        (f"{__name__}:SinkWithoutMark", {}, "is not a token sink: it lacks mark_incomplete"),
        (f"{__name__}:SinkWithAnotherMark", {}, "must take a rollout id, a call id and a reason"),
    ],
)
def test_a_sink_that_cannot_be_used_is_named_when_it_is_built(
    target: str, kwargs: dict[str, Any], message: str
) -> None:
    read = config(enabled=True, sink=target, sink_kwargs=kwargs)
    with pytest.raises(ConfigurationError, match=message):
        read.build_sink()


_ANOTHER_MARK = cast(TokenSink, SinkWithAnotherMark())


def test_a_sink_that_cannot_take_a_mark_is_refused_wherever_it_is_given(no_installed_sink: None) -> None:
    with pytest.raises(TypeError, match="must take a rollout id"):
        install_token_sink(_ANOTHER_MARK)
    with pytest.raises(TypeError, match="must take a rollout id"):
        TokenCaptureMiddleware(_no_app, sink=_ANOTHER_MARK)


async def _no_app(scope: Any, receive: Any, send: Any) -> None: ...


async def test_a_sink_whose_marks_have_no_reason_gets_every_mark() -> None:
    sink = SinkOfNeMoGym()
    recorder = CallRecorder(CaptureContext("r", "c", cast(TokenSink, sink)))
    await recorder.begin()
    await recorder.flag(reasons.NO_TOKEN_IDS, "none came")
    assert sink.endpoint == "r c"


async def test_a_call_whose_loss_could_not_be_told_is_not_sent() -> None:
    with pytest.raises(TypeError, match="must take a rollout id"):
        await CallRecorder(CaptureContext("r", "c", _ANOTHER_MARK)).begin()


def test_a_sink_module_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sink_that_breaks.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigurationError, match="'sink_that_breaks:Sink' could not be loaded: RuntimeError: no l"):
        config(enabled=True, sink="sink_that_breaks:Sink").build_sink()


def test_secrets_of_a_sink_are_not_printed() -> None:
    secret = {"token": "s3cret"}
    assert "s3cret" not in repr(config(enabled=True, sink=f"{__name__}:MemorySink", sink_kwargs=secret))
    with pytest.raises(ValueError, match="max_mask_fraction") as refused:
        config(enabled=True, sink=f"{__name__}:MemorySink", sink_kwargs=secret, max_mask_fraction=2)
    assert "s3cret" not in str(refused.value)


def agents(**flags: Any) -> dict[str, Any]:
    return {name: {"responses_api_agents": {"simple": {"token_id_capture": flag}}} for name, flag in flags.items()}


def test_an_agent_is_captured_by_its_own_flag(tmp_path: Path) -> None:
    whole = {"token_id_capture": {"enabled": True, "dir": tmp_path}, **agents(coder=True, judge=False)}
    assert token_id_capture_enabled_for_agent(whole, "coder")
    assert not token_id_capture_enabled_for_agent(whole, "judge")
    assert not token_id_capture_enabled_for_agent(whole, "unknown")
    assert not token_id_capture_enabled_for_agent(whole, None)


def test_all_agents_captures_every_agent(tmp_path: Path) -> None:
    whole = {"token_id_capture": {"enabled": True, "all_agents": True, "dir": tmp_path}}
    assert token_id_capture_enabled_for_agent(whole, None)


def test_no_agent_is_captured_while_disabled() -> None:
    whole = {"token_id_capture": {"all_agents": True}, **agents(coder=True)}
    assert not token_id_capture_enabled_for_agent(whole, "coder")


@pytest.mark.parametrize("entry", [3, {"responses_api_agents": 3}, {"responses_api_agents": {"simple": 3}}])
def test_an_entry_that_is_no_agent_is_not_captured(tmp_path: Path, entry: Any) -> None:
    whole = {"token_id_capture": {"enabled": True, "dir": tmp_path}, "coder": entry}
    assert not token_id_capture_enabled_for_agent(whole, "coder")

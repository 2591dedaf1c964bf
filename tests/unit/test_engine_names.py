"""How the engine that ``--engine`` names is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from token_id_capture.errors import ConfigurationError
from token_id_capture.server.engines import ENGINES, make_engine
from token_id_capture.server.engines.vllm import VllmEngine


def test_an_engine_is_found_by_its_name_by_a_class_or_not_at_all() -> None:
    for name in ENGINES:
        assert make_engine(name).paths
    assert make_engine("token_id_capture.server.engines.vllm:VllmEngine").paths
    for name, problem in (
        ("ollama", "unknown engine 'ollama': choose one of auto, llama-cpp, message, sglang, vllm, or name a class"),
        ("nobody.knows:It", "engine 'nobody.knows:It' could not be loaded: ModuleNotFoundError"),
        ("token_id_capture.errors:Nothing", "could not be loaded: AttributeError"),
        ("collections:OrderedDict", "is not an engine: it lacks can_stream, request_fields, reader, hidden, paths"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            make_engine(name)


def test_a_package_can_register_an_engine_under_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "their_engine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[token_id_capture.engines]\ntheirs = token_id_capture.server.engines.vllm:VllmEngine\nbroken = nobody:It\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_engine("theirs"), VllmEngine)
    with pytest.raises(ConfigurationError, match="engine 'broken' could not be loaded: ModuleNotFoundError"):
        make_engine("broken")
    with pytest.raises(
        ConfigurationError, match="choose one of auto, broken, llama-cpp, message, sglang, theirs, vllm"
    ):
        make_engine("other")

"""What the package root exports, and how little it loads."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

import token_id_capture

HEAVY = {
    "aiohttp",
    "aiosqlite",
    "alembic",
    "asyncpg",
    "pydantic_settings",
    "rich",
    "sqlalchemy",
    "starlette",
    "typer",
    "uvicorn",
}

KNOWN_TO_USERS_OF_NEMO_GYM = {
    *("TokenEntry", "TOKEN_FIELDS", "TOKEN_ENTRY_RECORD_SCHEMA_VERSION", "extract_token_fields"),
    *("response_to_output_items", "strip_token_fields"),
    *("TokenCaptureSnapshot", "TokenSink", "TokenSource", "install_token_sink", "installed_token_sink"),
    *("install_token_source", "installed_token_source"),
    *("CaptureContext", "set_token_sink", "reset_token_sink", "current_capture_context"),
    *("register_call_intent", "capture_tokens", "commit_entry"),
    *("TokenCaptureStore", "make_token_store", "validate_rollout_id"),
    *("Chain", "ChainLink", "BuildNotes", "BuildOutput", "per_request", "prefix_merging", "run_builder"),
    *("project_chain_to_output_items", "project_main_chain_response", "assert_prefix_contiguity"),
    *("trajectories_from_source", "trajectories_for_rollout", "clear_token_captures_for_rollouts"),
    "token_id_capture_dirs_from_config",
    *("TokenIdCaptureConfig", "TokenIdCaptureSettings"),
}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after this code."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def test_importing_the_package_loads_only_the_standard_library() -> None:
    third_party = loaded_by("import token_id_capture") - loaded_by("") - sys.stdlib_module_names
    assert third_party == {"token_id_capture"}


def test_all_names_but_the_store_and_the_client_come_with_pydantic_and_nothing_heavier() -> None:
    heavy = {"HandOffClient", "TokenCaptureStore", "make_token_store"}
    names = [name for name in token_id_capture.__all__ if name not in heavy]
    loaded = loaded_by(f"from token_id_capture import {', '.join(names)}")
    assert "pydantic" in loaded
    assert not loaded & HEAVY


def test_the_store_loads_on_first_use() -> None:
    assert "sqlalchemy" in loaded_by("from token_id_capture import TokenCaptureStore")


@pytest.mark.parametrize("name", token_id_capture.__all__)
def test_every_exported_name_can_be_imported(name: str) -> None:
    assert getattr(token_id_capture, name) is not None
    assert name in dir(token_id_capture)


def test_the_exports_are_sorted_and_each_stands_once() -> None:
    assert token_id_capture.__all__ == sorted(set(token_id_capture.__all__))


def test_the_names_that_users_of_the_file_based_store_know_are_there() -> None:
    assert set(token_id_capture.__all__) >= KNOWN_TO_USERS_OF_NEMO_GYM


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'TokenCaptureShop'"):
        token_id_capture.TokenCaptureShop  # type: ignore[attr-defined]  # noqa: B018  the access is the test


def test_delivery_is_not_imported_with_the_root() -> None:
    code = "import sys, token_id_capture; assert 'token_id_capture.delivery' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(token_id_capture.__file__).parent / "py.typed").is_file()


def test_the_distribution_installs_the_command() -> None:
    scripts = metadata.distribution("token-id-capture").entry_points.select(group="console_scripts")
    assert [(script.name, script.value) for script in scripts] == [("tokcap", "token_id_capture.cli.main:main")]


def test_every_library_that_is_imported_is_declared() -> None:
    sources = Path(token_id_capture.__file__).parent.rglob("*.py")
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    # nemo_gym imports the integration, not the other way round, and who trains with torch chose a build of it.
    ours = {"token_id_capture", "nemo_gym", "torch"}
    libraries = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - ours
    assert "pydantic" in libraries
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    distributions = metadata.packages_distributions()
    undeclared = {
        library
        for library in libraries
        if not {name.lower().replace("_", "-") for name in distributions[library]} & declared
    }
    assert not undeclared

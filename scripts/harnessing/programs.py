"""The harnesses: which packages they are, and how each is told where its model is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

NODE_PACKAGES: Final = (
    "@anthropic-ai/claude-code@2.1.332",
    "@openai/codex@0.171.0",
    "opencode-ai@1.18.33",
    "@google/gemini-cli@0.61.0",
)
PYTHON_PACKAGES: Final = ("mini-swe-agent==2.4.6", "openhands-sdk==1.58.2", "openhands-tools==1.58.2")
_PYTHONS: Final = ("python3.13", "python3.12")  # openhands-sdk needs one of these
# What npm would run after an installation, where it is allowed to: they fetch nothing, and link the program.
_AFTERWARDS: Final = (("@anthropic-ai/claude-code", "install.cjs"), ("opencode-ai", "postinstall.mjs"))


@dataclass(frozen=True)
class Place:
    """Where a run happens: a base URL of its rollout, a home, and a workspace with ``notes.txt``.

    ``compacts``: the program is to compact its history in between.
    """

    base: str
    home: Path
    workspace: Path
    programs: Path
    compacts: bool = False

    def node(self, name: str) -> str:
        return str(self.programs / "node_modules" / ".bin" / name)

    def python(self, name: str) -> str:
        return str(self.programs / "python" / "bin" / name)


@dataclass(frozen=True)
class Harness:
    """``prepare`` writes the files that the program reads, and gives its command for a task.

    ``history`` is the mode of ``tokcap serve`` that keeps its rollout one sequence. ``compacts``: it can be made to
    compact its history, ends well, and goes on.
    """

    name: str
    prepare: Callable[[Place, str], list[str]]
    environment: Callable[[Place], dict[str, str]] = field(default=lambda place: {})
    history: str = "exact"
    compacts: bool = False


def install(folder: Path) -> None:
    """Install what is missing.

    Raises:
        OSError: npm or a Python that the packages need is not there.
        subprocess.CalledProcessError: npm or pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _once(folder / ".installed", NODE_PACKAGES, partial(_install_node, folder))
    _once(folder / ".installed-python", PYTHON_PACKAGES, partial(_install_python, folder / "python"))


def _once(done: Path, packages: tuple[str, ...], make: Callable[[], None]) -> None:
    wanted = "\n".join(packages)
    if not done.exists() or done.read_text() != wanted:
        make()
        done.write_text(wanted)


def _install_node(folder: Path) -> None:
    (folder / "package.json").write_text("{}")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *NODE_PACKAGES], cwd=folder, check=True
    )
    for package, script in _AFTERWARDS:
        subprocess.run(["node", script], cwd=folder / "node_modules" / package, check=True)


def _install_python(folder: Path) -> None:
    for python in _PYTHONS:
        if shutil.which(python) and subprocess.run([python, "-m", "venv", "--clear", folder]).returncode == 0:
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PYTHON_PACKAGES], check=True)
            return
    raise FileNotFoundError(f"none of {', '.join(_PYTHONS)} is on the PATH")


# LiteLLM asks the network for prices otherwise.
_LITELLM: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_OPENHANDS_TASK: Final = Path(__file__).with_name("openhands_task.py")


def _claude(place: Place, task: str) -> list[str]:
    return [place.node("claude"), "-p", task, "--dangerously-skip-permissions"]


def _claude_environment(place: Place) -> dict[str, str]:
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    return {"ANTHROPIC_BASE_URL": place.base, "ANTHROPIC_API_KEY": "key", **dict.fromkeys(quiet, "1")}


def _codex(place: Place, task: str) -> list[str]:
    config = place.home / ".codex" / "config.toml"
    config.parent.mkdir()
    # Codex compacts at a limit of its own, and gives up on the engine's. Its first prompt has 38,000 tokens here.
    limit = "model_auto_compact_token_limit = 45000\n" if place.compacts else ""
    config.write_text(
        f'{limit}model = "a-model"\nmodel_provider = "tokcap"\ncheck_for_update_on_startup = false\n'
        f'[analytics]\nenabled = false\n[model_providers.tokcap]\nname = "tokcap"\nbase_url = "{place.base}/v1"\n'
        'env_key = "MODEL_KEY"\nwire_api = "responses"\n'
    )
    return [place.node("codex"), "exec", "--dangerously-bypass-approvals-and-sandbox", task]


def _opencode(package: str) -> Callable[[Place, str], list[str]]:
    def prepare(place: Place, task: str) -> list[str]:
        provider = {
            "npm": package,
            "options": {"baseURL": f"{place.base}/v1", "apiKey": "key"},
            "models": {"policy": {"name": "policy", "reasoning": True}},
        }
        config = {"provider": {"tokcap": provider}, "model": "tokcap/policy", "autoupdate": False, "share": "disabled"}
        (place.workspace / "opencode.json").write_text(json.dumps(config))
        return [place.node("opencode"), "run", task]

    return prepare


def _opencode_environment(place: Place) -> dict[str, str]:
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE")
    return {f"OPENCODE_DISABLE_{name}": "1" for name in off}


def _gemini(place: Place, task: str) -> list[str]:
    settings = place.home / ".gemini" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(
        json.dumps(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "general": {"enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
            }
        )
    )
    return [place.node("gemini"), "--yolo", "--skip-trust", "-m", "gemini-2.5-pro", "-p", task]


def _gemini_environment(place: Place) -> dict[str, str]:
    return {"GOOGLE_GEMINI_BASE_URL": place.base, "GEMINI_API_KEY": "key", "GEMINI_CLI_TRUST_WORKSPACE": "true"}


_MINI_STEPS: Final = "agent.step_limit=5"  # it asks again as long as an answer calls no tool


def _mini(model: str, path: str = "") -> Callable[[Place, str], list[str]]:
    def prepare(place: Place, task: str) -> list[str]:
        command = [
            place.python("mini"),
            "-m",
            model,
            "-t",
            task,
            "-y",
            "--exit-immediately",
            "-c",
            "mini.yaml",
            "-c",
            _MINI_STEPS,
        ]
        api = (f"model.model_kwargs.api_base={place.base}{path}", "model.model_kwargs.api_key=key")
        return [*command, "-c", api[0], "-c", api[1]]

    return prepare


def _mini_environment(place: Place) -> dict[str, str]:
    # It repeats whatever fails, for minutes unless told otherwise.
    quick = {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3"}
    return {**_LITELLM, **quick, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}


def _openhands_environment(place: Place) -> dict[str, str]:
    return {**_LITELLM, "OPENHANDS_SUPPRESS_BANNER": "1"}


def _openhands(model: str, path: str = "") -> Callable[[Place, str], list[str]]:
    def prepare(place: Place, task: str) -> list[str]:
        return [place.python("python"), str(_OPENHANDS_TASK), model, place.base + path, task]

    return prepare


HARNESSES: Final = (
    Harness("claude-code", _claude, _claude_environment, compacts=True),
    Harness("codex", _codex, lambda place: {"MODEL_KEY": "key"}, compacts=True),
    Harness("opencode-chat", _opencode("@ai-sdk/openai-compatible"), _opencode_environment),
    Harness("opencode-responses", _opencode("@ai-sdk/openai"), _opencode_environment),
    Harness("opencode-messages", _opencode("@ai-sdk/anthropic"), _opencode_environment),
    Harness("gemini-cli", _gemini, _gemini_environment),
    Harness("mini-swe-agent", _mini("openai/policy", "/v1"), _mini_environment),
    Harness("mini-swe-agent-messages", _mini("anthropic/policy"), _mini_environment),
    Harness("openhands-chat", _openhands("openai/policy", "/v1"), _openhands_environment, "full"),
    Harness("openhands-responses", _openhands("openai/gpt-5.2", "/v1"), _openhands_environment, "full"),
    Harness("openhands-messages", _openhands("anthropic/policy"), _openhands_environment, "full"),
)


def environment_of(harness: Harness, place: Place) -> dict[str, str]:
    """The environment of a program: nothing of the user's own but what finds programs."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "HOME": str(place.home), "CI": "1", **harness.environment(place)}

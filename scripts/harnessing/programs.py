"""The harnesses: which packages they are, and how each is told where its model is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

NODE_PACKAGES: Final = (
    "@anthropic-ai/claude-code@2.1.332",
    "@openai/codex@0.171.0",
    "opencode-ai@1.18.33",
    "@google/gemini-cli@0.61.0",
)
# What npm would run after an installation, where it is allowed to: they fetch nothing, and link the program.
_AFTERWARDS: Final = (("@anthropic-ai/claude-code", "install.cjs"), ("opencode-ai", "postinstall.mjs"))


@dataclass(frozen=True)
class Place:
    """Where a run happens: a base URL of its rollout, a home, and a workspace with ``notes.txt``."""

    base: str
    home: Path
    workspace: Path
    programs: Path

    def node(self, name: str) -> str:
        return str(self.programs / "node_modules" / ".bin" / name)


@dataclass(frozen=True)
class Harness:
    """``prepare`` writes the files that the program reads, and gives its command for a task."""

    name: str
    prepare: Callable[[Place, str], list[str]]
    environment: Callable[[Place], dict[str, str]] = field(default=lambda place: {})


def install(folder: Path) -> None:
    """Install what is missing.

    Raises:
        subprocess.CalledProcessError: npm failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / ".installed"
    wanted = "\n".join(NODE_PACKAGES)
    if done.exists() and done.read_text() == wanted:
        return
    (folder / "package.json").write_text("{}")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *NODE_PACKAGES], cwd=folder, check=True
    )
    for package, script in _AFTERWARDS:
        subprocess.run(["node", script], cwd=folder / "node_modules" / package, check=True)
    done.write_text(wanted)


def _claude(place: Place, task: str) -> list[str]:
    return [place.node("claude"), "-p", task, "--dangerously-skip-permissions"]


def _claude_environment(place: Place) -> dict[str, str]:
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    return {"ANTHROPIC_BASE_URL": place.base, "ANTHROPIC_API_KEY": "key", **dict.fromkeys(quiet, "1")}


def _codex(place: Place, task: str) -> list[str]:
    config = place.home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(
        f'model = "a-model"\nmodel_provider = "tokcap"\ncheck_for_update_on_startup = false\n'
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


HARNESSES: Final = (
    Harness("claude-code", _claude, _claude_environment),
    Harness("codex", _codex, lambda place: {"MODEL_KEY": "key"}),
    Harness("opencode-chat", _opencode("@ai-sdk/openai-compatible"), _opencode_environment),
    Harness("opencode-responses", _opencode("@ai-sdk/openai"), _opencode_environment),
    Harness("opencode-messages", _opencode("@ai-sdk/anthropic"), _opencode_environment),
    Harness("gemini-cli", _gemini, _gemini_environment),
)


def environment_of(harness: Harness, place: Place) -> dict[str, str]:
    """The environment of a program: nothing of the user's own but what finds programs."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "HOME": str(place.home), "CI": "1", **harness.environment(place)}

"""Run a command of NeMo Gym with its token capture in a database of ours.

Gym's servers are configured by the block ``token_id_capture``, and each builds its own sink. What no
configuration reaches is the collector: it reads through a source that must be installed in its own
process, and it clears the ids that it is about to run only where it knows a directory. So the
command runs in this process, after the endpoints are installed.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from token_id_capture.errors import ConfigurationError
from token_id_capture.integrations.nemo_gym.endpoints import CaptureSink, CaptureSource, LineageStore
from token_id_capture.integrations.nemo_gym.synchronous import TokenCaptureStore

ENDPOINTS: Final = "token_id_capture.integrations.nemo_gym"


def overrides(database: Path) -> list[str]:
    """The settings that make Gym's servers write to ``database``, as overrides of a command line."""
    given = f"{{database:'{database}'}}"
    return [
        "++token_id_capture.enabled=true",
        f"++token_id_capture.sink={ENDPOINTS}:CaptureSink",
        f"++token_id_capture.sink_kwargs={given}",
        f"++token_id_capture.lineage_store={ENDPOINTS}:LineageStore",
        f"++token_id_capture.lineage_store_kwargs={given}",
    ]


def install(database: Path) -> None:
    """Make this process a collector, and a server, of ``database``.

    Raises:
        ConfigurationError: ``nemo_gym`` is not installed, or has no token capture.
    """
    try:
        from nemo_gym.token_id_capture import protocols
    except ImportError as error:
        raise ConfigurationError(
            f"NeMo Gym's token capture cannot be imported ({error}): install nemo-gym 0.6 or newer here"
        ) from error
    protocols.install_token_sink(CaptureSink(database))
    protocols.install_lineage_store(LineageStore(database))
    protocols.install_token_source(CaptureSource(database))
    _clear_before_dispatch(database)


def _clear_before_dispatch(database: Path) -> None:
    """Let the collector clear our store where it would clear its own.

    Ids repeat between runs, and those of an earlier run take no calls any more.
    """
    from nemo_gym import rollout_collection
    from nemo_gym.base_responses_api_model import maybe_rollout_id_from_run_body

    configured: Callable[[Any], list[Path]] = rollout_collection.token_id_capture_dirs_from_config

    def directories(config: Any) -> list[Path]:
        return configured(config) or [database.parent]

    def clear(records: Sequence[Mapping[str, Any]], directories: Sequence[Path]) -> None:
        store = TokenCaptureStore(database)
        for record in records:
            rollout_id = maybe_rollout_id_from_run_body(record)
            if rollout_id:
                store.delete(rollout_id)
        store.stop()

    rollout_collection.token_id_capture_dirs_from_config = directories
    rollout_collection.clear_token_captures_for_rollouts = clear


def run(command: Sequence[str]) -> None:
    """Run a console script or a Python file in this process, with its arguments.

    Raises:
        ConfigurationError: there is no such script.
        SystemExit: whatever the command ends with.
    """
    name = command[0]
    sys.argv = list(command)
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
        return
    found = entry_points(group="console_scripts", name=Path(name).name)
    if not found:
        raise ConfigurationError(
            f"{name!r} is neither a Python file nor a command of an installed package: "
            "name one of NeMo Gym's, such as ng_collect_rollouts"
        )
    sys.exit(next(iter(found)).load()())

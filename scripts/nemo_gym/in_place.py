"""A pytest plugin: NeMo Gym's own tests with this store in place of its file store.

Loaded with ``-p in_place`` before Gym's modules are collected, so that what the tests import by name is ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemo_gym.token_id_capture as package
from nemo_gym.token_id_capture import consumer, lineage, store

from token_id_capture.integrations.nemo_gym import LineageStore, TokenCaptureStore, make_token_store


class FileLineageStore(LineageStore):
    """Gym names the directory ``root`` and passes settings of its cache."""

    def __init__(self, root: str | Path, **cache: Any) -> None:
        super().__init__(root)


def replace(name: str, value: object) -> None:
    """Put ``value`` where a module of Gym has ``name``."""
    for module in (package, store, lineage, consumer):
        if hasattr(module, name):
            setattr(module, name, value)


replace("TokenCaptureStore", TokenCaptureStore)
replace("FileLineageStore", FileLineageStore)
replace("make_token_store", make_token_store)

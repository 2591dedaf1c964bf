"""The sink and the source that a framework's configuration means, in the process that asks.

::

    app = TokenCaptureMiddleware(app, sink=sink_from_config(config))        # in the model server
    built = await finalize_rollout_token_capture(record, source_from_config(config))   # in the trainer

Only here a configuration becomes an object: reading it (``config``) opens nothing, and the store knows
no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.config import TokenIdCaptureConfig
from token_id_capture.protocols import TokenSink, TokenSource, installed_token_sink, installed_token_source
from token_id_capture.store import make_token_store


def sink_from_config(config: Mapping[str, Any]) -> TokenSink | None:
    """The configured sink, else the installed one, else the store of the directory; None if capture is off.

    Call it once in each server process, at its start: a sink that a launcher installs does not reach the
    workers that it spawns.

    Raises:
        ValueError: the block ``token_id_capture`` is malformed, or its sink cannot be constructed.
    """
    settings = TokenIdCaptureConfig.model_validate(config)
    if not settings.enabled:
        return None
    for sink in (settings.build_sink(), installed_token_sink()):
        if sink is not None:
            return sink
    return make_token_store(config)


def source_from_config(config: Mapping[str, Any]) -> TokenSource | None:
    """The installed source, else the store of the directory; None if this configuration does not rebuild.

    It does not where capture is off or ``rebuild_response`` is false, or where a custom sink owns the
    records and no source was installed for it. ``finalize_rollout_token_capture`` takes None for "leave the
    record as it is".

    Raises:
        ValueError: the block ``token_id_capture`` is malformed.
    """
    settings = TokenIdCaptureConfig.model_validate(config)
    if not settings.enabled or not settings.token_id_capture.rebuild_response:
        return None
    installed = installed_token_source()
    return installed if installed is not None else make_token_store(config)

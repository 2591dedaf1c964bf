"""``tokcap serve``: the gateway as a server of one or several processes.

The parent binds the socket and checks what it can before anything starts, so that a wrong port,
database or upstream is one line and not a crash loop. Workers get their settings through the
environment, and each opens the store for itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from token_id_capture.cli.options import DatabaseOption, LogFormat, fail, printable, run
from token_id_capture.cli.serving.keys import check_key_file, refuse_one_key
from token_id_capture.cli.serving.listening import address_of, listener_at
from token_id_capture.cli.serving.options import (
    AccessLogOption,
    AllowedHostsOption,
    BodyBytesOption,
    BodyLimitOption,
    ChatHistoryOption,
    CheckOption,
    ClientTimeoutOption,
    ConcurrencyOption,
    ConnectTimeoutOption,
    ContinuityOption,
    DrainOption,
    EngineOption,
    FreeSpaceOption,
    HandOffKeyOption,
    HeadTimeoutOption,
    HistoryOption,
    HostOption,
    InlineSystemOption,
    InsecureOption,
    KeyOption,
    LogFormatOption,
    LogProbsModeOption,
    MaxTokensOption,
    ModelOption,
    OperatorKeyOption,
    PortOption,
    ReadTimeoutOption,
    SessionHeadersOption,
    ShutdownOption,
    StreamingOption,
    TokenizePromptsOption,
    TracesOption,
    UpstreamKeyOption,
    UpstreamsOption,
    WorkersOption,
)
from token_id_capture.cli.serving.probe import checked, continuity_of, told
from token_id_capture.errors import ConfigurationError
from token_id_capture.server import defaults
from token_id_capture.store.file.location import FREE_SPACE_FLOOR

if TYPE_CHECKING:
    from token_id_capture.cli.serving.settings import WorkerSettings
    from token_id_capture.provenance import Policy
    from token_id_capture.server.check.check import CheckResult

_PROBE_SECONDS = 5.0
_CHECK_SECONDS = 120.0
_EVERY_ADDRESS = ("0.0.0.0", "::")


def serve(
    upstream: UpstreamsOption,
    database: DatabaseOption,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8400,
    workers: WorkersOption = 1,
    engine: EngineOption = defaults.ENGINE,
    streaming: StreamingOption = defaults.STREAMING,
    tokenize_prompts: TokenizePromptsOption = False,
    model: ModelOption = None,
    max_tokens: MaxTokensOption = None,
    inline_system: InlineSystemOption = defaults.INLINE_SYSTEM,
    history: HistoryOption = defaults.HISTORY,
    chat_history: ChatHistoryOption = defaults.CHAT_HISTORY,
    continuity: ContinuityOption = defaults.CONTINUITY,
    api_key_file: KeyOption = None,
    upstream_api_key_file: UpstreamKeyOption = None,
    hand_off_key_file: HandOffKeyOption = None,
    operator_key_file: OperatorKeyOption = None,
    insecure: InsecureOption = False,
    max_concurrent_calls: ConcurrencyOption = defaults.MAX_CONCURRENT_CALLS,
    free_space_floor: FreeSpaceOption = FREE_SPACE_FLOOR,
    body_limit: BodyLimitOption = None,
    body_bytes_in_flight: BodyBytesOption = None,
    connect_timeout: ConnectTimeoutOption = None,
    read_timeout: ReadTimeoutOption = None,
    client_timeout: ClientTimeoutOption = None,
    head_timeout: HeadTimeoutOption = None,
    drain_seconds: DrainOption = None,
    shutdown_seconds: ShutdownOption = 30,
    log_probs_mode: LogProbsModeOption = None,
    session_headers: SessionHeadersOption = None,
    allowed_hosts: AllowedHostsOption = None,
    log_format: LogFormatOption = "text",
    access_log: AccessLogOption = False,
    traces: TracesOption = False,
    check: CheckOption = True,
) -> None:
    """Run the gateway between agents and an engine, and capture the tokens of rollouts.

    Give agents http://HOST:PORT/ng-rollout/ROLLOUT/training-token-capture as their base URL, followed by
    /v1 if they expect it.
    """
    settings = _settings(locals())
    address = address_of(host, port, guarded=api_key_file is not None or insecure)
    if check:
        _check_upstreams(settings.upstream)
    listener = listener_at(address, settings.client_timeout)
    settings = _check_database(settings)
    settings = _check_engines(settings) if check else settings
    _check_continuity(settings.engine, settings.continuity)
    os.environ.update(settings.as_environment())
    from token_id_capture.cli.serving.supervisor import run_server

    _announce_addresses(host, listener.getsockname()[1], log_format)
    run_server(listener, workers, shutdown_seconds, log_format)


def _announce_addresses(host: str, port: int, log_format: LogFormat) -> None:
    """Tell where harnesses find a rollout, and where the gateway listens."""
    from token_id_capture.cli.serving.logs import announce

    address = _url(host, port)
    # Nobody can connect to 0.0.0.0 from elsewhere, so agents are told the name of this machine.
    reachable = _url(socket.gethostname(), port) if host in _EVERY_ADDRESS else address
    base = f"{reachable}/ng-rollout/ROLLOUT/training-token-capture"
    announce(f"base URL of a rollout for Claude Code and Gemini CLI: {base}", log_format)
    announce(f"base URL of a rollout for Codex, OpenCode and OpenAI clients: {base}/v1", log_format)
    announce(f"listening on {address}", log_format)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _checked(key_file: Path | None) -> str | None:
    """The absolute path of a key file that was read once."""
    if key_file is None:
        return None
    check_key_file(key_file)
    return str(key_file.absolute())


def _settings(options: Mapping[str, Any]) -> WorkerSettings:
    """The settings that options of the same names give; the files of keys are read once."""
    from pydantic import ValidationError

    from token_id_capture.cli.serving.settings import WorkerSettings
    from token_id_capture.server.engines import make_engine
    from token_id_capture.server.http.upstream import parse_upstream

    if options["log_format"] == "json":
        from token_id_capture.cli.serving.logs import warn_in_json

        warn_in_json()
    if options["traces"]:
        from token_id_capture.server.tracing import require_traces

        require_traces()  # here a missing library is one line; in a worker it would be a traceback
    for url in options["upstream"]:
        parse_upstream(url)
    make_engine(options["engine"])
    given = {name: value for name, value in options.items() if name in WorkerSettings.model_fields}
    given |= {name: _checked(given[name]) for name in given if name.endswith("_key_file")}
    for name in ("hand_off_key_file", "operator_key_file"):
        refuse_one_key(given["api_key_file"], given[name])
    try:
        return WorkerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigurationError(f"TOKCAP_{str(first['loc'][0]).upper()}: {first['msg']}") from error


def _check_upstreams(urls: Iterable[str]) -> None:
    from token_id_capture.server.http.upstream import parse_upstream

    for url in urls:
        parsed = parse_upstream(url)
        try:
            socket.create_connection((str(parsed.host), parsed.port or 80), _PROBE_SECONDS).close()
        except OSError as error:
            problem = error.strerror or str(error)
            fail(f"nothing listens at {url} ({problem}): start the engine first, or use --no-check")


def _check_engines(settings: WorkerSettings) -> WorkerSettings:
    """The settings with what the check found out: which engine it is, and how to ask it for streams.

    Several are one to agents, so they have to be alike.
    """
    first = _check_engine(settings, settings.upstream[0])
    for url in settings.upstream[1:]:
        other = _check_engine(settings, url)
        for what, here, there in (
            ("an engine of another kind", first.engine, other.engine),
            ("another model", first.found.model, other.found.model),
            ("an engine to be asked for streams in another way", first.streaming, other.streaming),
        ):
            if here != there:
                fail(f"{url} serves {what} ({there}) than {settings.upstream[0]} ({here}): serve it by another gateway")
    return settings.model_copy(update={"engine": first.engine, "streaming": first.streaming})


def _check_engine(settings: WorkerSettings, upstream: str) -> CheckResult:
    """What the check of one of them found out."""
    from token_id_capture.cli.serving.logs import announce

    key_file = settings.upstream_api_key_file
    result = run(
        checked(
            upstream,
            settings.engine,
            settings.streaming,
            settings.tokenize_prompts,
            None if key_file is None else Path(key_file),
            _CHECK_SECONDS,
            continuity=settings.continuity != defaults.CONTINUITY,
        )
    )
    if not result.captured:
        why = "; ".join(told(result.modes)) or result.found.problem
        fail(f"calls to {upstream} cannot be captured: {why} (--no-check starts anyway)")
    if result.continuity is not None and settings.continuity not in result.continuity.policies:
        fail(
            f"--continuity {settings.continuity} does not work with {upstream}: {continuity_of(result)} "
            "(--no-check starts anyway)"
        )
    where = f" at {upstream}" if len(settings.upstream) > 1 else ""
    announce(
        f"engine{where}: {result.found}; token ids and log probabilities are exact in {result.captured} of "
        f"{len(result.modes)} modes",
        settings.log_format,
    )
    for line in told([*result.uncaptured, *result.doubtful]):
        announce(printable(line), settings.log_format)
    return result


def _check_continuity(engine: str, policy: Policy) -> None:
    from token_id_capture.server.continuity.continuer import require_continuity
    from token_id_capture.server.engines import make_engine

    require_continuity(make_engine(engine), policy, engine)


def _check_database(settings: WorkerSettings) -> WorkerSettings:
    """The settings with the identity of the database, so that no worker makes or takes another one.

    The store is opened and closed once. Its errors say which file it is and what to do.
    """
    from token_id_capture.store import TokenCaptureStore

    async def probe() -> str | None:
        async with TokenCaptureStore(settings.database, free_space_floor=settings.free_space_floor) as store:
            await store.check_writable()
            return store.file_id

    return settings.model_copy(update={"database_id": run(probe())})

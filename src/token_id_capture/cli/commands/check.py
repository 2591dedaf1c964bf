"""``tokcap check``: whether an engine's tokens can be captured, mode by mode, before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from token_id_capture.cli.options import (
    EXIT_PARTIAL,
    EXIT_UNUSABLE,
    JsonOption,
    print_json,
    printable,
    report,
    run,
)
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.serving.keys import UpstreamKeyOption, read_key

if TYPE_CHECKING:
    from token_id_capture.server.check.check import CheckResult, ModeResult
    from token_id_capture.server.wire.request import Streaming

StreamingChoice: TypeAlias = Literal["auto", "always", "never"]

UpstreamOption = Annotated[
    str,
    typer.Option("--upstream", "-u", envvar="TOKCAP_UPSTREAM", metavar="URL", help="The engine's address."),
]
EngineOption = Annotated[
    str,
    typer.Option(
        envvar="TOKCAP_ENGINE",
        help="How the engine sends token ids: auto (asks it), vllm, sglang, llama-cpp, message, a name that a package "
        "registered, or module:Class.",
    ),
]
StreamingOption = Annotated[
    StreamingChoice,
    typer.Option(
        envvar="TOKCAP_STREAMING",
        help="Whether a stream is also asked of the engine. If not, the client's is made from the whole response; "
        "auto: where the engine's would lack ids.",
    ),
]
TokenizePromptsOption = Annotated[
    bool,
    typer.Option(
        "--tokenize-prompts",
        envvar="TOKCAP_TOKENIZE_PROMPTS",
        help="Ask the engine's tokenizer for prompt ids that its responses lack (llama-server): one or two more "
        "requests a call.",
    ),
]

_SAID = {"captured": "exact", "not_captured": "not captured", "refused": "not served", "failed": "failed"}


def check(
    upstream: UpstreamOption,
    engine: EngineOption = "auto",
    streaming: StreamingOption = "auto",
    tokenize_prompts: TokenizePromptsOption = False,
    upstream_api_key_file: UpstreamKeyOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long each call may take.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Ask an engine for a few tokens in each mode, and say what of it can be captured.

    Chats, text completions, streams and tools each take one request of at most 16 tokens, through
    the same code as tokcap serve. Exit code 0: everything that the engine serves is captured, with
    ids and log probabilities; 1: some of it is not; 2: nothing is, or nobody answers.
    """
    result = run(checked(upstream, engine, streaming, tokenize_prompts, upstream_api_key_file, timeout))
    if as_json:
        print_json(_as_json(result, upstream))
    else:
        _print(result, upstream)
    code = exit_code(result)
    if code:
        raise typer.Exit(code)


async def checked(
    upstream: str,
    engine: str,
    streaming: Streaming,
    tokenize_prompts: bool,
    key_file: Path | None,
    seconds: float,
) -> CheckResult:
    """Check the engine at this address.

    Raises:
        ConfigurationError: the address, the engine or the key cannot be used.
    """
    from token_id_capture.server.call import CaptureOptions
    from token_id_capture.server.check.check import check_engine
    from token_id_capture.server.http.upstream import Upstream

    # Why something is not captured is what the check tells.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    key = None if key_file is None else read_key(str(key_file))
    connections = Upstream(upstream, read_timeout=seconds, api_key=key, keep_alive=False)
    options = CaptureOptions(streaming=streaming, tokenize_prompts=tokenize_prompts)
    try:
        return await check_engine(connections, engine, options, seconds=seconds)
    finally:
        await connections.close()


def exit_code(result: CheckResult) -> int:
    """0: all that is served is captured; 1: some is not; 2: nothing is."""
    if not result.captured:
        return EXIT_UNUSABLE
    return EXIT_PARTIAL if result.uncaptured else 0


def told(modes: Iterable[ModeResult]) -> list[str]:
    """The modes that are not captured, those of one cause together, each with the cause and what to change."""
    causes: dict[str, list[str]] = {}
    for mode in modes:
        why = ": ".join(part for part in (mode.reason, mode.detail) if part)
        cause = f"{_SAID[mode.outcome]} ({why})" + (f"; {mode.advice}" if mode.advice else "")
        causes.setdefault(cause, []).append(mode.mode)
    return [f"{' / '.join(names)}: {cause}" for cause, names in causes.items()]


def unreached(result: CheckResult, upstream: str) -> str:
    """That nobody answers."""
    return f"nothing answers at {upstream} ({result.found.problem}): start the engine first"


def _print(result: CheckResult, upstream: str) -> None:
    if not result.found.reached:
        report(unreached(result, upstream))
        return
    print(f"{upstream}: {result.found}")
    rows = [(mode.mode, _SAID[mode.outcome], mode.tokens or None) for mode in result.modes]
    print_table(("mode", "token ids and log probabilities", "tokens"), rows)
    if result.streaming == "never":
        print("The engine's streams lack some of them, so they are made from whole responses (--streaming never).")
    for line in told(mode for mode in result.modes if mode.outcome != "captured"):
        print(printable(line))


def _as_json(result: CheckResult, upstream: str) -> dict[str, Any]:
    return {
        "upstream": upstream,
        "reached": result.found.reached,
        "engine": result.engine,
        "version": result.found.version,
        "model": result.found.model,
        "streaming": result.streaming,
        "captured": not exit_code(result),
        "modes": [asdict(mode) for mode in result.modes],
        "problem": result.found.problem,
    }

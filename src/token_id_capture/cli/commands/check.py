"""``tokcap check``: whether an engine's tokens can be captured, mode by mode, before anything runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_id_capture.cli.options import (
    EXIT_PARTIAL,
    EXIT_UNUSABLE,
    JsonOption,
    print_json,
    print_line,
    report,
    run,
)
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.serving.options import (
    EngineOption,
    StreamingOption,
    TokenizePromptsOption,
    UpstreamKeyOption,
    UpstreamOption,
)
from token_id_capture.cli.serving.probe import SAID, checked, continuity_of, told
from token_id_capture.server import defaults

if TYPE_CHECKING:
    from token_id_capture.server.check.check import CheckResult


def check(
    upstream: UpstreamOption,
    engine: EngineOption = defaults.ENGINE,
    streaming: StreamingOption = defaults.STREAMING,
    tokenize_prompts: TokenizePromptsOption = False,
    upstream_api_key_file: UpstreamKeyOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long each call may take.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Ask an engine for a few tokens in each mode, and report what can be captured.

    Chats, text completions, streams, tools and each dialect that is translated to chat (Messages,
    Responses, Gemini) take one request of at most 16 tokens, through the same code as tokcap serve;
    two more test which policies of --continuity work. Exit code 0: everything that the engine serves
    is captured, with ids and log probabilities; 1: some of it is not; 2: nothing is, or the engine does not respond.
    """
    result = run(checked(upstream, engine, streaming, tokenize_prompts, upstream_api_key_file, timeout))
    if as_json:
        print_json(_as_json(result, upstream))
    else:
        _print(result, upstream)
    code = exit_code(result)
    if code:
        raise typer.Exit(code)


def exit_code(result: CheckResult) -> int:
    """0: all that is served is captured; 1: some is not; 2: nothing is."""
    if not result.captured:
        return EXIT_UNUSABLE
    return EXIT_PARTIAL if result.uncaptured else 0


def unreached(result: CheckResult, upstream: str) -> str:
    """That nobody answers."""
    return f"nothing answers at {upstream} ({result.found.problem}): start the engine first"


def _print(result: CheckResult, upstream: str) -> None:
    if not result.found.reached:
        report(unreached(result, upstream))
        return
    print(f"{upstream}: {result.found}")
    rows = [(mode.mode, SAID[mode.outcome], mode.tokens or None) for mode in result.modes]
    print_table(("mode", "token ids and log probabilities", "tokens"), rows)
    print_line(f"--continuity: {continuity_of(result)}")
    if result.streaming == "never":
        print("The engine's streams lack some of them, so they are made from whole responses (--streaming never).")
    for line in told(mode for mode in result.modes if mode.outcome != "captured" or mode in result.doubtful):
        print_line(line)


def _as_json(result: CheckResult, upstream: str) -> dict[str, Any]:
    return {
        "upstream": upstream,
        "reached": result.found.reached,
        "engine": result.engine,
        "version": result.found.version,
        "model": result.found.model,
        "streaming": result.streaming,
        "captured": not exit_code(result),
        "continuity": None if result.continuity is None else asdict(result.continuity),
        "modes": [asdict(mode) for mode in result.modes],
        "problem": result.found.problem,
    }

"""The demo's inference engine, a process of its own: ``python -m token_id_capture.cli.demo.engine``.

It talks to its parent in lines of JSON on standard output: ``{"url": ...}`` once it serves, and
``{"held": true}`` when it holds a call. It ends with its standard input, so also if the parent dies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from token_id_capture.testing.engine import EngineCall, PolicyEngine
from token_id_capture.testing.policy import Policy
from token_id_capture.testing.serving import serve_engine


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True, help="the seed of the policy")
    parser.add_argument("--model", required=True)
    parser.add_argument("--hold", required=True, help="the first call whose last message is this text gets no response")
    asyncio.run(_serve(parser.parse_args()))


async def _serve(arguments: argparse.Namespace) -> None:
    engine = PolicyEngine(Policy(arguments.seed), model=arguments.model, on_call=_Hold(arguments.hold))
    async with serve_engine(engine) as url:
        _tell({"url": url})
        await _end_of_input()


class _Hold:
    """Lets one call wait for as long as its client does."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._held = False

    async def __call__(self, call: EngineCall) -> None:
        if not self._held and call.body["messages"][-1]["content"] == self._text:
            self._held = True
            _tell({"held": True})
            await asyncio.Event().wait()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

"""What a server writes in one turn of its event loop reaches the client by one call of the system."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from token_id_capture.cli.serving.connections import _JoinedWrites


class _Sent:
    """A transport that keeps what is sent, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.closed = False

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.calls.append(b"".join(pieces))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return f"the {name}"


async def test_a_head_and_its_body_are_sent_together_and_later_pieces_in_their_turn() -> None:
    sent = _Sent()
    joined = _JoinedWrites(sent, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"body")
    await asyncio.sleep(0)
    joined.write(b"more")
    await asyncio.sleep(0)
    assert sent.calls == [b"headbody", b"more"]
    assert joined.get_extra_info("socket") == "the socket"


async def test_what_was_written_is_sent_before_the_connection_closes_and_nothing_after_it_is_lost() -> None:
    sent = _Sent()
    joined = _JoinedWrites(sent, asyncio.get_running_loop())
    joined.write(b"last")
    joined.close()
    assert (sent.calls, sent.closed) == ([b"last"], True)
    joined.write(b"too late")
    await asyncio.sleep(0)
    assert sent.calls == [b"last"]

"""Puts a test engine on a loopback port, in the running event loop or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Generator, Iterator

import uvicorn

from token_id_capture.server.listener import listen
from token_id_capture.testing.engine import PolicyEngine

# Keep-alive connections and held calls would otherwise keep a finished test waiting.
_SHUTDOWN_SECONDS = 1


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process belongs to somebody else."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve for as long as the block lasts. An error of the start is raised here, and no client waits in vain."""
        self.accepts = asyncio.Event()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        accepting = asyncio.create_task(self.accepts.wait())
        await asyncio.wait((serving, accepting), return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if serving.done():
            await serving
            raise RuntimeError("the server of the test engine ended before it began to serve")
        try:
            yield
        finally:
            self.should_exit = True
            await serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepts.set()


@contextlib.asynccontextmanager
async def serve_engine(
    engine: PolicyEngine | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve an engine in the running event loop; gives its base URL, without a trailing slash.

    ::

        async with serve_engine(PolicyEngine(seconds_per_token=0.01)) as url:
            ...  # POST url + "/v1/chat/completions"
    """
    with listen(socket.AF_INET, (host, port)) as listener:
        server = _Server(
            uvicorn.Config(
                engine or PolicyEngine(),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )
        async with server.running(listener):
            yield f"http://{host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def engine_in_thread(engine: PolicyEngine | None = None) -> Iterator[str]:
    """Serve an engine on an event loop of its own, in a thread, for tests without one; gives its URL."""
    addresses: list[str] = []
    failures: list[BaseException] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    leave = asyncio.Event()

    async def serve() -> None:
        async with serve_engine(engine) as url:
            addresses.append(url)
            ready.set()
            await leave.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work, name="policy-engine")
    thread.start()
    ready.wait()
    try:
        if addresses:
            yield addresses[0]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(leave.set)
        thread.join()
    if failures:
        raise failures[0]

"""A proxy before a server that cuts a connection at a chosen moment of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum


class Cut(Enum):
    """What becomes of the next message that holds the word."""

    BEFORE = "it does not reach the server"
    AFTER = "it reaches the server, and its answer is lost"


class CuttingProxy:
    """Listens on 127.0.0.1; ``cut`` is what happens to the next message with ``word`` in it, once."""

    def __init__(self, server: str, word: bytes) -> None:
        self._server = server
        self._word = word
        self.cut: Cut | None = None
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                for work in (self._forward, self._answer):
                    thread = threading.Thread(target=work, args=(client, server), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                cut = self.cut if self._word in data else None
                if cut is not None:
                    self.cut = None
                    self.cuts += 1
                if cut is Cut.AFTER:
                    client.shutdown(socket.SHUT_RDWR)
                if cut is not Cut.BEFORE:
                    server.sendall(data)
                if cut is not None:
                    break
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            # The server ends its session once it has done what it was told.
            server.shutdown(socket.SHUT_WR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        client.close()
        server.close()

    def stop_listening(self) -> None:
        """Refuse new connections; those that there are go on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Stop listening, and wait until every connection has ended."""
        self.stop_listening()
        for thread in list(self._threads):
            thread.join(30)


@contextmanager
def cutting_proxy(server: str, word: bytes) -> Iterator[CuttingProxy]:
    """A proxy that ends with the block."""
    proxy = CuttingProxy(server, word)
    try:
        yield proxy
    finally:
        proxy.close()

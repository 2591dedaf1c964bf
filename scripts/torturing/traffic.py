"""An engine and its clients in one process: calls through the server that is tortured, noted as they are answered."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_CLIENTS = 3
_CALLS = 4

_RESPONSE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "token_ids": [4, 5],
            "logprobs": {"content": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


class Engine(BaseHTTPRequestHandler):
    """Answers every call alike."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(_RESPONSE).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def run_traffic(directory: Path, gateways: Sequence[tuple[str, int]], engine_at: tuple[str, int]) -> None:
    """The body of the process: calls of a rollout go to one gateway after the other."""
    engine = ThreadingHTTPServer(engine_at, Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    parent = os.getppid()
    for name in range(_CLIENTS):
        threading.Thread(target=_call, args=(directory / "answered", gateways, name), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)


def _call(answered: Path, gateways: Sequence[tuple[str, int]], name: int) -> None:
    descriptor = os.open(answered, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]})
    number = 0
    while True:
        rollout_id = f"h{name}.{number // _CALLS}"
        host, port = gateways[number % len(gateways)]
        number += 1
        # A gateway may wait for its database as long as that recovers.
        connection = http.client.HTTPConnection(host, port, timeout=20)
        try:
            path = f"/ng-rollout/{rollout_id}/training-token-capture/v1/chat/completions"
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                os.write(descriptor, f"{rollout_id}\n".encode())
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()

"""Where the server listens: an address that is safe to listen on, and the socket that the workers share."""

from __future__ import annotations

import ipaddress
import math
import socket
import sys
from typing import Any, Final, NoReturn, TypeAlias

from token_id_capture.cli.options import fail
from token_id_capture.server.listener import listen

Address: TypeAlias = tuple[socket.AddressFamily, Any]

# Who can call the gateway can use the engine, and write to any rollout.
_INSTEAD: Final = "give --api-key-file, or --insecure to serve anyone who connects"


def address_of(host: str, port: int, *, guarded: bool, instead: str = _INSTEAD) -> Address:
    """Where to listen. What is not ``guarded`` by a key only this machine may connect to; ``instead`` is what a
    refusal advises."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        _cannot_listen(host, port, error)
    if not guarded and not is_loopback((family, address)):
        fail(f"{host} can be reached from other machines: {instead}")
    return family, address


def is_loopback(where: Address) -> bool:
    """Whether only this machine can connect there."""
    return ipaddress.ip_address(str(where[1][0]).partition("%")[0]).is_loopback


def shown_address(listener: socket.socket) -> str:
    """Host and port as they stand in a URL."""
    name, number = listener.getsockname()[:2]
    return f"[{name}]:{number}" if ":" in name else f"{name}:{number}"


def listener_at(where: Address, client_timeout: float) -> socket.socket:
    """A listening socket. It listens before the workers are up, so that early clients only wait."""
    family, address = where
    try:
        listener = listen(family, address)
    except OSError as error:
        _cannot_listen(address[0], address[1], error)
    if sys.platform == "linux":
        # Its connections inherit this. A client that reads nothing more, or whose machine is gone,
        # would else hold its call, and the engine's connection with it, for as long as it likes.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(client_timeout * 1000))
    listener.set_inheritable(True)
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> NoReturn:
    fail(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --host or --port")

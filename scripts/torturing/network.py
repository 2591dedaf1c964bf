"""Network namespaces: two machines, as far as the network is concerned."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """A network namespace with one address, and the address of this process's own network as it is seen from there."""

    name: str
    address: str
    outside: str

    def command(self, *words: str) -> list[str]:
        """The command that runs another one in it."""
        return ["ip", "netns", "exec", self.name, *words]


def why_not() -> str:
    """Why this process makes no network; empty if it can."""
    if os.geteuid():
        return "which only root makes"
    if shutil.which("ip") is None:
        return "which the program ip makes"
    made = subprocess.run(["ip", "netns", "add", _trial()], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", _trial()], check=False, capture_output=True)
    return made.stderr.strip()


def _trial() -> str:
    return f"tokcap-{os.getpid()}-trial"


@contextmanager
def two_networks() -> Iterator[list[Network]]:
    """Two networks that reach this process's network, and each other through it alone. Needs root.

    Raises:
        CalledProcessError: the kernel, or whoever runs this process, does not allow it.
    """
    subnet = f"10.231.{os.getpid() % 250}"
    networks = [
        Network(f"tokcap-{os.getpid()}-{place}", f"{subnet}.{4 * place + 2}", f"{subnet}.{4 * place + 1}")
        for place in range(2)
    ]
    try:
        for place, network in enumerate(networks):
            _make(network, f"tk{os.getpid()}{'ab'[place]}")
        yield networks
    finally:
        for network in networks:
            subprocess.run(["ip", "netns", "delete", network.name], check=False, capture_output=True)


def _make(network: Network, link: str) -> None:
    _ip("netns", "add", network.name)
    _ip("link", "add", link, "type", "veth", "peer", "name", "outside", "netns", network.name)
    _ip("address", "add", f"{network.outside}/30", "dev", link)
    _ip("link", "set", link, "up")
    for words in (
        ("address", "add", f"{network.address}/30", "dev", "outside"),
        ("link", "set", "outside", "up"),
        ("link", "set", "lo", "up"),
        ("route", "add", "default", "via", network.outside),
    ):
        _ip("-n", network.name, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

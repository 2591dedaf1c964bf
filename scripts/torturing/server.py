"""A PostgreSQL server that is killed like everybody who writes to it.

First writers, as on a file, then every role with two gateways, each in a network namespace of its own and without a
file in common, through which clients write the same rollouts. The server's processes get SIGKILL, any of them, and
the whole server is stopped as by a crash (``immediate``) and started again. What is left in it is copied to a file,
which checks every digest on the way, and compared as any other file.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

import token_id_capture.store.postgres.backend  # noqa: F401  once, and not in each process that is forked
from torturing.check import Findings, check
from torturing.network import Network, two_networks, why_not
from torturing.plan import Plan
from torturing.roles import Place, Roles
from torturing.roles_check import check_roles
from torturing.rounds import Report, torture

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.postgres import PASSWORD, PostgresServer, running_server

_STOPS = 0.2
_LONGEST_RECOVERY_SECONDS = 60.0


@dataclass(slots=True)
class Striker:
    """Hits the server, each time in another place."""

    server: PostgresServer
    dice: random.Random
    settings: dict[str, str]

    def __call__(self) -> str:
        """Kill one of its processes, or stop it as a crash would and start it; empty while it recovers."""
        if not self._answers():
            return ""
        if self.dice.random() < _STOPS:
            self.server.stop("immediate")
            self.server.start(**self.settings)
            return "immediate stops of the server"
        with suppress(ProcessLookupError):
            os.kill(self.dice.choice(self.server.processes()), signal.SIGKILL)
        return "kills of a process of the server"

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            self.server.admin().close()
            return True
        return False

    def settle(self) -> None:
        """Wait until the server has recovered."""
        end = time.monotonic() + _LONGEST_RECOVERY_SECONDS
        while not self._answers():
            if time.monotonic() > end:
                raise TimeoutError("the server did not recover")
            time.sleep(0.1)


def run_server(plan: Plan, report: Report, seconds: float, stopped: Callable[[], bool]) -> None:
    """Torture for some seconds."""
    with running_server() as server:
        dice = random.Random(f"{plan.seed}/server")
        plan = replace(
            plan, directory=plan.directory / "server", seconds=seconds / 2, url=server.url(server.new_database())
        )
        plan.ledgers.mkdir(parents=True)
        strike = Striker(server, dice, {})
        torture(plan, report, stopped, compare=lambda plan: _compare(plan, strike), strike=strike)
        if report.violations or stopped():
            return
        name = server.new_database()
        with ExitStack() as stack:
            if reason := why_not():
                report.counts[f"not run: network namespaces, {reason}"] += 1
                gateways = [Place((), "127.0.0.1", "127.0.0.1", server.url(name, tcp=True)) for _ in range(2)]
            else:
                networks = stack.enter_context(two_networks())
                strike.settings.update(let_in(server, networks))
                gateways = [place_of(network, networks[0], server, name) for network in networks]
            report.add(_roles(plan, server.url(name), gateways, strike).run(seconds / 2, stopped))


def _compare(plan: Plan, strike: Striker) -> Findings:
    findings = Findings()
    strike.settle()
    _copy(plan.url, plan.database, findings)
    rest = check(plan.database, plan.ledgers)
    return Findings(rest.counts, findings.violations + rest.violations)


def _copy(url: str, database: Path, findings: Findings) -> None:
    from token_id_capture.store.copying.databases import copy_database

    for left in database.parent.glob(f"{database.name}*"):
        left.unlink()
    copied = copy_database(url, database, include_open=True)
    for damage in copied.damaged:
        findings.add("torn", str(damage))


def let_in(server: PostgresServer, networks: list[Network]) -> dict[str, str]:
    """Have the server listen where both networks reach it; the settings that it has from now on."""
    with (server.home / "data" / "pg_hba.conf").open("a") as rules:
        rules.writelines(f"host all all {network.address}/32 scram-sha-256\n" for network in networks)
    settings = {"listen_addresses": f"127.0.0.1,{networks[0].outside}"}
    server.stop()
    server.start(**settings)
    return settings


def place_of(network: Network, first: Network, server: PostgresServer, database: str) -> Place:
    """Where a gateway of this network runs. The engine and the server are reached at the first one's outside."""
    url = f"postgresql://captures:{PASSWORD}@{first.outside}:{server.port}/{database}"
    return Place(tuple(network.command()), network.address, first.outside, url)


def _roles(plan: Plan, database: str, gateways: list[Place], strike: Striker) -> Roles:
    directory = plan.directory / "roles"

    def compare(findings: Findings) -> None:
        copy = directory / "captures.db"
        strike.settle()
        _copy(database, copy, findings)
        check_roles(directory, copy, findings)

    return Roles(plan, directory, database, gateways, (), compare, strike)

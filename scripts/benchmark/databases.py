"""``scripts/bench databases``: two gateways and a finalizer on one database, a file and a PostgreSQL server in turn.

Clients ask both gateways at once, while ``tokcap finalize --retire`` delivers the rollouts of the round before. What
processes spend is read from the system's accounts of them: of the gateways, of the finalizer, and of the server,
which is one of this benchmark's own on the same disk and the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.campaign import Bench, Figures
from benchmark.gateway.servers import Server, cpu_of, running
from benchmark.limits import Outcome
from benchmark.machine import describe_machine, disk
from benchmark.measure import percentile
from benchmark.processes import Child, Job
from benchmark.report import as_json, outcome_table, table

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.postgres import PostgresServer, running_server

FILE, SERVER = "SQLite", "PostgreSQL"
GATEWAYS = 2
CLIENTS = 16
"""Of each gateway."""

_MOST_CPU = 1.5
_COLUMNS = {
    "calls_per_second": "calls/s",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "cpu_ms_per_call": "gateways, CPU ms a call",
    "finalize_cpu_ms_per_call": "finalize beside its start, CPU ms a call",
    "server_cpu_ms_per_call": "server, CPU ms a call",
}


@dataclass(frozen=True)
class Load:
    """What the clients of a round ask for."""

    shape: str
    streamed: bool
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    started = time.monotonic()
    cells: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as root, running_server() as server:
        bench = Bench(Path(root), options.repeats)
        machine = describe_machine(Path(root))
        for shape in options.shape or ("chat", "agent"):
            for mode in options.mode or ("whole",):
                bench.say(f"{shape}, {mode}")
                load = Load(shape, mode == "streamed", options.seconds)
                cells[f"{shape}, {mode}"] = bench.interleaved(_runs(bench, server, load))
    outcomes = list(_judge(cells))
    if options.trial:
        outcomes = [replace(outcome, bound=None) for outcome in outcomes]
    machine["seconds"] = round(time.monotonic() - started)
    if options.json:
        print(json.dumps(as_json(machine, {"databases": cells}, outcomes), indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(f"\n{_table(cells)}\n\n{outcome_table(outcomes)}")
    return 1 if options.check and any(outcome.holds is False for outcome in outcomes) else 0


def _runs(bench: Bench, server: PostgresServer, load: Load) -> dict[str, Callable[[], Figures]]:
    def on_a_file() -> Figures:
        with bench.directory() as directory:
            return _run(str(directory / "captures.db"), directory, load, lambda: 0.0)

    def on_the_server() -> Figures:
        with bench.directory() as directory:
            return _run(server.url(server.new_database()), directory, load, lambda: cpu_of(server.pid))

    return {FILE: on_a_file, SERVER: on_the_server}


def _run(database: str, directory: Path, load: Load, cpu_of_server: Callable[[], float]) -> Figures:
    with ExitStack() as stack:
        engine = Child(Job("gateway.engine", {"shape": load.shape}))
        stack.callback(engine.kill)
        url = engine.wait_until_ready()["url"]
        gateways = [
            stack.enter_context(running("ours", url, directory / f"gateway-{number}", further=("--database", database)))
            for number in range(GATEWAYS)
        ]
        first = _ask(gateways, "first", load, lambda: None)
        start_up = _Finalizer(database, directory / "nothing", [])
        start_up.start()
        of_start_up = start_up.wait()
        finalizer = _Finalizer(database, directory / "finalizer", asyncio.run(_rollouts(database)))
        before = sum(gateway.cpu() for gateway in gateways), cpu_of_server()
        second = _ask(gateways, "second", load, finalizer.start)
        spent = sum(gateway.cpu() for gateway in gateways) - before[0]
        of_finalizer = finalizer.wait() - of_start_up
        of_server = cpu_of_server() - before[1]
    stored = asyncio.run(_stored(database))
    if stored != first.calls + second.calls:
        raise RuntimeError(f"{stored} of {first.calls + second.calls} calls were captured")
    return {
        "calls_per_second": len(second.waits) / second.seconds,
        "p50_ms": 1e3 * percentile(second.waits, 50),
        "p99_ms": 1e3 * percentile(second.waits, 99),
        "cpu_ms_per_call": 1e3 * spent / len(second.waits),
        "finalize_cpu_ms_per_call": 1e3 * of_finalizer / first.calls,
        "server_cpu_ms_per_call": 1e3 * of_server / len(second.waits),
    }


@dataclass(frozen=True)
class _Asked:
    waits: Sequence[float]
    calls: int
    seconds: float


def _ask(gateways: Sequence[Server], name: str, load: Load, at_start: Callable[[], None]) -> _Asked:
    """Load all gateways at the same time."""
    arguments = {"shape": load.shape, "streamed": load.streamed, "seconds": load.seconds, "concurrency": CLIENTS}
    jobs = [
        Job("gateway.load", {"url": one.url, "path": one.path, "rollouts": f"{name}-{at}", "pause_ms": 0, **arguments})
        for at, one in enumerate(gateways)
    ]
    clients = [Child(job) for job in jobs]
    try:
        for client in clients:
            client.wait_until_ready()
        at_start()
        for client in clients:
            client.go()
        seen = [client.result() for client in clients]
    finally:
        for client in clients:
            client.kill()
    waits = [wait for one in seen for wait in one["whole"]]
    warm_up = sum(one["warm_up"] for one in seen)
    return _Asked(waits, len(waits) + warm_up, max(one["seconds"] for one in seen))


class _Finalizer:
    """``tokcap finalize`` on some rollouts."""

    def __init__(self, database: str, directory: Path, rollouts: Sequence[str]) -> None:
        directory.mkdir()
        self._directory = directory
        records = directory / "records.jsonl"
        records.write_text("".join(f'{{"_ng_rollout_id": "{rollout}"}}\n' for rollout in rollouts))
        rows = directory / "rows.jsonl"
        self._command = [sys.executable, "-m", "token_id_capture", "finalize", str(records), "--output", str(rows)]
        self._command += ["--format", "trajectory", "--retire", "--database", database]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Let it begin."""
        with (self._directory / "said").open("wb") as said:
            self._process = subprocess.Popen(self._command, stdout=said, stderr=said)

    def wait(self) -> float:
        """The processor seconds that it has spent when it ends."""
        assert self._process is not None
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._process.returncode:
            raise RuntimeError((self._directory / "said").read_text())
        return used.ru_utime + used.ru_stime


async def _rollouts(database: str) -> list[str]:
    from token_id_capture import TokenCaptureStore

    async with TokenCaptureStore(database) as store:
        return [rollout.rollout_id for rollout in await store.list_rollouts(limit=1_000_000)]


async def _stored(database: str) -> int:
    """Calls that are stored, or were and are in rows."""
    from token_id_capture import TokenCaptureStore

    async with TokenCaptureStore(database) as store:
        return sum(rollout.calls or 0 for rollout in await store.list_rollouts(limit=1_000_000))


def _judge(cells: Mapping[str, Mapping[str, Figures]]) -> Iterator[Outcome]:
    for level, found in cells.items():
        file, server = found[FILE], found[SERVER]
        parts = ("cpu_ms_per_call", "finalize_cpu_ms_per_call", "server_cpu_ms_per_call")
        for title, figures, bound in (
            ("gateways and finalize", parts[:2], _MOST_CPU),
            ("gateways", parts[:1], _MOST_CPU),
            ("finalize", parts[1:2], None),
            ("with the server's own", parts, None),
        ):
            ratio = sum(server[figure] for figure in figures) / sum(file[figure] for figure in figures)
            yield Outcome("databases", f"CPU per call, {SERVER} / {FILE}, {title}", level, ratio, False, bound)
        ratio = server["calls_per_second"] / file["calls_per_second"]
        yield Outcome("databases", f"calls/s, {SERVER} / {FILE}", level, ratio, True, None)


def _table(cells: Mapping[str, Mapping[str, Figures]]) -> str:
    rows = [["", "", *_COLUMNS.values()]]
    for level, found in cells.items():
        for name, figures in found.items():
            rows.append([level if name == FILE else "", name, *(f"{figures[column]:,.2f}" for column in _COLUMNS)])
    return table(rows)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/bench databases", description=__doc__)
    made.add_argument("--shape", action="append", choices=("chat", "agent"), help="repeatable; default: both")
    made.add_argument("--mode", action="append", choices=("whole", "streamed"), help="repeatable; default: whole")
    made.add_argument("--seconds", type=float, default=5.0, help="how long each round takes (default: 5)")
    made.add_argument("--repeats", type=int, default=3, help="of which the medians are shown (default: 3)")
    made.add_argument("--trial", action="store_true", help="judge nothing, as when rounds are too short for that")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    return made

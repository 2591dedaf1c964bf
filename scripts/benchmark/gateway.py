"""What the gateway costs beside a proxy that captures nothing, and whether it holds tokens back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmark.campaign import Bench, Figures
from benchmark.limits import Outcome
from benchmark.measure import percentile
from benchmark.processes import Child, Job

STREAMS, REQUESTS, TOKENS = 64, 2, 48
SECONDS_PER_TOKEN = 0.03
CPU_BOUND = 2.5
FIRST_TOKEN_BOUND = 0.1


def measure_gateway(bench: Bench) -> Iterator[Outcome]:
    """Processor time per request against the bare proxy, and how much later the first token comes."""
    bench.say(f"gateway: {STREAMS} streams at a time, {STREAMS * REQUESTS} in all")
    servers = ("gateway", "bare")
    found = bench.interleaved({server: _streams_through(bench, server) for server in servers})
    bench.cells["gateway"] = {f"{STREAMS} streams": found}
    ours, bare = found["gateway"], found["bare"]
    ratio = ours["cpu_us_per_request"] / bare["cpu_us_per_request"]
    yield Outcome("gateway", "CPU per request, gateway / bare proxy", "streams", ratio, False, CPU_BOUND)
    later = (ours["first_token_ms"] - bare["first_token_ms"]) / bare["stream_ms"]
    title = "first token later than through the bare proxy, as a part of the stream"
    yield Outcome("gateway", title, "streams", later, False, FIRST_TOKEN_BOUND)


def _streams_through(bench: Bench, server: str) -> Callable[[], Figures]:
    requests = max(1, REQUESTS // bench.shrink)
    streams = max(2, STREAMS // bench.shrink)

    def run() -> Figures:
        children: list[Child] = []

        def started(module: str, **arguments: Any) -> tuple[Child, dict[str, Any]]:
            children.append(Child(Job(module, arguments)))
            return children[-1], children[-1].wait_until_ready()

        with bench.directory() as directory:
            try:
                _, engine = started("serving", server="engine", seconds_per_token=SECONDS_PER_TOKEN)
                proxy, served = started("serving", server=server, upstream=engine["url"], directory=str(directory))
                load = {"url": served["url"], "captured": server == "gateway", "tokens": TOKENS}
                clients, _ = started("streaming", **load, streams=streams, requests=requests)
                proxy.go()
                clients.go()
                seen = clients.result()
                proxy.go()
                spent = proxy.result()
            finally:
                for child in children:
                    child.kill()
        count = len(seen["whole"])
        if server == "gateway" and spent["captured"] != count + seen["warm_up"]:
            raise RuntimeError(f"{spent['captured']} of {count + seen['warm_up']} streamed calls were captured")
        return {
            "cpu_us_per_request": 1e6 * spent["cpu"] / count,
            "first_token_ms": 1e3 * percentile(seen["first"], 50),
            "stream_ms": 1e3 * percentile(seen["whole"], 50),
        }

    return run

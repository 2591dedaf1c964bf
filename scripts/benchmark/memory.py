"""How much memory storing a long rollout takes, and building it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmark.campaign import Bench, Figures
from benchmark.inputs import write_inputs
from benchmark.limits import Outcome
from benchmark.measure import MEGABYTE
from benchmark.processes import Job, run_together
from benchmark.workloads import WORKLOADS

PUT_BOUND, BUILD_BOUND = 64.0, 60.0


def measure_memory(bench: Bench) -> Iterator[Outcome]:
    """Peak resident memory above what the process held before, inputs included, in MB."""
    workload = bench.sized(WORKLOADS["long"])
    with bench.directory("inputs") as inputs:
        write_inputs(workload, inputs, ("arrays",))

        def run() -> Figures:
            with bench.directory() as directory:
                arguments = {"store": "ours", "level": "store", "inputs": str(inputs), "directory": str(directory)}
                (putting,) = run_together([Job("play", arguments)])
                (building,) = run_together(
                    [Job("building", {"directory": str(directory), "rollout_id": f"{workload.name}-0"})]
                )
                return {"put": putting["memory"] / MEGABYTE, "build": building["memory"] / MEGABYTE}

        bench.say("memory: long")
        found = bench.interleaved({"memory": run})["memory"]
    yield Outcome("memory", "peak memory while putting long, MB", "long", found["put"], False, PUT_BOUND)
    title = f"peak memory of freeze + build of {workload.calls} calls, MB"
    yield Outcome("memory", title, "long", found["build"], False, BUILD_BOUND)

"""Several writer processes on one file: the same calls, shared out among 1, 2, 4 and 8 of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmark.campaign import Bench, Figures, figures
from benchmark.inputs import write_inputs
from benchmark.limits import Outcome
from benchmark.processes import Job, run_together
from benchmark.workloads import Workload

COUNTS = (1, 2, 4, 8)


def measure_writers(bench: Bench, workload: Workload, counts: Sequence[int]) -> Iterator[Outcome]:
    """Total throughput against one process, and the longest wait of a put against the median."""
    sized = bench.sized(workload)
    with bench.directory("inputs") as inputs:
        write_inputs(sized, inputs, ("arrays",))

        def together(count: int) -> Callable[[], Figures]:
            def run() -> Figures:
                with bench.directory() as directory:
                    common = {"store": "ours", "level": "store", "inputs": str(inputs), "directory": str(directory)}
                    jobs = [Job("play", {**common, "part": part, "parts": count}) for part in range(count)]
                    found = figures(run_together(jobs))
                    return {**found, "wait_over_median": found["put_max_ms"] / found["put_p50_ms"]}

            return run

        bench.say(f"writer processes: {', '.join(map(str, counts))} on {workload.name}")
        found = bench.interleaved({str(count): together(count) for count in counts})
    bench.cells["writers"] = {workload.name: {f"{count} proc": cell for count, cell in found.items()}}
    single = found[str(counts[0])]["calls_per_second"]
    for count in counts:
        bound = 1.0 if count == 8 else None
        throughput = found[str(count)]["calls_per_second"] / single
        yield Outcome(
            "writers", f"total calls/s / that of {counts[0]} process", f"{count} proc", throughput, True, bound
        )
    for count in counts:
        bound = 10.0 if count == 8 else None
        wait = found[str(count)]["wait_over_median"]
        yield Outcome("writers", "longest put / median put", f"{count} proc", wait, False, bound)

"""Measure a node with one, two and four processes: messages per second, and CPU per message.

    python bench/cores.py                         one, two and four processes, three rounds
    python bench/cores.py --processes 1,2 --rounds 5 --secs 5
    python bench/cores.py --cells 8               cells of the directories of several processes

Eight queues with 1 KB messages at QoS 1, each with a publisher (64 in flight) and a consumer of its
own. The kernel chooses the process of each connection: these are clients that do not know cells.
The load comes from `sluice.bench`, on the same cores as the broker. `1` is a node with one process
as usual, without cells; `1c` is one process over all cells of a directory. Rounds alternate, and
each starts a new broker; printed are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sluice.bench.measured_broker import MeasuredBroker
from sluice.bench.measurement import Timing, measure
from sluice.bench.workload import Address, Workload

QUEUES = 8
LANES = tuple(range(QUEUES))


def start_broker(folder: Path, kind: str, cells: int) -> tuple[subprocess.Popen[str], int]:
    """Start a node; return its process and its MQTT port."""
    count = kind.removesuffix("c")
    words = [sys.executable, "-m", "sluice", "serve", "--data", str(folder / "data")]
    words += ["--log-level", "warning", "--grpc", "off", "--processes", count]
    for listener in ("--mqtt", "--http"):
        words += [listener, "127.0.0.1:0"]
    environ = dict(os.environ)
    if kind != "1":
        environ["SLUICE_PROCESSES__CELLS"] = str(max(cells, int(count)))
    if kind == "1c":
        (folder / "data" / "cells").mkdir(parents=True)
        (folder / "data" / "cells" / "count").write_text(f"{cells}\n")
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    facts = dict(fact.split("=", 1) for fact in ready.split() if "=" in fact)
    return process, int(facts["mqtt"].rpartition(":")[2])


def run(kind: str, options: argparse.Namespace, number: int) -> tuple[float, float]:
    """Return messages per second, and microseconds of the broker's CPU per message."""
    with tempfile.TemporaryDirectory(dir=options.data) as name:
        process, port = start_broker(Path(name), kind, options.cells)
        try:
            work = Workload(
                number,
                LANES,
                LANES,
                QUEUES,
                topic="$queue/cores/{publisher}",
                filter="$queue/cores/{reader}",
                group="bench",
                size=1000,
                backlog=2000,
            )
            target = MeasuredBroker(Address("127.0.0.1", port), process.pid)
            outcome = measure(target, work, Timing(options.secs), 2, 1, lambda count: None)
            delivered = outcome.between("delivered")
            assert outcome.first.broker is not None and outcome.last.broker is not None
            cpu = outcome.last.broker - outcome.first.broker
            return delivered / outcome.seconds, cpu / delivered * 1e6
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="1,1c,2,4")
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secs", type=float, default=3.0)
    parser.add_argument("--data", default=None, help="parent of the data directories")
    options = parser.parse_args()
    kinds = options.processes.split(",")
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds:
            found[kind].append(run(kind, options, number * 10 + 1))
    base: tuple[float, float] | None = None
    for kind, results in found.items():
        rate = statistics.median(one[0] for one in results)
        cost = statistics.median(one[1] for one in results)
        base = base or (rate, cost)
        rates = " ".join(f"{one[0]:.0f}" for one in results)
        print(
            f"{kind:3} {rate:8.0f} msg/s ({rate / base[0]:.2f} x)   CPU {cost:6.1f} us/msg "
            f"({cost / base[1]:.2f} x)   rounds: {rates}"
        )


if __name__ == "__main__":
    main()

"""Measure bulk reading, and what it costs consumers.

    python bench/bulk.py [--rows 300000] [--size 1000]   read a partition, and write a batch
    python bench/bulk.py --harness HARNESS [--rounds 5]  and queue throughput with such a reader
    ... --readers 2 --core 0,1                           or with several, in a process each

One broker, compiled or not (`sluice` on the PATH, or $SLUICE). The client discards the rows, or
decodes them to record batches. With the load harness, a case of it runs alternately without and
with a reader that reads another queue repeatedly, as fast as it can. The reader stands for another
machine: it shares the generator's core at the lowest priority, because two programs that compete
for a core measure the scheduler and not the broker. Needs pyarrow. The only target is 127.0.0.1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import run_case, start_broker

QUEUE = "bulk$rows"
RATE, PER_CPU = "deliv_per_s", "msgs_per_cpu_s"  # field names of mqload
CONFIG = """
[[queues.templates]]
match = "bench/#"
config = { limits = { max_queue_depth = 2000000 } }
[[queues.templates]]
match = "bulk/#"
config = { partitions = 1, limits = { max_queue_depth = 20000000 } }
[[queues.templates]]
match = "wide/#"
config = { partitions = 10, limits = { max_queue_depth = 20000000 } }
"""


def call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes = b"",
    kind: str = "",
) -> Any:
    connection.request(
        method, f"/api/v1/bulk{path}", body or None, {"Content-Type": kind} if kind else {}
    )
    answer = connection.getresponse()
    data = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {data.decode()}")
    return json.loads(data)


def fill(connection: http.client.HTTPConnection, queue: str, rows: int, size: int) -> None:
    """Measure staging and committing batches of about 30 MB."""
    each = max(1, min(rows, 30_000_000 // (size + 100)))
    payload = os.urandom(size)
    table = pa.table(
        {
            "value": pa.array([payload] * each),
            "key": pa.array([b"%d" % (nth % 1000) for nth in range(each)]),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, 8192)
    body = bytes(sink.getvalue())
    staged: list[float] = []
    committed: list[float] = []
    for batch in range(-(-rows // each)):
        began = time.perf_counter()
        stage = call(
            connection,
            "POST",
            f"/stages/{queue}/{batch}?queue={queue}",
            body,
            "application/vnd.apache.arrow.stream",
        )
        between = time.perf_counter()
        args = json.dumps({"stages": [stage["stage"]], "rows": each}).encode()
        call(connection, "POST", f"/stages/{queue}/{batch}/commit", args, "application/json")
        staged.append(between - began)
        committed.append(time.perf_counter() - between)
    print(
        f"{queue}: {len(staged)} batches of {each:,} rows, {len(body) / 1e6:.0f} MB: staged in "
        f"{statistics.median(staged):.3f} s, committed in {statistics.median(committed):.3f} s "
        f"(slowest {max(committed):.3f} s), "
        f"{each / statistics.median(map(sum, zip(staged, committed))):,.0f} rows/s"
    )


def read(
    connection: http.client.HTTPConnection,
    queue: str,
    partition: dict[str, int],
    as_arrow: bool,
    columns: str = "",
) -> int:
    """Read a whole partition and return its row count (0 if rows are not decoded)."""
    path = f"/api/v1/bulk/queues/{queue}/partitions/{partition['partition']}/rows"
    connection.request(
        "GET", f"{path}?start={partition['earliest']}&end={partition['latest']}&columns={columns}"
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(answer.read().decode())
    if as_arrow:
        found = sum(batch.num_rows for batch in pa.ipc.open_stream(answer))
        answer.read()
        return found
    piece = bytearray(1 << 20)
    while answer.readinto(piece):
        pass
    return partition["latest"] - partition["earliest"]


def measure(
    connection: http.client.HTTPConnection,
    queue: str,
    rounds: int,
    as_arrow: bool,
    columns: str = "",
) -> float:
    parts = call(connection, "GET", f"/queues/{queue}/offsets")["partitions"]
    rates: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        rows = sum(read(connection, queue, part, as_arrow, columns) for part in parts)
        rates.append(rows / (time.perf_counter() - began))
    return statistics.median(rates)


class Reader:
    """Reads a queue repeatedly until stopped, in a process of its own so that no lock is shared."""

    def __init__(self, facts: dict[str, str], core: str) -> None:
        self.process = subprocess.Popen(
            [
                "nice",
                "-n",
                "19",
                "taskset",
                "-c",
                core,
                sys.executable,
                __file__,
                "--read",
                facts["http"],
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def end(self) -> dict[str, float]:
        found, _ = self.process.communicate("\n", timeout=120)
        args: dict[str, float] = json.loads(found)
        return args


def loop(address: str) -> None:
    """Run the reader process until a line arrives on stdin."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    line = http.client.HTTPConnection(address)
    [part] = call(line, "GET", f"/queues/{QUEUE}/offsets")["partitions"]
    rows = 0
    began = time.perf_counter()
    while not stop.is_set():
        rows += read(line, QUEUE, part, False)
    print(json.dumps({"rows_per_s": rows / (time.perf_counter() - began)}))


def workers_of(broker: int) -> list[int]:
    """Move the bulk-reader processes of a broker, which started on the broker's core."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                is_child = (
                    int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                    == broker
                )
                if (
                    is_child
                    and "sluice.bulk.read_worker" in Path(f"/proc/{name}/cmdline").read_text()
                ):
                    found.append(int(name))
    if not found:
        raise SystemExit("no bulk reader process found")
    return found


def measure_beside_consumers(options: Any, facts: dict[str, str]) -> None:
    harness = Path(options.harness).resolve()
    sys.path.insert(0, str(harness))
    import compare

    mqload = str(Path(os.environ.get("SL_BIN", harness)) / "mqload")
    arguments: list[str] = compare.CASES[options.case][1]
    found: list[tuple[dict[str, Any], dict[str, Any], float]] = []
    run_case(mqload, arguments, facts, options)  # warm up, and create the queue
    for _ in range(options.rounds):
        alone = run_case(mqload, arguments, facts, options)
        readers = [Reader(facts, options.gen_core) for _ in range(options.readers)]
        time.sleep(1)
        if options.worker_core:
            for worker in workers_of(int(facts["pid"])):
                os.sched_setaffinity(worker, {int(options.worker_core)})
        with_reader = run_case(mqload, arguments, facts, options)
        rows = sum(reader.end()["rows_per_s"] for reader in readers)
        found.append((alone, with_reader, rows))
        print(
            f"  alone {alone[RATE]:,.0f}/s, {alone[PER_CPU]:,.0f}/CPU-s   "
            f"with {options.readers} reading {with_reader[RATE]:,.0f}/s, "
            f"{with_reader[PER_CPU]:,.0f}/CPU-s   "
            f"read: {rows:,.0f} rows/s",
            flush=True,
        )
    for key, name in (
        (RATE, "messages per second"),
        (PER_CPU, "messages per second of broker CPU"),
    ):
        ratio = statistics.median(after[key] / before[key] for before, after, _ in found)
        print(f"{options.case}, {name}: ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What bulk reading gives and costs.")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secs", type=float, default=3.0)
    parser.add_argument("--harness", default="", help="folder of the load harness")
    parser.add_argument("--readers", type=int, default=1, help="beside one another")
    parser.add_argument("--case", default="q1k")
    parser.add_argument("--core", default="1", help="of the broker")
    parser.add_argument("--gen-core", default="0", help="of the generator and the reader")
    parser.add_argument(
        "--worker-core", default="", help="of the reading process; the broker's unless told"
    )
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        loop(options.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        broker, facts = start_broker(folder, options.core if options.harness else "", CONFIG)
        try:
            line = http.client.HTTPConnection(facts["http"], timeout=120)
            fill(line, QUEUE, options.rows, options.size)
            for what, as_arrow, columns in (
                ("bytes", False, ""),
                ("record batches", True, ""),
                ("record batches of value and sequence", True, "value,sequence"),
            ):
                rate = measure(line, QUEUE, options.rounds, as_arrow, columns)
                print(
                    f"1 partition, {options.size} B, {what}: {rate:,.0f} rows/s, "
                    f"{rate * options.size / 1e6:,.0f} MB/s"
                )
            fill(line, "wide$rows", options.rows, options.size)
            rate = measure(line, "wide$rows", max(1, options.rounds // 2), True)
            print(f"10 partitions one after the other, record batches: {rate:,.0f} rows/s")
            if options.harness:
                measure_beside_consumers(options, facts)
        finally:
            broker.terminate()
            broker.wait(20)


if __name__ == "__main__":
    main()

"""Kill Spark's driver, its Python workers and the broker while two streams run; every message
counts once.

    scripts/spark-crash --rounds 30 [--seed 1] [--format parquet] [--master local[2,3]]

A feeder publishes numbered messages to a queue. Spark copies them to another queue and writes them
to a table, each in many small batches (`driver_program.py`); the table is Delta or Parquet, by the
seed unless given. Each round waits until both streams have made progress, and a random time, and
then kills -9 one of: a Python process of Spark (a reader, a writer, the planner), the broker, the
driver with its Java, or, with a master that has separate executors, one of those. The killed
process is started again. At the end every number must be once in the target queue and once in the
table, and nothing may be left in the source queue.

Nothing here waits forever. A wait that exceeds `stall_seconds` fails with its condition, the
driver's log, and a file with the stacks of its threads, in Python and in Java; a `Watch` does so
for calls that do not return.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sluice.errors import SluiceError
from sluice.spark import BulkClient, Endpoint
from sluice.spark.pipelines.tables import FORMATS
from tests.spark.crashes.driver_program import ARCHIVE, MOVER, SOURCE, TARGET
from tests.spark.crashes.feeder import POLL_SECONDS, Feeder, finished
from tests.spark.crashes.os_processes import Watch, descendants, free_port
from tests.support.broker_process import Broker, same_build
from tests.support.external_programs import QUICK_JAVA

PROGRAM = str(Path(__file__).with_name("driver_program.py"))
# Seconds without progress: a driver starts slowly, on a busy machine very slowly.
STALL_SECONDS = 180.0
# A broker that accepts a request and never answers: the client gives up after 330 s, and retries.
LONGEST_CALL = 600.0
DUMP_SECONDS = 5.0  # for a process to write the stacks of its threads
DRIVER, BROKER, WORKER, EXECUTOR = "driver", "broker", "worker", "executor"
PYTHON_MARK, EXECUTOR_MARK, JAVA_MARK = (
    "pyspark.daemon",
    "CoarseGrainedExecutorBackend",
    "SparkSubmit",
)


@dataclass
class Outcome:
    fed: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    archived: Counter[str] = field(default_factory=Counter)
    left: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def faults(self) -> list[str]:
        wanted = {f"{nth}" for nth in range(self.fed)}
        found = [f"{self.left} messages are left in the queue"] if self.left else []
        for place, counted in (("the queue", self.moved), ("the table", self.archived)):
            found += [
                f"{number} is missing in {place}"
                for number in sorted(wanted - counted.keys(), key=int)
            ]
            found += [
                f"{number} is {times} times in {place}"
                for number, times in counted.items()
                if times > 1
            ]
            found += [
                f"{number} in {place} was never published" for number in counted.keys() - wanted
            ]
        return found


class CrashRun:
    """The broker, the driver, and their state."""

    def __init__(
        self, folder: Path, master: str, seed: int, stall_seconds: float, say: bool, kind: str
    ) -> None:
        self.folder = folder
        self._kind = kind
        self._stall_seconds = stall_seconds
        self.outcome = Outcome()
        self._master = master
        self._draw = random.Random(seed)
        self._say = say
        (folder / "broker").mkdir()
        self._http = f"127.0.0.1:{free_port()}"
        self._broker = self._start_broker()
        self.where = Endpoint(f"http://{self._http}", retry_seconds=stall_seconds)
        self.bulk_client = BulkClient(self.where)
        self.feeder = Feeder(self.where)
        self._watch = Watch(self._give_up, stall_seconds + LONGEST_CALL)
        self._watch.start()
        with BulkClient(self.where) as bulk_client:
            bulk_client._request_json("POST", "/queues", {"name": SOURCE, "partitions": 2})
            for group in (MOVER, ARCHIVE):
                bulk_client.advance(SOURCE, group, {}, create=True)
        self._driver = self._start_driver()

    def _start_broker(self) -> Broker:
        return Broker(self.folder / "broker", "", ["--http", self._http], {})

    def _start_driver(self) -> subprocess.Popen[bytes]:
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    PROGRAM,
                    str(self.folder),
                    self.where.url,
                    self._master,
                    self._kind,
                ],
                env={
                    **same_build(),
                    "TMPDIR": str(self.folder),
                    "SPARK_LOCAL_DIRS": str(self.folder / "local"),
                    "JAVA_TOOL_OPTIONS": QUICK_JAVA,
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def report(self, text: str) -> None:
        if self._say:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def done(self) -> dict[str, int]:
        """Return how many messages each stream has finished."""
        return finished(self.bulk_client)

    def wait_for(self, what: str, group_counts: dict[str, int]) -> None:
        """Wait until each stream has finished so many messages."""
        until = time.monotonic() + self._stall_seconds
        while time.monotonic() < until:
            if self._driver.poll() is not None:
                raise AssertionError(f"the driver has ended by itself\n{self.log()}")
            if self.feeder.fault is not None:
                raise AssertionError(f"nothing is published any more: {self.feeder.fault}")
            now = self.done()
            self._watch.alive()
            if all(now[group] >= count for group, count in group_counts.items()):
                return
            time.sleep(POLL_SECONDS)
        raise AssertionError(
            f"{what}: {now} and not {group_counts} after {self._stall_seconds:.0f} s; "
            f"{self.feeder.fed} are published\n"
            f"{self.stacks()}"
        )

    def log(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-3000:]

    def stacks(self) -> str:
        """Return the driver's log, and write the stacks of all its threads to a file.

        Python does that on SIGUSR1 (driver_program.py), and Java on SIGQUIT.
        """
        before = (self.folder / "driver.log").stat().st_size
        log_text = self.log()
        if self._driver.poll() is None:
            java = [
                pid
                for pid, (_, words) in descendants(self._driver.pid).items()
                if JAVA_MARK in words
            ]
            for pid, number in (
                (self._driver.pid, signal.SIGUSR1),
                *((one, signal.SIGQUIT) for one in java),
            ):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            time.sleep(DUMP_SECONDS)
        with (self.folder / "driver.log").open(errors="replace") as log:
            log.seek(before)
            stored = self.folder.with_name(f"{self.folder.name}-threads.txt")
            stored.write_text(log.read())
            return f"{log_text}\nwhat its threads were doing is in {stored}"

    def round(self, victim: str) -> None:
        before = self.done()
        self.wait_for(
            f"before the {victim} is killed", {group: count + 1 for group, count in before.items()}
        )
        time.sleep(self._draw.uniform(0.0, 1.0))
        self.outcome.kills[victim] += 1
        if victim == BROKER:
            self._broker.kill()
            self._broker = self._start_broker()
        elif victim == DRIVER:
            self.kill_driver()
            self._driver = self._start_driver()
        else:
            below = descendants(self._driver.pid)
            if victim == EXECUTOR:
                chosen = [pid for pid, (_, words) in below.items() if EXECUTOR_MARK in words]
            else:
                daemons = {pid for pid, (_, words) in below.items() if PYTHON_MARK in words}
                chosen = [pid for pid in daemons if below[pid][0] in daemons]
            if chosen:
                pid = self._draw.choice(chosen)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it was ending already
        self.report(f"killed the {victim}; finished so far: {before}")

    def kill_driver(self) -> None:
        """Kill the driver with its Java; the Python processes end when their connections close."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait(self._stall_seconds)

    def finish(self, fed: int) -> None:
        """Let the streams finish, and count."""
        self.wait_for("at the end", dict.fromkeys((MOVER, ARCHIVE), fed))
        (self.folder / "stop").touch()
        try:
            code = self._driver.wait(self._stall_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver does not end\n{self.stacks()}") from None
        assert code == 0, self.log()
        self._watch.alive()
        outcome = self.outcome
        outcome.fed = fed
        outcome.archived.update(json.loads((self.folder / "table.json").read_text()))
        stored = {
            one.partition: (one.earliest, one.latest)
            for one in self.bulk_client.offsets(TARGET).partitions
        }
        for batch in self.bulk_client.rows(TARGET, stored, ["value"]):
            outcome.moved.update(value.decode() for value in batch.column("value").to_pylist())
        outcome.left = sum(
            one.latest - one.earliest for one in self.bulk_client.offsets(SOURCE).partitions
        )

    def _give_up(self) -> None:
        """Stop waiting: kill the broker, so that all its clients get an error."""
        print(self.stacks(), flush=True)
        self.kill_driver()
        self._broker.kill()

    def close(self) -> None:
        self._watch.end()
        self.bulk_client.close()
        self.kill_driver()
        self._broker.stop()


def crash(
    folder: Path,
    victims: list[str],
    master: str,
    seed: int,
    stall_seconds: float = STALL_SECONDS,
    minutes: float = math.inf,
    say: bool = False,
    kind: str = "",
) -> Outcome:
    """Kill all victims in turn, or as many as fit into `minutes`."""
    end = time.monotonic() + minutes * 60
    stage = CrashRun(folder, master, seed, stall_seconds, say, kind or FORMATS[seed % len(FORMATS)])
    feeder = stage.feeder
    feeder.start()
    try:
        for victim in victims:
            if time.monotonic() < end:
                stage.round(victim)
        feeder.ending.set()
        feeder.join()
        stage.finish(feeder.fed)
    finally:
        feeder.ending.set()
        feeder.join()
        stage.close()
    return stage.outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kill Spark and the broker, and count every message."
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--format", choices=FORMATS, default="", help="of the table; by the seed unless given"
    )
    parser.add_argument(
        "--master", default="local[2,3]", help="local-cluster[1,2,1024] has executors to kill"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further round after so many"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=STALL_SECONDS,
        metavar="SECONDS",
        help="until something counts as stuck",
    )
    reported = parser.parse_args()
    turns = [EXECUTOR if reported.master.startswith("local-cluster") else WORKER, BROKER, DRIVER]
    victims = [turns[nth % len(turns)] for nth in range(reported.rounds)]
    with tempfile.TemporaryDirectory(prefix="sluice-spark-crash-") as folder:
        try:
            outcome = crash(
                Path(folder),
                victims,
                reported.master,
                reported.seed,
                reported.stall_seconds,
                reported.minutes,
                say=True,
                kind=reported.format,
            )
        except (AssertionError, SluiceError) as stuck:
            print(stuck)
            return 1
    faults = outcome.faults()
    for fault in faults[:50]:
        print(f"FAULT: {fault}")
    kills = ", ".join(f"{count} times the {victim}" for victim, count in outcome.kills.items())
    print(f"killed {kills}; seed {reported.seed}: {outcome.fed} messages, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

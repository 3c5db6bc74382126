"""Kill Spark's driver, its Python workers and the broker in turns, while two streams run; every message counts once.

    scripts/spark-crash --rounds 30 [--seed 1] [--master local[2,3]]

A feeder numbers messages into a queue. Spark moves them into another queue and writes them to a table, each in many
small batches (`streams.py`). Each round waits until both have got on, and a random moment, and kills -9 one of: a
Python process of Spark's (a reader, a writer, the planner), the broker, the driver with its Java, or with a master that
has executors of their own one of those. What was killed is started again. At the end every number must be in the
target queue once and in the table once, and nothing may be left in the source queue.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from sluice.errors import SluiceError
from sluice.spark import Door, Where
from sluice.spark.faults import Refused
from tests.brokers import Broker, same_build
from tests.spark.streams import ARCHIVE, MOVER, SOURCE, TARGET

AT_ONCE = 40  # messages of a batch of the feeder
AHEAD = 400
PROGRAM = str(Path(__file__).with_name("streams.py"))
PATIENCE = 180.0  # seconds for anything to happen: a driver starts slowly on a busy machine
DRIVER, BROKER, WORKER, EXECUTOR = "driver", "broker", "worker", "executor"
PYTHON_MARK, EXECUTOR_MARK = "pyspark.daemon", "CoarseGrainedExecutorBackend"


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
                f"{number} is missing in {place}" for number in sorted(wanted - counted.keys(), key=int)
            ]
            found += [
                f"{number} is {times} times in {place}" for number, times in counted.items() if times > 1
            ]
            found += [f"{number} in {place} was never published" for number in counted.keys() - wanted]
        return found


def descendants(pid: int) -> dict[int, tuple[int, str]]:
    """The processes below one: parent and command line of each."""
    every: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, IndexError):
                continue  # it has ended meanwhile
            every[int(entry.name)] = (parent, words)
    found: dict[int, tuple[int, str]] = {}
    below = {pid}
    while below:
        below = {child for child, (parent, _) in every.items() if parent in below}
        found.update({child: every[child] for child in below})
    return found


class Feeder(threading.Thread):
    """Numbers into the queue, each once, whatever becomes of the broker: what is not answered is sent again. It stays a
    few batches ahead of the streams."""

    def __init__(self, where: Where) -> None:
        super().__init__()
        self._where = where
        self.fed = 0
        self.ending = threading.Event()

    def run(self) -> None:
        batch = 0
        while not self.ending.wait(0.1):
            if self.fed - self._slowest() > AHEAD:
                continue
            numbers = [b"%d" % nth for nth in range(self.fed, self.fed + AT_ONCE)]
            table = pa.table({"value": numbers, "key": [b"%d" % (int(one) % 7) for one in numbers]})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            while True:
                try:
                    with Door(self._where) as door:
                        stage = door.stage("feeder", batch, SOURCE, bytes(sink.getvalue()))
                        door.commit("feeder", batch, [stage], AT_ONCE)
                    break
                except Refused as refusal:
                    if refusal.code != "stale_batch":  # the broker was killed in between
                        raise
            batch += 1
            self.fed += AT_ONCE

    def _slowest(self) -> int:
        with Door(self._where) as door:
            return min(sum(door.progress(SOURCE, group).values()) for group in (MOVER, ARCHIVE))


class Stage:
    """The broker, the driver, and what is known of them."""

    def __init__(self, folder: Path, master: str, seed: int, say: bool) -> None:
        self.folder = folder
        self.outcome = Outcome()
        self._master = master
        self._draw = random.Random(seed)
        self._say = say
        (folder / "broker").mkdir()
        self._broker = Broker(folder / "broker", "", (), {})
        self._http = str(self._broker.address("http"))
        self.where = Where(f"http://{self._http}", retry_seconds=PATIENCE)
        self.door = Door(self.where)
        with Door(self.where) as door:
            door._ask("POST", "/queues", {"name": SOURCE, "partitions": 2})
            for group in (MOVER, ARCHIVE):
                door.advance(SOURCE, group, {}, create=True)
        self._driver = self._start_driver()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, PROGRAM, str(self.folder), self.where.url, self._master],
                env=same_build(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def say(self, text: str) -> None:
        if self._say:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def done(self) -> dict[str, int]:
        """How many messages each stream has finished."""
        return {group: sum(self.door.progress(SOURCE, group).values()) for group in (MOVER, ARCHIVE)}

    def wait_for(self, what: str, group_counts: dict[str, int]) -> None:
        """Until each stream has finished so many."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self._driver.poll() is not None:
                raise AssertionError(f"the driver has ended by itself\n{self.log()}")
            now = self.done()
            if all(now[group] >= count for group, count in group_counts.items()):
                return
            time.sleep(0.1)
        raise AssertionError(f"{what}: {now} and not {group_counts} after {PATIENCE:.0f} s\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-3000:]

    def round(self, victim: str) -> None:
        before = self.done()
        self.wait_for(f"before the {victim} is killed", {group: count + 1 for group, count in before.items()})
        time.sleep(self._draw.uniform(0.0, 1.0))
        self.outcome.kills[victim] += 1
        if victim == BROKER:
            self._broker.kill()
            self._broker = Broker(self._broker.folder, "", ["--http", self._http], {})
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
                    pass  # it was ending anyway
        self.say(f"killed the {victim}; finished so far: {before}")

    def kill_driver(self) -> None:
        """With its Java; the Python processes end when nobody talks to them any more."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()

    def finish(self, fed: int) -> None:
        """Let the streams come to the end, and count."""
        self.wait_for("at the end", dict.fromkeys((MOVER, ARCHIVE), fed))
        (self.folder / "stop").touch()
        assert self._driver.wait(PATIENCE) == 0, self.log()
        outcome = self.outcome
        outcome.fed = fed
        outcome.archived.update(json.loads((self.folder / "table.json").read_text()))
        for one in self.door.offsets(TARGET).partitions:
            for batch in self.door.rows(TARGET, one.partition, one.earliest, one.latest, ["value"]):
                outcome.moved.update(value.decode() for value in batch.column("value").to_pylist())
        outcome.left = sum(one.latest - one.earliest for one in self.door.offsets(SOURCE).partitions)

    def close(self) -> None:
        self.door.close()
        self.kill_driver()
        self._broker.stop()


def crash(folder: Path, victims: list[str], master: str, seed: int, say: bool = False) -> Outcome:
    stage = Stage(folder, master, seed, say)
    feeder = Feeder(stage.where)
    feeder.start()
    try:
        for victim in victims:
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
    parser = argparse.ArgumentParser(description="Kill Spark and the broker, and count every message.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--master", default="local[2,3]", help="local-cluster[1,2,1024] has executors to kill"
    )
    told = parser.parse_args()
    turns = [EXECUTOR if told.master.startswith("local-cluster") else WORKER, BROKER, DRIVER]
    victims = [turns[nth % len(turns)] for nth in range(told.rounds)]
    with tempfile.TemporaryDirectory(prefix="sluice-spark-crash-") as folder:
        try:
            outcome = crash(Path(folder), victims, told.master, told.seed, say=True)
        except (AssertionError, SluiceError) as stuck:
            print(stuck)
            return 1
    faults = outcome.faults()
    for fault in faults[:50]:
        print(f"FAULT: {fault}")
    kills = ", ".join(f"{count} times the {victim}" for victim, count in outcome.kills.items())
    print(f"killed {kills}; seed {told.seed}: {outcome.fed} messages, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

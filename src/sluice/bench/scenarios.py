"""The scenarios: who publishes to whom, and how much. Each maps a Bench to results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from sluice.bench.generator import cpu_seconds
from sluice.bench.measured_broker import BenchError, MeasuredBroker
from sluice.bench.measurement import (
    GeneratorProcesses,
    Measurement,
    ProgressCallback,
    Timing,
    make_result,
    measure,
)
from sluice.bench.procfs import CpuUsage
from sluice.bench.results import Result, assess_cpu, merge_histograms, percentiles_ms
from sluice.bench.workload import Workload
from sluice.client.errors import PublishRefused
from sluice.client.sync import Client

PUBLISHERS: Final = 4
READERS: Final = 4
SLOTS: Final = 256  # keys of each publisher: 1,024 in total
SUBSCRIBERS: Final = 100
OWNERS: Final = 25  # of each publisher
KEYS: Final = 100  # of each owner
FOUR_IDS: Final = tuple(range(PUBLISHERS))
SETTLE_SECONDS: Final = 0.3  # for the memory of the broker to stabilize


@dataclass(frozen=True)
class ScenarioSizes:
    """The sizes of all scenarios."""

    payload: int = 1000
    timing: Timing = field(default_factory=Timing)
    backlog: int = 200_000
    queues: int = 1000
    connections: int = 5000
    rate: float = 1000.0


@dataclass(frozen=True)
class Bench:
    target: MeasuredBroker
    size: ScenarioSizes
    durability: str
    processes: int
    on_progress: ProgressCallback
    run: int

    def messages_per_publisher(self, publishers: int) -> int:
        """Return the number of messages of each publisher; -1 if the run is timed."""
        return (
            -1
            if self.size.timing.messages is None
            else max(1, self.size.timing.messages // publishers)
        )

    def make_queue(self, name: str, **config: object) -> str:
        """Create a queue for this run, and return the topic to publish to."""
        full = f"bench/{self.run}/{name}"
        queue_config = {"name": full, "performance": {"durability": self.durability}, **config}
        address = self.target.address
        try:
            with Client(
                address.host,
                address.port,
                tls=address.tls,
                username=address.username,
                password=address.password,
                client_id=f"bench-{self.run}",
            ) as client:
                client.publish("$admin/queue/create", json.dumps(queue_config), qos=1)
        except PublishRefused as refusal:
            raise BenchError(
                f"the broker refuses to create a queue: {refusal.what}", refusal.remedy
            ) from None
        return f"$queue/{full}"

    def measure(
        self, work: Workload, deliveries: float, queued_before: int = 0, processes: int = 0
    ) -> Measurement:
        return measure(
            self.target,
            work,
            self.size.timing,
            processes or self.processes,
            deliveries,
            self.on_progress,
            queued_before,
        )


def pubsub(bench: Bench) -> list[Result]:
    work = Workload(
        bench.run,
        FOUR_IDS,
        FOUR_IDS,
        PUBLISHERS,
        topic="bench/{run}/plain/{publisher}",
        filter="bench/{run}/plain/{reader}",
        size=bench.size.payload,
        backlog=4000,
        messages=bench.messages_per_publisher(PUBLISHERS),
    )
    outcome = bench.measure(work, 1)
    return [
        make_result(
            "pubsub", "plain topics, QoS 1, 4 to 4", outcome, {each: [each] for each in FOUR_IDS}
        )
    ]


def queue_work(bench: Bench, topic: str, readers: int, slots: int) -> Workload:
    return Workload(
        bench.run,
        FOUR_IDS,
        tuple(range(readers)),
        PUBLISHERS,
        topic=topic,
        filter=topic,
        slots=slots,
        by_key=slots > 1,
        group="bench",
        shared=True,
        size=bench.size.payload,
        backlog=2000,
        messages=bench.messages_per_publisher(PUBLISHERS),
    )


def queue(bench: Bench) -> list[Result]:
    work = queue_work(bench, bench.make_queue("queue"), READERS, SLOTS)
    outcome = bench.measure(work, 1)
    return [
        make_result(
            "queue", "durable queue, 4 publishers, 4 consumers, 1,024 keys", outcome, {0: FOUR_IDS}
        )
    ]


def strict(bench: Bench) -> list[Result]:
    work = queue_work(bench, bench.make_queue("strict", ordering="strict"), 1, 1)
    outcome = bench.measure(work, 1)
    return [
        make_result(
            "strict", "strict queue: one message out at a time, 4 to 1", outcome, {0: FOUR_IDS}
        )
    ]


def fan_out(bench: Bench) -> list[Result]:
    readers = tuple(range(SUBSCRIBERS))
    work = Workload(
        bench.run,
        (0,),
        readers,
        1,
        topic="bench/{run}/fan",
        filter="bench/{run}/fan",
        qos=0,
        size=bench.size.payload,
        backlog=100 * SUBSCRIBERS,
        deliveries_per_message=SUBSCRIBERS,
        messages=bench.messages_per_publisher(SUBSCRIBERS),
    )
    # One process: the publisher throttles by what all readers have received.
    outcome = bench.measure(work, SUBSCRIBERS, processes=1)
    what = f"plain topic, QoS 0, 1 to {SUBSCRIBERS}; deliveries are counted"
    return [make_result("fan-out", what, outcome, {reader: [0] for reader in readers})]


def compacted(bench: Bench) -> list[Result]:
    """Overwrite values at random, then let their owners read: the last value of each key, once."""
    slots = OWNERS * KEYS
    work = Workload(
        bench.run,
        FOUR_IDS,
        (),
        PUBLISHERS,
        topic="$ECQ/w/bench-{run}-owner-{owner}/{key}",
        slots=slots,
        keys=KEYS,
        size=bench.size.payload,
        messages=bench.messages_per_publisher(PUBLISHERS),
        measures_acks=True,
    )
    outcome = bench.measure(work, 0)
    what = f"exclusive queues, {PUBLISHERS * OWNERS} owners of {KEYS} keys; overwrites are counted"
    result = make_result("compacted", what, outcome, {})
    published = outcome.published
    stored = sum(min(count, slots) for count in published.values())
    reading = replace(
        work,
        publishers=(),
        readers=tuple(range(PUBLISHERS * OWNERS)),
        filter="$ECQ/bench-{run}-owner-{reader}/#",
        reader_id="bench-{run}-owner-{reader}",
        shared=True,
        measures_acks=False,
        subscribes_late=True,
    )
    counted = replace(
        bench, size=replace(bench.size, timing=replace(bench.size.timing, messages=stored))
    )
    read = make_result(
        "compacted",
        "",
        counted.measure(reading, 1, stored),
        {0: FOUR_IDS},
        published=published,
        last=slots,
    )
    result.lost += read.lost
    result.doubled += read.doubled
    result.disordered += read.disordered
    result.facts["values_read_back_per_second"] = round(read.per_second)
    return [result]


def backlog(bench: Bench) -> list[Result]:
    """Fill a queue without readers, measure the memory, and drain it."""
    count = bench.size.timing.messages or bench.size.backlog
    timing = replace(bench.size.timing, messages=count)
    counted = replace(bench, size=replace(bench.size, timing=timing))
    topic = bench.make_queue("backlog", limits={"max_queue_depth": max(2 * count, 1000)})
    workload = replace(queue_work(counted, topic, READERS, SLOTS), backlog=0)
    before = bench.target.sample().memory
    filling = counted.measure(replace(workload, readers=(), measures_acks=True, group=""), 0)
    time.sleep(SETTLE_SECONDS)
    after = bench.target.sample().memory
    published = filling.published
    filled = make_result(
        "backlog fill", f"{sum(published.values()):,} messages without readers", filling, {}
    )
    if before is not None and after is not None:
        filled.memory_bytes = after
        filled.facts["memory_bytes_per_message"] = round(
            (after - before) / sum(published.values()), 1
        )
    emptying = replace(workload, publishers=(), subscribes_late=True)
    draining = counted.measure(emptying, 1, sum(published.values()))
    drained = make_result(
        "backlog drain",
        "the same, taken by 4 consumers",
        draining,
        {0: FOUR_IDS},
        published=published,
    )
    drained.latency_ms = {}  # the time in the queue means nothing
    return [filled, drained]


def many_queues(bench: Bench) -> list[Result]:
    topic = f"$queue/bench/{bench.run}/many/{{slot:05}}"
    work = queue_work(bench, topic, READERS, bench.size.queues)
    work = replace(work, filter=f"$queue/bench/{bench.run}/many/#")
    outcome = bench.measure(work, 1)
    what = f"{bench.size.queues:,} durable queues in turn, 4 publishers, 4 consumers of all"
    return [make_result("many-queues", what, outcome, {0: FOUR_IDS})]


def latency(bench: Bench) -> list[Result]:
    """Open loop: messages are due at fixed times, and their latency counts from then."""
    two = (0, 1)
    work = replace(
        queue_work(bench, bench.make_queue("latency"), 2, SLOTS),
        publishers=two,
        all_publishers=2,
        rate=bench.size.rate,
        backlog=0,
        messages=bench.messages_per_publisher(2),
    )
    outcome = bench.measure(work, 1, processes=1)
    what = (
        f"durable queue at {bench.size.rate:,.0f} messages per second,"
        " counted from when each was due"
    )
    result = make_result("latency", what, outcome, {0: two})
    late = percentiles_ms(merge_histograms(outcome.reports, "lateness"))
    result.facts.update(
        {f"sent_late_ms_{name}": value for name, value in late.items() if value is not None}
    )
    due, sent = bench.size.rate * result.seconds, outcome.between("sent")
    if bench.size.timing.messages is None and sent < 0.98 * due:
        result.warnings.append(
            f"only {sent:,.0f} of {due:,.0f} messages left in time: the rate is too high"
        )
    return [result]


def idle(bench: Bench) -> list[Result]:
    """Open idle connections."""
    count = min(bench.size.connections, bench.size.timing.messages or bench.size.connections)
    first, own_cpu = bench.target.sample(), cpu_seconds()
    with GeneratorProcesses(
        bench.target, Workload(bench.run, idle=count), bench.processes
    ) as generators:
        began = bench.target.sample()
        answers = generators.ask("idle")
        done = bench.target.sample()
        time.sleep(SETTLE_SECONDS)
        settled = bench.target.sample()
    faults = [fault for answer in answers for fault in answer["faults"]]
    if faults:
        raise BenchError(
            faults[0], "Ask for fewer with --connections, or raise the limit of open files"
        )
    result = Result(
        "idle", f"{count:,} connections; connects are counted", count, done.at - began.at
    )
    result.per_second = count / result.seconds
    assess_cpu(
        result,
        CpuUsage.between(began, done),
        [answer["cpu"] for answer in answers],
        cpu_seconds() - own_cpu,
    )
    result.memory_bytes = settled.memory
    if settled.memory is not None and first.memory is not None:
        result.facts["memory_bytes_per_connection"] = round((settled.memory - first.memory) / count)
    return [result]


SCENARIOS: Final[dict[str, Callable[[Bench], list[Result]]]] = {
    "pubsub": pubsub,
    "queue": queue,
    "strict": strict,
    "fan-out": fan_out,
    "compacted": compacted,
    "backlog": backlog,
    "many-queues": many_queues,
    "idle": idle,
    "latency": latency,
}

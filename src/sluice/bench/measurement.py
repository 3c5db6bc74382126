"""Run generator processes through one measurement: ready, begin, warm, end, drained, report.

The processes agree on times, not on signals: all of them count between the same two times of the
monotonic clock, at which this process samples the broker's CPU.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from sluice.bench.generator import cpu_seconds
from sluice.bench.measured_broker import (
    BenchError,
    BrokerUnreachable,
    MeasuredBroker,
    child_environment,
    stop_process,
)
from sluice.bench.procfs import CpuSample, CpuUsage
from sluice.bench.results import Result, assess_cpu, find_faults, merge_histograms, percentiles_ms
from sluice.bench.workload import Workload, split_workload

# from the command "begin" to the start, so that all processes have read it
LEAD_SECONDS: Final = 0.1
POLL_SECONDS: Final = 0.05
REPLY_SECONDS: Final = 60.0  # for a reply; a loaded machine is slow

ProgressCallback = Callable[[int], None]  # gets the number of messages so far


@dataclass(frozen=True)
class Timing:
    """How long a measurement takes. With `messages`, as long as these need, without a warm-up."""

    seconds: float = 3.0
    warm_seconds: float = 0.5
    messages: int | None = None
    stall_seconds: float = 10.0  # without any progress: messages that are missing then are lost


@dataclass
class Measurement:
    """The reports and samples of one measurement."""

    work: Workload
    reports: list[dict[str, Any]]
    first: CpuSample
    last: CpuSample
    own_cpu: float

    @property
    def published(self) -> dict[int, int]:
        return {
            int(who): count for report in self.reports for who, count in report["published"].items()
        }

    def between(self, name: str) -> float:
        """Return the growth of a counter within the measured time, over all processes."""
        return float(
            sum(report["spans"][1][name] - report["spans"][0][name] for report in self.reports)
        )

    @property
    def seconds(self) -> float:
        begin: float = min(report["spans"][0]["at"] for report in self.reports)
        end: float = max(report["spans"][1]["at"] for report in self.reports)
        return max(end - begin, 1e-6)


class GeneratorProcesses:
    """The generator processes of one measurement. Leaving the context ends them."""

    def __init__(self, target: MeasuredBroker, work: Workload, processes: int) -> None:
        self._target = target
        self._shares = split_workload(work, processes)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for share in self._shares:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sluice.bench.generator"],
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                self._processes.append(process)
                self._send_line(process, share.to_line(self._target.address))
            for process in self._processes:
                answer = self._read_reply(process)
                if not answer["ready"]:
                    fault = answer["faults"][0]
                    kind = BrokerUnreachable if fault.startswith("no connection") else BenchError
                    address = self._target.address
                    raise kind(
                        f"{address.host}:{address.port}: {fault}",
                        "Check that it is an MQTT 5.0 broker, and the user and password",
                    )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    pass  # already ended
        for process in self._processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
            stop_process(process)
        self._processes = []

    def send(self, order: Mapping[str, Any]) -> None:
        for process in self._processes:
            self._send_line(process, json.dumps(order))

    def ask(self, what: str) -> list[dict[str, Any]]:
        self.send({"do": what})
        return [self._read_reply(process) for process in self._processes]

    def _send_line(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise BenchError("a generator process has ended by itself") from None

    def _read_reply(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(REPLY_SECONDS) else b""
        if not line:
            raise BenchError("a generator process does not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(
    target: MeasuredBroker,
    work: Workload,
    timing: Timing,
    processes: int,
    deliveries: float,
    on_progress: ProgressCallback,
    queued_before: int = 0,
) -> Measurement:
    """Run `work` and wait until everything has arrived.

    `deliveries` of each message are awaited (0: its PUBACK), also for the `queued_before` messages
    that were in the queue before.
    """
    with GeneratorProcesses(target, work, processes) as generators:
        at = time.monotonic() + LEAD_SECONDS
        timed = timing.messages is None
        warm = at + (timing.warm_seconds if timed else 0.0)
        stop = warm + timing.seconds if timed else None
        # A few messages can be done before this process wakes up, so the first sample is taken
        # before the start.
        first, own_cpu = replace(target.sample(), at=at), cpu_seconds()
        generators.send({"do": "begin", "at": at, "warm": warm, "end": stop})
        _sleep_until(warm)
        if timed:
            first, own_cpu = target.sample(), cpu_seconds()
        last: CpuSample | None = None
        if stop is not None:
            while (left := stop - time.monotonic()) > 0:
                time.sleep(min(left, 0.25))
                if left > 0.5:  # near the end, do not disturb the processes
                    on_progress(
                        sum(
                            each["delivered"] or each["confirmed"]
                            for each in generators.ask("progress")
                        )
                    )
            last = target.sample()
            own_cpu = cpu_seconds() - own_cpu
        _wait_drained(generators, timing, deliveries, queued_before, on_progress)
        if last is None:
            last = target.sample()
            own_cpu = cpu_seconds() - own_cpu
        return Measurement(work, generators.ask("report"), first, last, own_cpu)


def _wait_drained(
    generators: GeneratorProcesses,
    timing: Timing,
    deliveries: float,
    queued_before: int,
    on_progress: ProgressCallback,
) -> None:
    progress, since = (-1, -1), time.monotonic()
    while True:
        answers = generators.ask("progress")
        faults = [fault for answer in answers for fault in answer["faults"]]
        if faults:
            raise BenchError(faults[0])
        sent, confirmed, delivered = (
            sum(answer[name] for answer in answers) for name in ("sent", "confirmed", "delivered")
        )
        if (confirmed, delivered) != progress:
            progress, since = (confirmed, delivered), time.monotonic()
            on_progress(delivered or confirmed)
        done = confirmed >= sent and delivered >= (sent + queued_before) * deliveries
        if done and not any(answer["sending"] for answer in answers):
            return
        if time.monotonic() - since > timing.stall_seconds:
            return  # missing messages count as lost
        time.sleep(POLL_SECONDS)


def _sleep_until(deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.monotonic()))


def make_result(
    scenario: str,
    what: str,
    outcome: Measurement,
    expected: Mapping[int, Sequence[int]],
    published: Mapping[int, int] | None = None,
    last: int = 0,
) -> Result:
    """Compute figures and faults. Deliveries count; without readers, PUBACKs."""
    counted = "delivered" if outcome.work.readers else "confirmed"
    faults = find_faults(
        outcome.reports, outcome.published if published is None else published, expected, last
    )
    unconfirmed = sum(report["sent"] - report["confirmed"] for report in outcome.reports)
    result = Result(
        scenario,
        what,
        messages=int(outcome.between(counted)),
        seconds=outcome.seconds,
        latency_ms=percentiles_ms(merge_histograms(outcome.reports, "latency")),
        lost=faults.lost + (0 if expected else unconfirmed),
        doubled=faults.doubled,
        disordered=faults.disordered,
        refused=sum(report["refused"] for report in outcome.reports),
        memory_bytes=outcome.last.memory,
    )
    result.per_second = result.messages / result.seconds
    generators = [
        report["spans"][1]["cpu"] - report["spans"][0]["cpu"] for report in outcome.reports
    ]
    assess_cpu(result, CpuUsage.between(outcome.first, outcome.last), generators, outcome.own_cpu)
    return result

"""Conducts generator processes through one measurement: ready, begin, warm, end, drained, report.

The processes agree on times and not on signals: all of them count between the same two moments of the steady clock, at
which this process looks at the broker's CPU.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

from sluice.bench.generator import cpu_seconds
from sluice.bench.procfs import Sample, Spent
from sluice.bench.results import Result, find_faults, in_milliseconds, judge, merged
from sluice.bench.measured_broker import BenchError, NotReachable, Target, end, same_build
from sluice.bench.workload import Work, share_out

LEAD_SECONDS: Final = 0.1  # from "begin" to the beginning, so that everybody has heard it
POLL_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 60.0  # for an answer; a loaded machine is slow

Tell = Callable[[int], None]  # how many messages so far: for whoever watches


@dataclass(frozen=True)
class Timing:
    """How long a measurement takes. With `messages`, as long as these need: then nothing is warmed up."""

    seconds: float = 3.0
    warm_seconds: float = 0.5
    messages: int | None = None
    stall_seconds: float = 10.0  # without any progress: what has not come by then is lost


@dataclass
class Outcome:
    """What a measurement saw."""

    work: Work
    reports: list[dict[str, Any]]
    first: Sample
    last: Sample
    own_cpu: float

    @property
    def published(self) -> dict[int, int]:
        return {int(who): count for report in self.reports for who, count in report["published"].items()}

    def between(self, name: str) -> float:
        """How much a count has grown within the measured time, over all processes."""
        return float(sum(report["spans"][1][name] - report["spans"][0][name] for report in self.reports))

    @property
    def seconds(self) -> float:
        begin: float = min(report["spans"][0]["at"] for report in self.reports)
        end: float = max(report["spans"][1]["at"] for report in self.reports)
        return max(end - begin, 1e-6)


class Crew:
    """The generator processes of one measurement. Leaving it ends them, however that comes about."""

    def __init__(self, target: Target, work: Work, processes: int) -> None:
        self._target = target
        self._shares = share_out(work, processes)
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for share in self._shares:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sluice.bench.generator"],
                    env=same_build(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                self._running.append(process)
                self._say(process, share.to_line(self._target.address))
            for process in self._running:
                answer = self._hear(process)
                if not answer["ready"]:
                    fault = answer["faults"][0]
                    kind = NotReachable if fault.startswith("no connection") else BenchError
                    address = self._target.address
                    raise kind(
                        f"{address.host}:{address.port}: {fault}",
                        "Is it an MQTT 5.0 broker that lets you in?",
                    )
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        for process in self._running:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    pass  # it has ended already
        for process in self._running:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
            end(process)
        self._running = []

    def tell(self, order: Mapping[str, Any]) -> None:
        for process in self._running:
            self._say(process, json.dumps(order))

    def ask(self, what: str) -> list[dict[str, Any]]:
        self.tell({"do": what})
        return [self._hear(process) for process in self._running]

    def _say(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise BenchError("a generator process has ended by itself") from None

    def _hear(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(PATIENCE_SECONDS) else b""
        if not line:
            raise BenchError("a generator process does not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(
    target: Target,
    work: Work,
    timing: Timing,
    processes: int,
    deliveries: float,
    tell: Tell,
    already: int = 0,
) -> Outcome:
    """Run `work` and wait until everything has come. `deliveries` of each message are awaited (0: its confirmation),
    besides those of `already` messages that were there before."""
    with Crew(target, work, processes) as crew:
        at = time.monotonic() + LEAD_SECONDS
        timed = timing.messages is None
        warm = at + (timing.warm_seconds if timed else 0.0)
        stop = warm + timing.seconds if timed else None
        # A few messages are through before anybody is awake to look: so their beginning is what is seen before it.
        first, own = replace(target.sample(), at=at), cpu_seconds()
        crew.tell({"do": "begin", "at": at, "warm": warm, "end": stop})
        _sleep_until(warm)
        if timed:
            first, own = target.sample(), cpu_seconds()
        last: Sample | None = None
        if stop is not None:
            while (left := stop - time.monotonic()) > 0:
                time.sleep(min(left, 0.25))
                if left > 0.5:  # towards the end nobody is disturbed
                    tell(sum(each["delivered"] or each["confirmed"] for each in crew.ask("progress")))
            last = target.sample()
            own = cpu_seconds() - own
        _await_all(crew, timing, deliveries, already, tell)
        if last is None:
            last = target.sample()
            own = cpu_seconds() - own
        return Outcome(work, crew.ask("report"), first, last, own)


def _await_all(crew: Crew, timing: Timing, deliveries: float, already: int, tell: Tell) -> None:
    progress, since = (-1, -1), time.monotonic()
    while True:
        answers = crew.ask("progress")
        faults = [fault for answer in answers for fault in answer["faults"]]
        if faults:
            raise BenchError(faults[0])
        sent, confirmed, delivered = (
            sum(answer[name] for answer in answers) for name in ("sent", "confirmed", "delivered")
        )
        if (confirmed, delivered) != progress:
            progress, since = (confirmed, delivered), time.monotonic()
            tell(delivered or confirmed)
        done = confirmed >= sent and delivered >= (sent + already) * deliveries
        if done and not any(answer["sending"] for answer in answers):
            return
        if time.monotonic() - since > timing.stall_seconds:
            return  # what is missing is counted as lost
        time.sleep(POLL_SECONDS)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def result_of(
    scenario: str,
    what: str,
    outcome: Outcome,
    heard: Mapping[int, Sequence[int]],
    published: Mapping[int, int] | None = None,
    last: int = 0,
) -> Result:
    """Figures and faults of a measurement. What counts are deliveries; where nobody reads, confirmations."""
    counted = "delivered" if outcome.work.readers else "confirmed"
    faults = find_faults(outcome.reports, outcome.published if published is None else published, heard, last)
    unconfirmed = sum(report["sent"] - report["confirmed"] for report in outcome.reports)
    result = Result(
        scenario,
        what,
        messages=int(outcome.between(counted)),
        seconds=outcome.seconds,
        latency_ms=in_milliseconds(merged(outcome.reports, "latency")),
        lost=faults.lost + (0 if heard else unconfirmed),
        doubled=faults.doubled,
        disordered=faults.disordered,
        refused=sum(report["refused"] for report in outcome.reports),
        memory_bytes=outcome.last.memory,
    )
    result.per_second = result.messages / result.seconds
    generators = [report["spans"][1]["cpu"] - report["spans"][0]["cpu"] for report in outcome.reports]
    judge(result, Spent.between(outcome.first, outcome.last), generators, outcome.own_cpu)
    return result

"""The result of a scenario: figures from the reports of all generator processes, and warnings.

An unknown figure is None and never 0: the CPU of a broker on another machine, a latency without
messages.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sluice.bench.procfs import CpuUsage
from sluice.bench.tally import STEPS_PER_DOUBLING

BUSY_CORES: Final = 0.9  # of a core: such a process is saturated
DISTURBING_CORES: Final = 0.15  # of a core, used by other processes: they disturb the measurement
MIN_JUDGED_SECONDS: Final = 0.5  # the kernel counts the machine's time in hundredths


@dataclass
class Result:
    scenario: str
    what: str  # description: who publishes to whom
    messages: int = 0  # within the measured time
    seconds: float = 0.0
    per_second: float = 0.0
    per_cpu_second: float | None = None
    latency_ms: dict[str, float | None] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    refused: int = 0
    broker_cores: float | None = None
    generator_cores: float = 0.0  # of the busiest process
    other_cores: float = 0.0  # used by processes other than broker and generators
    stolen_cores: float = 0.0
    memory_bytes: int | None = None
    facts: dict[str, float] = field(default_factory=dict)  # of this scenario alone
    warnings: list[str] = field(default_factory=list)

    @property
    def is_correct(self) -> bool:
        return not (self.lost or self.doubled or self.disordered or self.refused)


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the nanoseconds below which this share lies: the upper edge of its step, never too
    low.
    """
    total = sum(counts.values())
    if not total:
        return None
    wanted = share * total
    passed = 0
    for bucket in sorted(counts):
        passed += counts[bucket]
        if passed >= wanted:
            return float(upper_edge(bucket))
    return None


def upper_edge(bucket: int) -> int:
    if bucket < 2 * STEPS_PER_DOUBLING:
        return bucket
    shift = bucket // STEPS_PER_DOUBLING - 1
    return ((bucket - shift * STEPS_PER_DOUBLING + 1) << shift) - 1


def merge_histograms(reports: Sequence[Mapping[str, Any]], name: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    for report in reports:
        for bucket, count in report[name].items():
            counts[int(bucket)] += count
    return counts


def percentiles_ms(counts: Mapping[int, int]) -> dict[str, float | None]:
    found = {
        name: percentile(counts, share)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
    }
    return {name: None if value is None else round(value / 1e6, 4) for name, value in found.items()}


@dataclass
class Faults:
    lost: int = 0
    doubled: int = 0
    disordered: int = 0


def find_faults(
    reports: Sequence[Mapping[str, Any]],
    published: Mapping[int, int],
    expected: Mapping[int, Sequence[int]],
    last: int = 0,
) -> Faults:
    """Compare published with received messages. `expected`: the publishers of each lane.

    With `last`, only the newest `last` messages of each publisher must arrive (one for each slot):
    an older one is a value that should have been replaced, and counts as out of order.
    """
    faults = Faults()
    seen: dict[tuple[int, int], int] = {}
    for report in reports:
        for lane, streams in report["lanes"].items():
            for publisher, stream in enumerate(streams):
                faults.doubled += stream["doubled"]
                faults.disordered += stream["disordered"]
                bits = int.from_bytes(base64.b64decode(stream["seen"]), "little")
                seen_before = seen.get((int(lane), publisher), 0)
                faults.doubled += (seen_before & bits).bit_count()  # delivered to two processes
                seen[int(lane), publisher] = seen_before | bits
    for lane_number, publishers in expected.items():
        for publisher in publishers:
            count = published.get(publisher, 0)
            wanted = (1 << count) - 1
            if last and count > last:
                wanted ^= (1 << (count - last)) - 1
            bits = seen.get((lane_number, publisher), 0)
            faults.lost += (wanted & ~bits).bit_count()
            faults.disordered += (bits & ~wanted).bit_count()
    return faults


def assess_cpu(
    result: Result, spent: CpuUsage, generators: Sequence[float], own_cpu: float
) -> None:
    """Compute who used how much CPU, and what that means for the figures."""
    seconds = spent.seconds
    result.generator_cores = max(generators, default=0.0) / seconds
    ours = sum(generators) + own_cpu + (spent.broker or 0.0)
    result.stolen_cores = max(0.0, spent.stolen) / seconds
    if spent.broker is not None:
        result.broker_cores = spent.broker / seconds
        result.other_cores = max(0.0, spent.all_processes - ours) / seconds
        if spent.broker > 0:
            result.per_cpu_second = result.messages / spent.broker
    broker_has_capacity = result.broker_cores is None or result.broker_cores < BUSY_CORES
    if result.generator_cores > BUSY_CORES and broker_has_capacity:
        result.warnings.append(
            "the generator was the bottleneck; the broker could do more:"
            " see msgs per broker CPU-second"
        )


def disturbances(results: Sequence[Result]) -> list[str]:
    """Return warnings about other processes during the measurement. Short measurements are left
    out.
    """
    long = [result for result in results if result.seconds >= MIN_JUDGED_SECONDS]
    found: list[str] = []
    others = [result.other_cores for result in long if result.other_cores > DISTURBING_CORES]
    if others:
        found.append(
            f"others used up to {max(others):.1f} cores meanwhile: repeat it on a quiet machine, "
            "and trust msgs per broker CPU-second more than msgs/s"
        )
    stolen = [result.stolen_cores for result in long if result.stolen_cores > DISTURBING_CORES]
    if stolen:
        found.append(f"the host of this machine took up to {max(stolen):.1f} cores away")
    return found

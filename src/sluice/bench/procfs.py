"""CPU time and memory of processes and of the machine, from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK")
_CLOCK_SCHED: Final = 2  # of the three clocks of a process, the one in nanoseconds
# Fields of /proc/PID/stat after the name: user and system time of a process, and of its reaped
# children.
_ALL_TIMES: Final = slice(11, 15)
_CHILD_TIMES: Final = slice(13, 15)


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                found += process_tree(int(child))
        except OSError:
            pass  # ended meanwhile
    return found


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants, including ended ones.

    The result never decreases when a descendant ends: from then on the kernel has its time in ticks
    only, so all descendants are counted in ticks. The process itself is counted in nanoseconds.
    """
    process, *below = process_tree(pid)
    return (
        _own_cpu_of(process)
        + _ticks_of(process, _CHILD_TIMES)
        + sum(_ticks_of(one, _ALL_TIMES) for one in below)
    )


def _own_cpu_of(pid: int) -> float:
    """Read the CPU clock of the process (clock_getcpuclockid(3)); Python supports those of threads
    only.
    """
    try:
        return time.clock_gettime(~pid << 3 | _CLOCK_SCHED)
    except OSError:
        return 0.0  # ended meanwhile


def _ticks_of(pid: int, fields: slice) -> float:
    """Return seconds that the kernel counts in ticks."""
    try:
        all_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(word) for word in all_fields[fields]) * TICK_SECONDS


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process and all its descendants."""
    pages = 0
    for each in process_tree(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MachineCpu:
    """CPU seconds of the machine since its start: used by processes, and stolen by the host."""

    used: float
    stolen: float

    @classmethod
    def now(cls) -> MachineCpu:
        words = Path("/proc/stat").read_text().partition("\n")[0].split()
        user, nice, system, _idle, _waiting, irq, softirq, stolen = (
            int(word) * TICK_SECONDS for word in words[1:9]
        )
        return cls(user + nice + system + irq + softirq, stolen)


@dataclass(frozen=True)
class CpuSample:
    """The CPU time of the broker and of the machine at one time. `broker` is None if unknown."""

    at: float
    broker: float | None
    memory: int | None
    machine: MachineCpu


@dataclass(frozen=True)
class CpuUsage:
    """The difference between two samples."""

    seconds: float
    broker: float | None
    all_processes: float
    stolen: float

    @classmethod
    def between(cls, first: CpuSample, last: CpuSample) -> CpuUsage:
        known = first.broker is not None and last.broker is not None
        return cls(
            max(last.at - first.at, 1e-9),
            (last.broker or 0.0) - (first.broker or 0.0) if known else None,
            last.machine.used - first.machine.used,
            last.machine.stolen - first.machine.stolen,
        )

"""The machine and the disk of a measurement: without them, its figures mean nothing."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sluice import __version__
from sluice.bench.procfs import MachineCpu

MAX_SYNCS: Final = 200
SYNC_SECONDS: Final = 5.0  # limit for a slow disk
BLOCK_BYTES: Final = 4096
SAMPLE_SECONDS: Final = 0.3
MEMORY_FILESYSTEMS: Final = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Disk:
    filesystem: str
    sync_median_ms: float
    sync_p99_ms: float
    syncs: int

    @property
    def is_memory(self) -> bool:
        return self.filesystem in MEMORY_FILESYSTEMS


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    sluice: str
    build: str
    warnings: list[str] = field(default_factory=list)


def inspect_machine(build: str) -> Machine:
    """Describe the machine. `build`: compiled or interpreted, as the caller knows."""
    cores = len(os.sched_getaffinity(0))
    warnings: list[str] = []
    before, began = MachineCpu.now(), time.monotonic()
    time.sleep(SAMPLE_SECONDS)
    after, seconds = MachineCpu.now(), time.monotonic() - began
    used = (after.used - before.used) / seconds
    if used > 0.2:
        warnings.append(
            f"the CPU is shared: others use {used:.1f} of {cores} cores just now. "
            "Trust msgs per broker CPU-second more than msgs/s"
        )
    if cores == 1:
        warnings.append("one core: broker and generator compete for it")
    if build != "compiled":
        warnings.append(
            "this build of Sluice is interpreted, and several times slower than a compiled one"
        )
    return Machine(
        cpu_model(Path("/proc/cpuinfo").read_text()),
        cores,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        f"{platform.system()} {platform.release()}",
        f"{platform.python_implementation()} {platform.python_version()}",
        __version__,
        build,
        warnings,
    )


def cpu_model(cpuinfo: str) -> str:
    """Return the model name of /proc/cpuinfo; some machines have none there."""
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names and names[0] else platform.machine()


def inspect_disk(folder: Path) -> Disk:
    durations = measure_sync(folder)
    return Disk(
        filesystem_of(folder),
        round(durations[len(durations) // 2] * 1000, 3),
        round(durations[min(len(durations) - 1, len(durations) * 99 // 100)] * 1000, 3),
        len(durations),
    )


def measure_sync(folder: Path) -> list[float]:
    """Return sorted durations of an fdatasync after 4 KiB: the wait of every durable message."""
    file = folder / "sync"
    durations: list[float] = []
    handle = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        end = time.monotonic() + SYNC_SECONDS
        while len(durations) < MAX_SYNCS and (not durations or time.monotonic() < end):
            os.write(handle, bytes(BLOCK_BYTES))
            began = time.perf_counter()
            os.fdatasync(handle)
            durations.append(time.perf_counter() - began)
    finally:
        os.close(handle)
        file.unlink()
    return sorted(durations)


def filesystem_of(folder: Path, mounts: str | None = None) -> str:
    """Return the file system type of a directory: that of the nearest mount point above it."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    real_path = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in text.splitlines():
        _, point, found, *_ = line.split()
        point = point.encode().decode("unicode_escape")  # a blank is written \040
        inside = real_path == point or real_path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind

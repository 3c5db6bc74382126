"""A limit on the memory of the whole process: above it, new messages are refused.

Retained messages, queued messages and uploads each have a limit, but together they can still exceed
the memory of the machine. So the memory of the process is measured once a second. Above the limit
everything that would have to be stored is refused with a reason, while deliveries, settlements and
administration continue and free memory. Messages are accepted again below a lower threshold, so
that the state does not flap.

The measured size is the resident memory without file pages, which the kernel reclaims by itself.
Before and while messages are refused, the C library is asked to return free memory: otherwise
memory would stay in use after queues are drained.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
TRIM_EVERY_CHECKS: Final = 5  # while the limit is exceeded: a trim walks the whole heap
RESUME_SHARE: Final = 0.95
MIN_LIMIT_BYTES: Final = 16 << 20
OFF_VALUES: Final = ("0", "none", "off")

_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")
_SIZE: Final = re.compile(r"(\d+)\s*(|B|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_NO_LIMIT: Final = 1 << 60  # cgroups v1 express "no limit" as a very large number


def parse_memory_limit(value: str, read_total: Callable[[], int]) -> int:
    """Return the bytes of a setting: "80%" of `read_total()`, "2GiB", or 0 for no limit.

    Raise ValueError for an invalid setting.
    """
    text = value.strip().lower()
    if text in OFF_VALUES:
        return 0
    share = _PERCENT.fullmatch(text)
    if share is not None and 1 <= float(share[1]) <= 100:
        return int(read_total() * float(share[1]) / 100)
    size = _SIZE.fullmatch(text)
    if size is not None:
        limit = int(size[1]) * _UNITS[size[2]]
        if limit >= MIN_LIMIT_BYTES:
            return limit
    raise ValueError(
        'must be a share such as "80%", a size such as "2GiB" (16MiB or more), or "off"'
    )


def read_available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Return the memory that this process may use: of its container, else of the machine."""
    limits = [_NO_LIMIT]
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                limits.append(int(line.split()[1]) << 10)
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group_path = line.split(":", 2)
            if not controllers:
                limits.extend(_read_cgroup_limits(cgroups, group_path, "memory.max"))
            elif "memory" in controllers.split(","):
                limits.extend(
                    _read_cgroup_limits(cgroups / "memory", group_path, "memory.limit_in_bytes")
                )
    least = min(limits)
    return least if least < _NO_LIMIT else 0


def _read_cgroup_limits(root: Path, group_path: str, name: str) -> list[int]:
    """Return the limits of a cgroup and its parents. In a container its own group is the root."""
    limits = []
    directory = root / group_path.strip("/")
    while True:
        with suppress(OSError, ValueError):
            limits.append(int((directory / name).read_text()))  # "max" is not a number: no limit
        if directory == root or root not in directory.parents:
            return limits
        directory = directory.parent


def read_resident_bytes() -> int:
    """Return the memory of this process without file pages, or 0 if it is unknown."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            fields = file.read(128).split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0


def trim_allocator() -> None:
    """Ask the C library to return free memory to the system."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class MemoryWatermark:
    """Detects that the process uses too much memory.

    A timer of the broker calls `check` periodically. Each listener is called with the reason when
    the limit is exceeded, and with an empty string when messages are accepted again. `used`,
    `limit`, `reason` and `refused` may be read from any thread.
    """

    def __init__(
        self,
        limit: int,
        read: Callable[[], int] = read_resident_bytes,
        trim: Callable[[], None] = trim_allocator,
    ) -> None:
        self.limit = limit  # bytes; 0: none
        self.used = 0
        self.reason = ""
        self.uploads_refused = 0
        self._read = read
        self._trim = trim
        self._checks = 0
        self._listeners: dict[Callable[[str], None], Callable[[], int]] = {}
        self._refused_by_removed = 0

    @property
    def refused(self) -> int:
        """Return the number of messages and uploads that were refused for lack of memory."""
        counts = list(self._listeners.values())
        return self._refused_by_removed + self.uploads_refused + sum(count() for count in counts)

    def register(self, listener: Callable[[str], None], count_refused: Callable[[], int]) -> None:
        """Add a listener; it is called at once if the limit is exceeded now."""
        self._listeners[listener] = count_refused
        if self.reason:
            listener(self.reason)

    def remove(self, listener: Callable[[str], None]) -> None:
        count = self._listeners.pop(listener, None)
        if count is not None:
            self._refused_by_removed += count()

    def check(self) -> None:
        """Measure, and notify the listeners of a change."""
        used = self._read()
        if self.limit and used >= (self.limit * RESUME_SHARE if self.reason else self.limit):
            if self._checks % TRIM_EVERY_CHECKS == 0:
                self._trim()
                used = self._read()
            self._checks += 1
        self.used = used
        if not self.limit:
            return
        if not self.reason and used >= self.limit:
            reason = (
                f"the broker uses {_format_size(used)} of memory, and limits.memory is "
                f"{_format_size(self.limit)}"
            )
            log.error("memory limit exceeded: publishers are refused", extra=self._log_fields())
            self._notify(reason)
        elif self.reason and used < self.limit * RESUME_SHARE:
            log.warning("memory is below the limit again", extra=self._log_fields())
            self._notify("")
            self._checks = 0

    def _notify(self, reason: str) -> None:
        self.reason = reason
        for listener in list(self._listeners):
            listener(reason)

    def _log_fields(self) -> dict[str, object]:
        return {"used": _format_size(self.used), "limit": _format_size(self.limit)}


def _format_size(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"

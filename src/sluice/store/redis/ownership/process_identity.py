"""Identifies the process that owns a store, so that a later start can prove that it has ended.

The identity contains everything that a pid depends on: the host, the boot of its kernel, the pid
namespace, and the time when the process started. A process has ended only if all of them are equal
here and the kernel does not know that pid, knows it for a later process, or knows it as a zombie.
Anything that cannot be read or compared proves nothing: then only the lease decides.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_SEPARATOR: Final = "/"  # not allowed in a host name
_PROC: Final = Path("/proc")
_ENDED_STATES: Final = frozenset("ZXx")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, as the lease names it: `host:pid:nonce/machine/boot/namespace/start`."""

    host: str
    pid: int
    nonce: str  # tells several stores of one process apart
    machine: str = ""
    boot: str = ""
    namespace: str = ""  # the pid namespace
    start: str = ""  # ticks between the boot and the start of the process

    @classmethod
    def of_this_process(cls) -> Self:
        pid = os.getpid()
        return cls(
            socket.gethostname(),
            pid,
            os.urandom(4).hex(),
            _read_line(Path("/etc/machine-id")),
            _read_line(_PROC / "sys/kernel/random/boot_id"),
            _read_namespace(),
            _read_start(pid),
        )

    @classmethod
    def parse(cls, owner: str) -> Self | None:
        """Return the identity that a lease names, or None if it is not one."""
        name, *proof = owner.split(_SEPARATOR)
        host, _, rest = name.rpartition(":")[0].rpartition(":")
        if not host or not rest.isdecimal() or len(proof) not in (0, 4):
            return None
        return cls(host, int(rest), name.rpartition(":")[2], *proof)

    @property
    def name(self) -> str:
        """Return the part for people."""
        return f"{self.host}:{self.pid}:{self.nonce}"

    def __str__(self) -> str:
        proof = (self.machine, self.boot, self.namespace, self.start)
        return _SEPARATOR.join((self.name, *proof))

    def has_provably_ended(self, here: ProcessIdentity) -> bool:
        """Return whether this process has ended for certain, as seen by the process `here`."""
        if not (self.boot and self.namespace and self.start):
            return False
        if (self.host, self.machine, self.boot, self.namespace) != (
            here.host,
            here.machine,
            here.boot,
            here.namespace,
        ):
            return False
        try:
            os.kill(self.pid, 0)  # signal 0 only asks; it also sees processes that /proc hides
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # it exists and belongs to another user
        start = _read_start(self.pid)
        return bool(start) and (start != self.start or _is_zombie(self.pid))


def owner_name(owner: str) -> str:
    """Return the owner of a lease as people see it."""
    return owner.partition(_SEPARATOR)[0]


def _read_line(path: Path) -> str:
    try:
        return path.read_text().strip().replace(_SEPARATOR, "_")
    except (OSError, ValueError):
        return ""


def _read_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid").replace(_SEPARATOR, "_")
    except OSError:
        return ""


def _read_stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; the name before may contain anything."""
    return _read_raw(_PROC / str(pid) / "stat").rpartition(")")[2].split()


def _read_raw(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_start(pid: int) -> str:
    fields = _read_stat(pid)
    return fields[19] if len(fields) > 19 else ""  # field 22, starttime


def _is_zombie(pid: int) -> bool:
    """Return whether only the exit code of a process is left, not even one of its threads."""
    fields = _read_stat(pid)
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return False
    return bool(fields) and fields[0] in _ENDED_STATES and len(threads) <= 1

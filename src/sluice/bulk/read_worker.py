"""The process that reads: ranges of the log become Arrow here, with an interpreter lock of its own.

It is started by the HTTP door (`bulk/reading.py`) when somebody reads, and ends when the door closes its line or dies.
It is told where messages are and opens the segments read-only by itself; it decides nothing, keeps nothing, and
whatever becomes of it, the broker loses nothing by it. Each reader is a thread and two sockets:

    the line    the door says:  a request, then places, `go`, `again`, `last` (bulk/words.py)
                it answers:     ready, done <part>, missing <seq>, ended, fault <text>: one line of JSON each
    the way     the bytes of the Arrow stream: to the door, or straight into the client's own connection (`chunked`)

A reader that is slow fills its way, and its thread waits: nothing is read ahead for it but one batch. One that reads
several partitions of a queue gets them as they lie in the log (`bulk/merging.py`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from typing import Any, Final, NamedTuple

from sluice.bulk import worker_protocol
from sluice.bulk.arrow import ALL, BATCH_BYTES, BATCH_ROWS, END, Batches, Part, address_of
from sluice.bulk.writev import Gathered
from sluice.bulk.merge import MERGED_BYTES, Merge, without
from sluice.bulk.worker_protocol import HEAD, MERGED, PART
from sluice.queues.bodies.codec import ZstdCodec
from sluice.store.embedded.layout import log_name

OPEN_FILES: Final = 8
NICE: Final = 15  # messages go first: of a core that the broker could fill, three hundredths
STALL_SECONDS: Final = 900
MOST_PARTS: Final = 64  # of one call; the system takes 1,024
PIECE_BYTES: Final = 1 << 16  # written at once: who copies more in the kernel keeps others off the core


class Gone(Exception):
    """Whoever reads has gone."""


class Line:
    """Commands in, answers out."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._input = line.makefile("rb")
        self.fd = line.fileno()

    def next(self) -> tuple[bytes, bytes]:
        head = self._input.read(HEAD.size)
        if len(head) < HEAD.size:
            raise Gone
        kind, size = HEAD.unpack(head)
        body = self._input.read(size)
        if len(body) < size:
            raise Gone
        return kind, body

    def tell(self, **facts: Any) -> None:
        try:
            self._line.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:
            raise Gone from None


class Way:
    """Bytes out, as fast as the other side takes them. `chunked`: in the chunks of HTTP/1.1. Who takes none for long
    has gone, and so has one whose door has closed the line, whatever becomes of the connection."""

    def __init__(self, fd: int, line_fd: int, chunked: bool) -> None:
        self._fd = fd
        self._line_fd = line_fd
        self._chunked = chunked
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._poll.register(line_fd, 0)  # a hang-up is told without being asked for

    def write(self, *data: Part) -> None:
        whole = deque(data)
        if self._chunked:
            whole.appendleft(memoryview(b"%x\r\n" % sum(len(part) for part in data)))
            whole.append(memoryview(b"\r\n"))
        while whole:
            try:
                self._send_some(whole)
            except BlockingIOError:
                ready = self._poll.poll(STALL_SECONDS * 1000)
                if not ready or any(fd == self._line_fd for fd, _ in ready):
                    raise Gone from None
            except OSError:
                raise Gone from None

    def _send_some(self, parts: deque[Part]) -> None:
        """About PIECE_BYTES of them, or as many as are taken; what was sent is left out from then on."""
        first = parts[0]
        if isinstance(first, Gathered):
            if first.send(self._fd, PIECE_BYTES):
                parts.popleft()
            return
        sent = os.writev(self._fd, _about(parts, PIECE_BYTES))
        while sent >= len(first):
            sent -= len(first)
            parts.popleft()
            if not parts or isinstance(parts[0], Gathered):
                return
            first = parts[0]
        parts[0] = first[sent:]


def _about(parts: deque[Part], size: int) -> list[memoryview]:
    """The first of them, together at most as long as that: up to one that is to be gathered."""
    found: list[memoryview] = []
    for part in parts:
        if isinstance(part, Gathered) or size <= 0 or len(found) == MOST_PARTS:
            break
        found.append(part[:size])
        size -= len(part)
    return found


class Log(NamedTuple):
    """A log that is mapped, and where in memory; `kept` holds it there."""

    mapped: mmap
    address: int
    kept: object


class Segments:
    """Logs, mapped when they are needed, for all readers: the pages of a log that ten of them read are fetched once.
    One that was given back stays readable for whoever has it mapped, and its room on disk is free when nobody has. The
    broker maps nothing, because a page that must be fetched would hold its interpreter; here only this reader waits."""

    def __init__(self) -> None:
        self._mapped: dict[str, Log] = {}
        self._lock = threading.Lock()
        self._readers = 0

    def __enter__(self) -> Segments:
        with self._lock:
            self._readers += 1
        return self

    def __exit__(self, *fault: object) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self._mapped.clear()

    def map(self, path: str, end: int) -> Log | None:
        """The map of a log that reaches to `end`; None where there is no such log, or it does not."""
        with self._lock:
            log = self._mapped.pop(path, None)
            if log is None or len(log.mapped) < end:
                log = _mapped(path, end)
            if log is not None:
                self._mapped[path] = log
                if len(self._mapped) > OPEN_FILES:
                    del self._mapped[next(iter(self._mapped))]  # unmapped when no batch needs it any more
            return log


def _mapped(path: str, end: int) -> Log | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_size < end:
            return None
        mapped = mmap(fd, 0, access=ACCESS_READ)
    finally:
        os.close(fd)
    return Log(mapped, *address_of(mapped))


SEGMENTS: Final = Segments()


class Reading:
    """One reader's ranges, from its request to its end."""

    def __init__(self, line: Line, way_fd: int) -> None:
        self._line = line
        self._way_fd = way_fd
        self._ahead: deque[tuple[bytes, bytes]] = deque()
        self._is_begun = False
        self._logs: list[Log] = []  # that values of the batch are in

    def run(self) -> None:
        kind, body = self._line.next()
        assert kind == worker_protocol.REQUEST
        asked = json.loads(body)
        parts: list[tuple[int, int]] = asked["parts"]
        self._way = Way(self._way_fd, self._line.fd, asked["chunked"])
        self._batches = Batches(asked["columns"], asked["queue"], parts, ZstdCodec())
        self._directory = asked["directory"]
        self._merge = Merge(len(parts))
        self._skips: set[int] = set()  # until `again`: what follows a message that was missing is told anew
        while not self._merge.is_over():
            merged = self._merge.next(BATCH_ROWS)
            for part in self._merge.take_finished():
                self._line.tell(done=part)
            if merged:
                self._read(merged)
            else:
                self._hear(*(self._ahead.popleft() if self._ahead else self._line.next()))
        self._send()
        self._begin()
        self._way.write(memoryview(END))
        self._line.tell(is_ended=True)

    def _hear(self, kind: bytes, body: bytes) -> None:
        (part,) = PART.unpack_from(body)
        if kind == worker_protocol.AGAIN:
            self._skips.discard(part)
        elif part in self._skips:
            pass
        elif kind == worker_protocol.PLACES:
            self._merge.add(part, body[PART.size :])
        elif kind == worker_protocol.LAST:
            self._merge.end(part)

    def _begin(self) -> None:
        """There is something to send: the answer may begin, and does when the door says so."""
        if self._is_begun:
            return
        self._is_begun = True
        self._line.tell(is_ready=True)
        while True:
            kind, body = self._line.next()
            if kind == worker_protocol.GO:
                break
            self._ahead.append((kind, body))
        self._way.write(memoryview(self._batches.head()))

    def _read(self, merged: bytes) -> None:
        """Take the rows at these places, and send what is a full batch by then. One that is not where it should be is
        told, and those behind it of the same part are left out."""
        columns = self._batches.columns
        nth = 0
        while nth * MERGED_BYTES < len(merged):
            seq, address, size, part = MERGED.unpack_from(merged, nth * MERGED_BYTES)
            path = f"{self._directory}/{log_name(address >> 32)}"
            log = SEGMENTS.map(path, (address & 0xFFFF_FFFF) + size)
            columns.missing = log is None
            before = nth
            if log is not None:
                self._logs.append(log)
                nth = columns.add_mapped(log.mapped, log.address, merged, nth, BATCH_ROWS, BATCH_BYTES)
            if columns.missing and nth == before:
                self._send()  # nobody knows how long it takes to find the other one
                self._skips.add(part)
                self._merge.drop(part)
                self._line.tell(missing=seq, part=part)
                merged, nth = without(merged[nth * MERGED_BYTES :], part), 0
            # Else the batch is full, the segment is another one, or the map ends before what was written since.
            elif columns.rows >= BATCH_ROWS or columns.bytes >= BATCH_BYTES:
                self._send()

    def _send(self) -> None:
        if self._batches.columns.rows:
            batch = self._batches.take()
            self._begin()
            self._way.write(*batch)
        self._logs.clear()


def serve(fds: list[int]) -> None:
    line = socket.socket(fileno=fds[0])
    try:
        teller = Line(line)
        try:
            with SEGMENTS:
                Reading(teller, fds[1]).run()
        except Gone:
            pass
        except Exception as fault:
            with suppress(Gone):
                teller.tell(fault=f"{type(fault).__name__}: {fault}")
    finally:
        line.close()
        os.close(fds[1])


class NoPandas:
    """Finds no pandas. Pyarrow imports it, where it is installed, only to see that a list is none of its own: half of
    the time that a start takes, and of the memory."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def get_ready() -> None:
    """Import what the first reader would wait for, before this process gives way to others: on a machine with much to
    do it would wait for a minute."""
    sys.meta_path.insert(0, NoPandas())
    Batches(list(ALL), "", [(0, 0), (1, 1)], ZstdCodec())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the broker, which closes the line
    get_ready()
    os.nice(NICE)
    home = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(home, 1, 2)
        if not data:
            os._exit(0)  # the door is closed: whoever still waits to write waits in vain
        threading.Thread(target=serve, args=(fds,), daemon=True).start()


if __name__ == "__main__":
    main()

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
from sluice.bulk.arrow import (
    ALL_COLUMNS,
    BATCH_BYTES,
    BATCH_ROWS,
    STREAM_END,
    ArrowBatchBuilder,
    StreamPart,
    map_address,
)
from sluice.bulk.merge import MERGED_PLACE_BYTES, PlaceMerge, exclude_part
from sluice.bulk.worker_protocol import COMMAND_HEADER, MERGED_PLACE, PART_HEADER
from sluice.bulk.writev import IovecBuffer
from sluice.queues.bodies.codec import ZstdCodec
from sluice.store.embedded.layout import log_name

MAX_MAPPED_SEGMENTS: Final = 8
NICE: Final = 15  # messages go first: of a core that the broker could fill, three hundredths
STALL_SECONDS: Final = 900
MAX_IOVECS_PER_WRITE: Final = 64  # of one call; the system takes 1,024
WRITE_BYTES: Final = (
    1 << 16
)  # written at once: who copies more in the kernel keeps others off the core


class ReaderGone(Exception):
    """Whoever reads has gone."""


class ControlConnection:
    """Commands in, answers out."""

    def __init__(self, control_socket: socket.socket) -> None:
        self._socket = control_socket
        self._input = control_socket.makefile("rb")
        self.fd = control_socket.fileno()

    def read_command(self) -> tuple[bytes, bytes]:
        head = self._input.read(COMMAND_HEADER.size)
        if len(head) < COMMAND_HEADER.size:
            raise ReaderGone
        kind, size = COMMAND_HEADER.unpack(head)
        body = self._input.read(size)
        if len(body) < size:
            raise ReaderGone
        return kind, body

    def send_answer(self, **fields: Any) -> None:
        try:
            self._socket.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            raise ReaderGone from None


class StreamOutput:
    """Bytes out, as fast as the other side takes them. `chunked`: in the chunks of HTTP/1.1. Who takes none for long
    has gone, and so has one whose door has closed the line, whatever becomes of the connection."""

    def __init__(self, fd: int, control_fd: int, chunked: bool) -> None:
        self._fd = fd
        self._control_fd = control_fd
        self._chunked = chunked
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._poll.register(control_fd, 0)  # a hang-up is told without being asked for

    def write(self, *data: StreamPart) -> None:
        whole = deque(data)
        if self._chunked:
            whole.appendleft(memoryview(b"%x\r\n" % sum(len(part) for part in data)))
            whole.append(memoryview(b"\r\n"))
        while whole:
            try:
                self._send_some(whole)
            except BlockingIOError:
                ready = self._poll.poll(STALL_SECONDS * 1000)
                if not ready or any(fd == self._control_fd for fd, _ in ready):
                    raise ReaderGone from None
            except OSError:
                raise ReaderGone from None

    def _send_some(self, parts: deque[StreamPart]) -> None:
        """About PIECE_BYTES of them, or as many as are taken; what was sent is left out from then on."""
        first = parts[0]
        if isinstance(first, IovecBuffer):
            if first.send(self._fd, WRITE_BYTES):
                parts.popleft()
            return
        sent = os.writev(self._fd, _first_parts(parts, WRITE_BYTES))
        while sent >= len(first):
            sent -= len(first)
            parts.popleft()
            if not parts or isinstance(parts[0], IovecBuffer):
                return
            first = parts[0]
        parts[0] = first[sent:]


def _first_parts(parts: deque[StreamPart], size: int) -> list[memoryview]:
    """The first of them, together at most as long as that: up to one that is to be gathered."""
    found: list[memoryview] = []
    for part in parts:
        if isinstance(part, IovecBuffer) or size <= 0 or len(found) == MAX_IOVECS_PER_WRITE:
            break
        found.append(part[:size])
        size -= len(part)
    return found


class MappedSegment(NamedTuple):
    """A log that is mapped, and where in memory; `kept` holds it there."""

    mapped: mmap
    address: int
    buffer: object


class SegmentMaps:
    """Logs, mapped when they are needed, for all readers: the pages of a log that ten of them read are fetched once.
    One that was given back stays readable for whoever has it mapped, and its room on disk is free when nobody has. The
    broker maps nothing, because a page that must be fetched would hold its interpreter; here only this reader waits."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedSegment] = {}
        self._lock = threading.Lock()
        self._readers = 0

    def __enter__(self) -> SegmentMaps:
        with self._lock:
            self._readers += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self._mapped.clear()

    def get_map(self, path: str, end: int) -> MappedSegment | None:
        """The map of a log that reaches to `end`; None where there is no such log, or it does not."""
        with self._lock:
            segment = self._mapped.pop(path, None)
            if segment is None or len(segment.mapped) < end:
                segment = _map_segment(path, end)
            if segment is not None:
                self._mapped[path] = segment
                if len(self._mapped) > MAX_MAPPED_SEGMENTS:
                    del self._mapped[
                        next(iter(self._mapped))
                    ]  # unmapped when no batch needs it any more
            return segment


def _map_segment(path: str, end: int) -> MappedSegment | None:
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
    return MappedSegment(mapped, *map_address(mapped))


SEGMENTS: Final = SegmentMaps()


class RangeReader:
    """One reader's ranges, from its request to its end."""

    def __init__(self, control: ControlConnection, output_fd: int) -> None:
        self._control = control
        self._output_fd = output_fd
        self._early_commands: deque[tuple[bytes, bytes]] = deque()
        self._is_started = False
        self._batch_segments: list[MappedSegment] = []  # that values of the batch are in

    def run(self) -> None:
        kind, body = self._control.read_command()
        assert kind == worker_protocol.REQUEST
        request = json.loads(body)
        parts: list[tuple[int, int]] = request["parts"]
        self._output = StreamOutput(self._output_fd, self._control.fd, request["chunked"])
        self._batches = ArrowBatchBuilder(request["columns"], request["queue"], parts, ZstdCodec())
        self._directory = request["directory"]
        self._merge = PlaceMerge(len(parts))
        self._parts_to_skip: set[int] = (
            set()
        )  # until `again`: what follows a message that was missing is told anew
        while not self._merge.is_exhausted():
            places = self._merge.take_next(BATCH_ROWS)
            for part in self._merge.take_finished():
                self._control.send_answer(done=part)
            if places:
                self._read_places(places)
            else:
                self._handle_command(
                    *(
                        self._early_commands.popleft()
                        if self._early_commands
                        else self._control.read_command()
                    )
                )
        self._send_batch()
        self._start_output()
        self._output.write(memoryview(STREAM_END))
        self._control.send_answer(is_ended=True)

    def _handle_command(self, kind: bytes, body: bytes) -> None:
        (part,) = PART_HEADER.unpack_from(body)
        if kind == worker_protocol.RESTART:
            self._parts_to_skip.discard(part)
        elif part in self._parts_to_skip:
            pass
        elif kind == worker_protocol.PLACES:
            self._merge.add_slice(part, body[PART_HEADER.size :])
        elif kind == worker_protocol.END:
            self._merge.end_part(part)

    def _start_output(self) -> None:
        """There is something to send: the answer may begin, and does when the door says so."""
        if self._is_started:
            return
        self._is_started = True
        self._control.send_answer(is_ready=True)
        while True:
            kind, body = self._control.read_command()
            if kind == worker_protocol.START:
                break
            self._early_commands.append((kind, body))
        self._output.write(memoryview(self._batches.schema_bytes()))

    def _read_places(self, places: bytes) -> None:
        """Take the rows at these places, and send what is a full batch by then. One that is not where it should be is
        told, and those behind it of the same part are left out."""
        columns = self._batches.columns
        nth = 0
        while nth * MERGED_PLACE_BYTES < len(places):
            seq, address, size, part = MERGED_PLACE.unpack_from(places, nth * MERGED_PLACE_BYTES)
            path = f"{self._directory}/{log_name(address >> 32)}"
            segment = SEGMENTS.get_map(path, (address & 0xFFFF_FFFF) + size)
            columns.has_missing = segment is None
            before = nth
            if segment is not None:
                self._batch_segments.append(segment)
                nth = columns.add_records_from_map(
                    segment.mapped, segment.address, places, nth, BATCH_ROWS, BATCH_BYTES
                )
            if columns.has_missing and nth == before:
                self._send_batch()  # nobody knows how long it takes to find the other one
                self._parts_to_skip.add(part)
                self._merge.reset_part(part)
                self._control.send_answer(missing=seq, part=part)
                places, nth = exclude_part(places[nth * MERGED_PLACE_BYTES :], part), 0
            # Else the batch is full, the segment is another one, or the map ends before what was written since.
            elif columns.rows >= BATCH_ROWS or columns.batch_bytes >= BATCH_BYTES:
                self._send_batch()

    def _send_batch(self) -> None:
        if self._batches.columns.rows:
            batch = self._batches.take_batch()
            self._start_output()
            self._output.write(*batch)
        self._batch_segments.clear()


def serve_reader(fds: list[int]) -> None:
    control_socket = socket.socket(fileno=fds[0])
    try:
        control = ControlConnection(control_socket)
        try:
            with SEGMENTS:
                RangeReader(control, fds[1]).run()
        except ReaderGone:
            pass
        except Exception as fault:
            with suppress(ReaderGone):
                control.send_answer(fault=f"{type(fault).__name__}: {fault}")
    finally:
        control_socket.close()
        os.close(fds[1])


class PandasBlocker:
    """Finds no pandas. Pyarrow imports it, where it is installed, only to see that a list is none of its own: half of
    the time that a start takes, and of the memory."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def preload_imports() -> None:
    """Import what the first reader would wait for, before this process gives way to others: on a machine with much to
    do it would wait for a minute."""
    sys.meta_path.insert(0, PandasBlocker())
    ArrowBatchBuilder(list(ALL_COLUMNS), "", [(0, 0), (1, 1)], ZstdCodec())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the broker, which closes the line
    preload_imports()
    os.nice(NICE)
    parent_socket = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(parent_socket, 1, 2)
        if not data:
            os._exit(0)  # the door is closed: whoever still waits to write waits in vain
        threading.Thread(target=serve_reader, args=(fds,), daemon=True).start()


if __name__ == "__main__":
    main()

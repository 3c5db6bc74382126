"""The worker process of bulk reads: turns ranges of the log into Arrow, with its own interpreter.

The HTTP API (`bulk/readers.py`) starts it when a client reads. It ends when the API closes the
control connection or dies. It receives the places of messages and opens the segments read-only; it
decides nothing and stores nothing, and its death loses nothing of the broker. Each reader is a
thread and two sockets:

    control   commands from the API:  request, places, start, restart, end (bulk/worker_protocol.py)
              answers, lines of JSON:  is_ready, done <part>, missing <seq>, is_ended, fault <text>
    output    the bytes of the Arrow stream, to the API or, `chunked`, into the client's connection

A slow client fills its output socket, and the reader's thread waits: at most one batch is read
ahead for it. A reader of several partitions gets them in the order of the log (`bulk/merge.py`).
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
from sluice.queues.bodies import ZstdCodec
from sluice.store.embedded import log_name

MAX_MAPPED_SEGMENTS: Final = 8
NICE: Final = 15  # messages go first: of a core that the broker can fill, 3 % are left for readers
STALL_SECONDS: Final = 900
MAX_IOVECS_PER_WRITE: Final = 64  # of one call; the system accepts 1,024
# Bytes per write: larger copies in the kernel keep other threads off the core.
WRITE_BYTES: Final = 1 << 16


class ReaderGone(Exception):
    """The client of this reader has gone."""


class ControlConnection:
    """The control connection: commands in, answers out."""

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
    """The output of a reader; `chunked` writes the chunks of HTTP/1.1.

    A client that accepts nothing for a long time counts as gone. So does one whose control
    connection the API has closed, even if the client is still connected.
    """

    def __init__(self, fd: int, control_fd: int, chunked: bool) -> None:
        self._fd = fd
        self._control_fd = control_fd
        self._chunked = chunked
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._poll.register(control_fd, 0)  # a hang-up is always reported

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
        """Send about WRITE_BYTES, or what the socket accepts, and remove it from `parts`."""
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
    """Return the first parts, at most `size` bytes, up to the first that `writev` sends."""
    found: list[memoryview] = []
    for part in parts:
        if isinstance(part, IovecBuffer) or size <= 0 or len(found) == MAX_IOVECS_PER_WRITE:
            break
        found.append(part[:size])
        size -= len(part)
    return found


class MappedSegment(NamedTuple):
    """A mapped segment and its address; `buffer` keeps it mapped."""

    mapped: mmap
    address: int
    buffer: object


class SegmentMaps:
    """Mapped segments, shared by all readers: pages that ten readers need are loaded once.

    A deleted segment stays readable while it is mapped; its disk space is free afterwards. The
    broker itself maps nothing, because a page fault would hold its interpreter; here only one
    reader waits.
    """

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
        """Return the map of a segment that reaches to `end`, or None if there is none."""
        with self._lock:
            segment = self._mapped.pop(path, None)
            if segment is None or len(segment.mapped) < end:
                segment = _map_segment(path, end)
            if segment is not None:
                self._mapped[path] = segment
                if len(self._mapped) > MAX_MAPPED_SEGMENTS:
                    # Unmapped as soon as no batch needs it.
                    del self._mapped[next(iter(self._mapped))]
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
    """Serve the ranges of one reader, from its request to its end."""

    def __init__(self, control: ControlConnection, output_fd: int) -> None:
        self._control = control
        self._output_fd = output_fd
        self._early_commands: deque[tuple[bytes, bytes]] = deque()
        self._is_started = False
        self._batch_segments: list[MappedSegment] = []  # segments that the values of the batch use

    def run(self) -> None:
        kind, body = self._control.read_command()
        assert kind == worker_protocol.REQUEST
        request = json.loads(body)
        parts: list[tuple[int, int]] = request["parts"]
        self._output = StreamOutput(self._output_fd, self._control.fd, request["chunked"])
        self._batches = ArrowBatchBuilder(request["columns"], request["queue"], parts, ZstdCodec())
        self._directory = request["directory"]
        self._merge = PlaceMerge(len(parts))
        # Parts with a missing message: their places are dropped until the restart command.
        self._parts_to_skip: set[int] = set()
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
        """Announce that there is output, then wait for the start command."""
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
        """Add the rows at these places and send the batches that are full.

        A message that is not at its place is reported, and later places of its part are dropped.
        """
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
                self._send_batch()  # finding the missing message may take long
                self._parts_to_skip.add(part)
                self._merge.reset_part(part)
                self._control.send_answer(missing=seq, part=part)
                places, nth = exclude_part(places[nth * MERGED_PLACE_BYTES :], part), 0
            # Otherwise the batch is full, the segment changes, or the map ends before newer writes.
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
    """Import hook that hides pandas.

    Where pandas is installed, pyarrow imports it only to see that a list is not a pandas object.
    That costs half of the start time and of the memory.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def preload_imports() -> None:
    """Import what the first reader needs, before this process lowers its priority.

    Afterwards the imports would take a minute on a busy machine.
    """
    sys.meta_path.insert(0, PandasBlocker())
    ArrowBatchBuilder(list(ALL_COLUMNS), "", [(0, 0), (1, 1)], ZstdCodec())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the broker, which closes the connection
    preload_imports()
    os.nice(NICE)
    parent_socket = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(parent_socket, 1, 2)
        if not data:
            os._exit(0)  # the API has closed the connection: pending writes are useless
        threading.Thread(target=serve_reader, args=(fds,), daemon=True).start()


if __name__ == "__main__":
    main()

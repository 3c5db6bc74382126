"""Bulk reads for the HTTP API: who builds the batches, and how the bytes reach the client.

The API runs on its own loop in the broker's process. For a store with files, worker processes do
all the work (`bulk/read_worker.py`): the API asks the broker for places, slice by slice, and
forwards them. The output of a worker goes through a socket into the response or, on a connection
without TLS, directly into the client's connection, so that the broker's process never touches it.
A store without files is read by the broker, and the batches are built here.

The pool starts a worker when a client reads, stops it when it has been idle for a while, and
replaces it when it has died. The death of a worker is an error for its readers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import sluice
from sluice.bulk import worker_protocol
from sluice.bulk.arrow import BATCH_BYTES, BATCH_ROWS, STREAM_END, ArrowBatchBuilder
from sluice.bulk.read_throttle import ReadThrottle
from sluice.errors import TooManyReaders, UnreadableMessage, WorkerLost
from sluice.queues.bodies import ZstdCodec

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60.0
SHUTDOWN_SECONDS: Final = 2.0  # how long a worker may take to end
MAX_SLICES_AHEAD: Final = 2  # slices that a worker holds while it works on one
CHUNK_BYTES: Final = 1 << 18
SOCKET_BUFFER_BYTES: Final = 1 << 20  # at most, between worker and response
MAX_READERS: Final = 32  # at a time; each takes some 20 MB in its worker
# At a time; each takes some 70 MB, and the broker has priority over all of them.
MAX_WORKERS: Final = 4
MAX_TRIES: Final = 60  # a message that compaction moves is readable again within moments
RETRY_SECONDS: Final = 0.05
# A worker needs some 20 MB per reader for each batch. glibc would return them to the system after
# each batch and fault them in again for the next: a fifth of the cost of a batch.
WORKER_ENVIRONMENT: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


class MessageSlice(Protocol):
    """A part of a range, as the broker returns it (`admin.bulk.bulk_views.MessageSlice`)."""

    @property
    def pid(self) -> int: ...
    @property
    def places(self) -> bytes: ...
    @property
    def records(self) -> list[bytes | None]: ...
    @property
    def next(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def max_bytes_per_second(self) -> float: ...


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """A range of one partition."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The content of one response: parts of a queue, each in its own order."""

    queue: str
    parts: tuple[PartitionRange, ...]
    columns: list[str]


# Arguments: range, first sequence, row limit, byte limit.
FetchSlice = Callable[[PartitionRange, int, int, int], Awaitable[MessageSlice]]


class WorkerProcess:
    """One worker process and the socket over which it receives readers."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.control_socket = ours
        self.readers = 0
        try:
            path = os.pathsep.join(
                [str(Path(sluice.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            )
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice.bulk.read_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": path},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def assign_reader(self, reader_socket: socket.socket, output_fd: int) -> None:
        socket.send_fds(self.control_socket, [b"r"], [reader_socket.fileno(), output_fd])

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Close the socket, which ends the worker; kill it if it does not end. Blocks briefly."""
        self.control_socket.close()
        try:
            self.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ReaderSlots:
    """Bound the number of concurrent readers; refuse a reader when all slots are taken."""

    def __init__(self, count: int = MAX_READERS) -> None:
        self._count = count
        self.used = 0

    def acquire(self) -> None:
        if self.used >= self._count:
            raise TooManyReaders(self._count)
        self.used += 1

    def release(self) -> None:
        self.used -= 1


class WorkerPool:
    """Start, share and stop worker processes. Runs on the API's loop.

    There may be one worker per core, because the readers of one share an interpreter lock: while
    it builds a batch for one reader, no other can send. A reader gets the worker with the fewest
    readers, and a new worker only if all have some. So a single client uses one process, with its
    maps, for everything. `directory_of` returns the directory of the store with a queue.
    """

    def __init__(
        self,
        directory_of: Callable[[str], str],
        throttle: ReadThrottle,
        idle_seconds: float = IDLE_SECONDS,
        max_workers: int = 0,
    ) -> None:
        self._directory_of = directory_of
        self.throttle = throttle
        self._idle_seconds = idle_seconds
        self._max_workers = max_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._workers: list[WorkerProcess] = []
        self._slots = ReaderSlots()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def begin_read(
        self, request: ReadRequest, pids: list[int], output_fd: int, chunked: bool
    ) -> tuple[WorkerProcess, socket.socket]:
        """Assign a reader to a worker; return the worker and the control socket of the reader."""
        self._slots.acquire()
        try:
            return self._begin_read(request, pids, output_fd, chunked)
        except BaseException:
            self._slots.release()
            raise

    def _begin_read(
        self, request: ReadRequest, pids: list[int], output_fd: int, chunked: bool
    ) -> tuple[WorkerProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            for _ in range(self._max_workers + 1):
                worker = self._pick_worker()
                try:
                    worker.assign_reader(theirs, output_fd)
                    break
                except OSError:
                    self._stop_worker(worker)  # it has just died
            else:
                raise WorkerLost
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        command = {
            "directory": self._directory_of(request.queue),
            "queue": request.queue,
            "parts": [(part.partition, pid) for part, pid in zip(request.parts, pids, strict=True)],
            "columns": request.columns,
            "chunked": chunked,
        }
        # Fits the buffer of the socket.
        ours.send(
            worker_protocol.encode_command(worker_protocol.REQUEST, json.dumps(command).encode())
        )
        worker.readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return worker, ours

    def finish_read(self, worker: WorkerProcess) -> None:
        """Free the slot of a reader of this worker."""
        worker.readers -= 1
        self._slots.release()
        if self._slots.used == 0 and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(
                self._idle_seconds, self._stop_all_workers
            )

    def _pick_worker(self) -> WorkerProcess:
        if self._is_closed:
            raise WorkerLost
        for worker in [one for one in self._workers if not one.is_alive()]:
            log.warning(
                "bulk worker died, starting another",
                extra={"code": worker.process.returncode},
            )
            self._stop_worker(worker)
        least_loaded = min(self._workers, key=lambda one: one.readers, default=None)
        if least_loaded is None or (
            least_loaded.readers and len(self._workers) < self._max_workers
        ):
            least_loaded = WorkerProcess()
            self._workers.append(least_loaded)
        return least_loaded

    def _stop_worker(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.stop()

    def _stop_all_workers(self) -> None:
        for worker in self._workers.copy():
            self._stop_worker(worker)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_all_workers()


class RangeProgress:
    """How far the worker has the places of a part."""

    def __init__(self, part: PartitionRange) -> None:
        self.part = part
        self.next_sequence = part.start
        self.slices_ahead = 0  # slices that the worker has not used up
        self.missing_sequence = -1
        self.tries = 0

    def wants_slice(self) -> bool:
        return self.slices_ahead < MAX_SLICES_AHEAD and self.next_sequence < self.part.end


class WorkerReader:
    """Ranges that a worker builds.

    `open` returns when the response can begin, or refuses. After `start`, `chunks` yields its
    bytes. If the worker writes into the connection itself, there are no chunks, and the iteration
    ends when the worker has finished.
    """

    def __init__(self, pool: WorkerPool, request: ReadRequest, fetch: FetchSlice) -> None:
        self._pool = pool
        self._request = request
        self._fetch = fetch
        self._ranges = [RangeProgress(part) for part in request.parts]
        self._worker: WorkerProcess | None = None
        self._output: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._feed_task: asyncio.Task[None] | None = None

    async def open(self, connection: int = -1) -> None:
        """Start the read. The worker writes to the descriptor `connection` unless it is -1."""
        first_slices = [await self._next_slice(progress) for progress in self._ranges]
        pids = [one.pid for one in first_slices]
        if connection >= 0:
            self._worker, control_socket = self._pool.begin_read(
                self._request, pids, connection, True
            )
        else:
            self._output, theirs = socket.socketpair()
            with theirs:
                for end in (self._output, theirs):
                    end.setblocking(False)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                try:
                    self._worker, control_socket = self._pool.begin_read(
                        self._request, pids, theirs.fileno(), False
                    )
                except BaseException:
                    self._output.close()
                    raise
        try:
            reader, self._writer = await asyncio.open_connection(sock=control_socket)
            ready = asyncio.get_running_loop().create_future()
            self._feed_task = asyncio.create_task(
                self._feed_worker(first_slices, reader, self._writer, ready)
            )
            await asyncio.wait([self._feed_task, ready], return_when=asyncio.FIRST_COMPLETED)
            if self._feed_task.done():
                self._feed_task.result()
        except BaseException:
            await self.close()
            raise

    async def _next_slice(self, progress: RangeProgress) -> MessageSlice:
        found = await self._fetch(progress.part, progress.next_sequence, BATCH_ROWS, BATCH_BYTES)
        progress.next_sequence = max(found.next, progress.next_sequence + 1)
        await self._pool.throttle.wait(found.bytes, found.max_bytes_per_second)
        return found

    async def _feed_worker(
        self,
        first_slices: list[MessageSlice],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ready: asyncio.Future[None],
    ) -> None:
        """Send places to the worker, a little ahead of it, until it has sent the last message."""
        for nth, slice_ in enumerate(first_slices):
            self._send_slice(writer, nth, slice_)
        while True:
            for nth, progress in enumerate(self._ranges):
                while progress.wants_slice():
                    self._send_slice(writer, nth, await self._next_slice(progress))
                    await writer.drain()
            answer = await self._read_answer(reader, ready)
            if "done" in answer:
                self._ranges[answer["done"]].slices_ahead -= 1
            elif "missing" in answer:
                await self._retry_missing(writer, answer["part"], answer["missing"])
            else:
                return

    def _send_slice(self, writer: asyncio.StreamWriter, nth: int, slice_: MessageSlice) -> None:
        progress = self._ranges[nth]
        if slice_.places:
            writer.write(
                worker_protocol.encode_part_command(nth, worker_protocol.PLACES, slice_.places)
            )
            progress.slices_ahead += 1
        if progress.next_sequence >= progress.part.end:
            writer.write(worker_protocol.encode_part_command(nth, worker_protocol.END))

    async def _retry_missing(self, writer: asyncio.StreamWriter, nth: int, missing: int) -> None:
        """Look up a message again that was moved or deleted after its place was fetched."""
        progress = self._ranges[nth]
        progress.tries = progress.tries + 1 if missing == progress.missing_sequence else 0
        progress.next_sequence = progress.missing_sequence = missing
        progress.slices_ahead = 0
        if progress.tries >= MAX_TRIES:
            raise UnreadableMessage(self._request.queue, progress.part.partition, missing)
        await asyncio.sleep(RETRY_SECONDS if progress.tries else 0.0)
        writer.write(worker_protocol.encode_part_command(nth, worker_protocol.RESTART))

    async def _read_answer(
        self, reader: asyncio.StreamReader, ready: asyncio.Future[None]
    ) -> dict[str, Any]:
        while True:
            try:
                line = await reader.readline()
            except OSError:
                line = b""
            if not line.endswith(b"\n"):
                raise WorkerLost
            answer: dict[str, Any] = json.loads(line)
            if "fault" in answer:
                log.error("bulk worker failed", extra={"fault": answer["fault"]})
                raise WorkerLost
            if "is_ready" not in answer:
                return answer
            if not ready.done():
                ready.set_result(None)

    def start(self) -> None:
        """Let the worker send: the response has begun."""
        assert self._writer is not None
        self._writer.write(worker_protocol.encode_command(worker_protocol.START))

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._feed_task is not None
        if self._output is not None:
            loop = asyncio.get_running_loop()
            while True:
                data = await loop.sock_recv(self._output, CHUNK_BYTES)
                if not data:
                    break
                yield data
        await self._feed_task

    async def close(self) -> None:
        """End the read at any point; the worker sees that its client is gone."""
        if self._feed_task is not None:
            self._feed_task.cancel()
            await asyncio.wait([self._feed_task])
            if not self._feed_task.cancelled():
                self._feed_task.exception()  # already reported to the client, or the client is gone
        if self._writer is not None:
            self._writer.close()
        if self._output is not None:
            self._output.close()
        assert self._worker is not None
        self._pool.finish_read(self._worker)


class LocalReader:
    """Ranges of a store without files, one after the other.

    The broker reads the records, and a thread builds the batches here.
    """

    def __init__(
        self, slots: ReaderSlots, throttle: ReadThrottle, request: ReadRequest, fetch: FetchSlice
    ) -> None:
        self._slots = slots
        self._throttle = throttle
        self._request = request
        self._fetch = fetch
        self._ranges = [RangeProgress(part) for part in request.parts]
        # Of the first range that is not finished.
        self._batches: ArrowBatchBuilder | None = None
        self._first_batch: list[bytes] = []

    async def open(self, connection: int = -1) -> None:
        self._slots.acquire()
        try:
            for progress in self._ranges[1:]:
                # Refuse an unreadable range before the response begins.
                await self._fetch(progress.part, progress.next_sequence, 1, 1)
            self._first_batch = [await self._next_batch()]
        except BaseException:
            self._slots.release()
            raise

    async def _next_batch(self) -> bytes:
        """Return the bytes of the next batches; empty at the end."""
        while self._ranges:
            progress = self._ranges[0]
            found = await self._fetch(
                progress.part, progress.next_sequence, BATCH_ROWS, BATCH_BYTES
            )
            await self._throttle.wait(found.bytes, found.max_bytes_per_second)
            built, next_sequence = await asyncio.to_thread(
                self._build_batches, progress.part, found
            )
            progress.tries = (
                progress.tries + 1
                if next_sequence == progress.next_sequence and next_sequence < found.next
                else 0
            )
            if progress.tries >= MAX_TRIES:
                raise UnreadableMessage(self._request.queue, progress.part.partition, next_sequence)
            progress.next_sequence = (
                next_sequence
                if next_sequence < found.next
                else max(found.next, progress.next_sequence + 1)
            )
            if progress.next_sequence >= progress.part.end:
                del self._ranges[0]
                self._batches = None
            if built:
                return built
            await asyncio.sleep(RETRY_SECONDS if progress.tries else 0.0)
        return b""

    def _build_batches(self, part: PartitionRange, found: MessageSlice) -> tuple[bytes, int]:
        """Return the batches of a slice and the sequence that they reach."""
        parts: list[memoryview] = []
        if self._batches is None:
            self._batches = self._new_batch_builder(part.partition, found.pid)
        batches = self._batches
        next_sequence = found.next
        for nth, record in enumerate(found.records):
            seq, _, size = worker_protocol.PLACE.unpack_from(
                found.places, nth * worker_protocol.PLACE.size
            )
            if record is None or not batches.columns.add_record(record, 0, size, seq):
                next_sequence = seq
                break
            if batches.columns.batch_bytes >= BATCH_BYTES:
                parts += batches.take_copied_batch()
        if batches.columns.rows:
            parts += batches.take_copied_batch()
        return b"".join(parts), next_sequence

    def _new_batch_builder(self, partition: int, pid: int) -> ArrowBatchBuilder:
        return ArrowBatchBuilder(
            self._request.columns, self._request.queue, [(partition, pid)], ZstdCodec()
        )

    def start(self) -> None:
        pass

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._new_batch_builder(0, 0).schema_bytes()
        part = self._first_batch.pop()
        while part:
            yield part
            part = await self._next_batch()
        yield STREAM_END

    async def close(self) -> None:
        self._slots.release()

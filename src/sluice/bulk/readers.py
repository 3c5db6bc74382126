"""Ranges for readers over HTTP: who builds them, and how the bytes get there.

The door runs on a loop of its own, in the broker's process. For a store with files it leaves all the work to worker
processes (`bulk/worker.py`): it asks the broker where messages are, slice by slice, and passes that on. What a worker
makes goes through a socket into the answer, or, on a connection without TLS, straight into the client's own: then the
broker's process never touches it. A store without files is read by the broker, and built here.

A worker is started when somebody reads, ended when nobody has for a while, and another started when it has died. Its
death is an error to those who were reading with it.
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
from sluice.bulk.arrow import BATCH_BYTES, BATCH_ROWS, END, Batches
from sluice.bulk.read_throttle import Pace
from sluice.errors import TooManyReaders, UnreadableMessage, WorkerLost
from sluice.queues.bodies.codec import ZstdCodec

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60.0
END_SECONDS: Final = 2.0  # what a worker may take to end
AHEAD: Final = 2  # slices that the worker has while it works on one
CHUNK_BYTES: Final = 1 << 18
WAY_BYTES: Final = 1 << 20  # what lies between worker and answer, at most
MOST_READERS: Final = 32  # at a time; each has some 20 MB in its worker
MOST_WORKERS: Final = 4  # at a time; each has some 70 MB of its own, and the broker goes before all of them
MOST_TRIES: Final = 60  # a message that is being moved is there again within moments
TRY_SECONDS: Final = 0.05
# A worker needs some 20 MB for each reader, again and again. glibc would give them back to the system after each batch,
# and take them page by page for the next: a fifth of what a batch costs.
MEMORY: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


class Slice(Protocol):
    """A part of a range, as the broker tells it (`admin.bulk_views.Slice`)."""

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
    def pace(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one partition."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one answer has: parts of a queue, each in its own order."""

    queue: str
    parts: tuple[Part, ...]
    columns: list[str]


NextSlice = Callable[[Part, int, int, int], Awaitable[Slice]]  # of what, from where, most rows, most bytes


class Worker:
    """One process, and the line on which readers are handed to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.line = ours
        self.readers = 0  # that it has now
        try:
            path = os.pathsep.join([str(Path(sluice.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice.bulk.read_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **MEMORY, "PYTHONPATH": path},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def hand_over(self, line: socket.socket, way: int) -> None:
        socket.send_fds(self.line, [b"r"], [line.fileno(), way])

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Closing the line is enough; who does not hear it is killed. Blocks for moments."""
        self.line.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Seats:
    """For those who read at a time; who finds none is refused."""

    def __init__(self, count: int = MOST_READERS) -> None:
        self._count = count
        self.taken = 0

    def take(self) -> None:
        if self.taken >= self._count:
            raise TooManyReaders(self._count)
        self.taken += 1

    def leave(self) -> None:
        self.taken -= 1


class Workshop:
    """The workers and their life. On the door's loop.

    There may be one for each core, because the readers of one share an interpreter lock: while a batch is made for one
    of them, none can send. A reader gets the worker that has fewest, and a new one only where all have some already, so
    that whoever reads alone has one process, and its maps, for everything."""

    def __init__(self, directory: str, pace: Pace, idle_seconds: float = IDLE_SECONDS, most: int = 0) -> None:
        self._directory = directory
        self.pace = pace
        self._idle_seconds = idle_seconds
        self._most = most or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._workers: list[Worker] = []
        self._seats = Seats()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def begin(self, wanted: Wanted, pids: list[int], way: int, chunked: bool) -> tuple[Worker, socket.socket]:
        """Hand a reader over; to whom, and the line to its thread. `pids` are those of the parts."""
        self._seats.take()
        try:
            return self._begin(wanted, pids, way, chunked)
        except BaseException:
            self._seats.leave()
            raise

    def _begin(
        self, wanted: Wanted, pids: list[int], way: int, chunked: bool
    ) -> tuple[Worker, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            for _ in range(self._most + 1):
                worker = self._ready_worker()
                try:
                    worker.hand_over(theirs, way)
                    break
                except OSError:
                    self._let_go(worker)  # it died a moment ago
            else:
                raise WorkerLost
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        asked = {
            "directory": self._directory,
            "queue": wanted.queue,
            "parts": [(part.partition, pid) for part, pid in zip(wanted.parts, pids, strict=True)],
            "columns": wanted.columns,
            "chunked": chunked,
        }
        ours.send(worker_protocol.said(worker_protocol.REQUEST, json.dumps(asked).encode()))  # less than a socket holds
        worker.readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return worker, ours

    def finish(self, worker: Worker) -> None:
        """A reader of that one is done."""
        worker.readers -= 1
        self._seats.leave()
        if self._seats.taken == 0 and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._let_all_go)

    def _ready_worker(self) -> Worker:
        if self._is_closed:
            raise WorkerLost
        for worker in [one for one in self._workers if not one.is_alive()]:
            log.warning(
                "the bulk reader had died; another is started",
                extra={"code": worker.process.returncode},
            )
            self._let_go(worker)
        least = min(self._workers, key=lambda one: one.readers, default=None)
        if least is None or (least.readers and len(self._workers) < self._most):
            least = Worker()
            self._workers.append(least)
        return least

    def _let_go(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def _let_all_go(self) -> None:
        for worker in self._workers.copy():
            self._let_go(worker)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._let_all_go()


class Feed:
    """How far the worker was told of a part."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.at = part.start
        self.ahead = 0  # slices that it has not used up
        self.lost = -1  # the message that was missing
        self.tries = 0

    def wants(self) -> bool:
        return self.ahead < AHEAD and self.at < self.part.end


class Reading:
    """Ranges that the worker builds. `open` returns when the answer can begin, or refuses; after `go`, `chunks` are
    its bytes. Where the worker writes into the connection by itself there are none, and they end when it has."""

    def __init__(self, workshop: Workshop, wanted: Wanted, slices: NextSlice) -> None:
        self._workshop = workshop
        self._wanted = wanted
        self._slices = slices
        self._feeds = [Feed(part) for part in wanted.parts]
        self._worker: Worker | None = None
        self._way: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._feeding: asyncio.Task[None] | None = None

    async def open(self, connection: int = -1) -> None:
        """`connection`: a descriptor of the client's own connection, for the worker to write to."""
        first = [await self._next(feed) for feed in self._feeds]
        pids = [one.pid for one in first]
        if connection >= 0:
            self._worker, line = self._workshop.begin(self._wanted, pids, connection, True)
        else:
            self._way, theirs = socket.socketpair()
            with theirs:
                for end in (self._way, theirs):
                    end.setblocking(False)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WAY_BYTES)
                try:
                    self._worker, line = self._workshop.begin(self._wanted, pids, theirs.fileno(), False)
                except BaseException:
                    self._way.close()
                    raise
        try:
            reader, self._writer = await asyncio.open_connection(sock=line)
            ready = asyncio.get_running_loop().create_future()
            self._feeding = asyncio.create_task(self._feed(first, reader, self._writer, ready))
            await asyncio.wait([self._feeding, ready], return_when=asyncio.FIRST_COMPLETED)
            if self._feeding.done():
                self._feeding.result()
        except BaseException:
            await self.close()
            raise

    async def _next(self, feed: Feed) -> Slice:
        found = await self._slices(feed.part, feed.at, BATCH_ROWS, BATCH_BYTES)
        feed.at = max(found.next, feed.at + 1)
        await self._workshop.pace.wait(found.bytes, found.pace)
        return found

    async def _feed(
        self,
        first: list[Slice],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ready: asyncio.Future[None],
    ) -> None:
        """Tell the worker where messages are, a little ahead of it, until it has sent the last."""
        for nth, slice_ in enumerate(first):
            self._tell(writer, nth, slice_)
        while True:
            for nth, feed in enumerate(self._feeds):
                while feed.wants():
                    self._tell(writer, nth, await self._next(feed))
                    await writer.drain()
            answer = await self._answer(reader, ready)
            if "done" in answer:
                self._feeds[answer["done"]].ahead -= 1
            elif "missing" in answer:
                await self._look_again(writer, answer["part"], answer["missing"])
            else:
                return

    def _tell(self, writer: asyncio.StreamWriter, nth: int, slice_: Slice) -> None:
        feed = self._feeds[nth]
        if slice_.places:
            writer.write(worker_protocol.said_of(nth, worker_protocol.PLACES, slice_.places))
            feed.ahead += 1
        if feed.at >= feed.part.end:
            writer.write(worker_protocol.said_of(nth, worker_protocol.LAST))

    async def _look_again(self, writer: asyncio.StreamWriter, nth: int, missing: int) -> None:
        """It was moved or let go between being asked for and being read: where is it now?"""
        feed = self._feeds[nth]
        feed.tries = feed.tries + 1 if missing == feed.lost else 0
        feed.at = feed.lost = missing
        feed.ahead = 0
        if feed.tries >= MOST_TRIES:
            raise UnreadableMessage(self._wanted.queue, feed.part.partition, missing)
        await asyncio.sleep(TRY_SECONDS if feed.tries else 0.0)
        writer.write(worker_protocol.said_of(nth, worker_protocol.AGAIN))

    async def _answer(self, reader: asyncio.StreamReader, ready: asyncio.Future[None]) -> dict[str, Any]:
        while True:
            try:
                line = await reader.readline()
            except OSError:
                line = b""
            if not line.endswith(b"\n"):
                raise WorkerLost
            answer: dict[str, Any] = json.loads(line)
            if "fault" in answer:
                log.error("the bulk reader failed", extra={"fault": answer["fault"]})
                raise WorkerLost
            if "is_ready" not in answer:
                return answer
            if not ready.done():
                ready.set_result(None)

    def go(self) -> None:
        """The answer has begun."""
        assert self._writer is not None
        self._writer.write(worker_protocol.said(worker_protocol.GO))

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._feeding is not None
        if self._way is not None:
            loop = asyncio.get_running_loop()
            while True:
                data = await loop.sock_recv(self._way, CHUNK_BYTES)
                if not data:
                    break
                yield data
        await self._feeding

    async def close(self) -> None:
        """The end, wherever it stands: the worker sees that nobody reads any more."""
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait([self._feeding])
            if not self._feeding.cancelled():
                self._feeding.exception()  # somebody was told, or has gone
        if self._writer is not None:
            self._writer.close()
        if self._way is not None:
            self._way.close()
        assert self._worker is not None
        self._workshop.finish(self._worker)


class LocalReading:
    """Ranges of a store without files, one after the other: the broker reads the records, and they are built here, in a
    thread."""

    def __init__(self, seats: Seats, pace: Pace, wanted: Wanted, slices: NextSlice) -> None:
        self._seats = seats
        self._pace = pace
        self._wanted = wanted
        self._slices = slices
        self._feeds = [Feed(part) for part in wanted.parts]
        self._batches: Batches | None = None  # of the first part that is not read to its end
        self._first: list[bytes] = []

    async def open(self, connection: int = -1) -> None:
        self._seats.take()
        try:
            for feed in self._feeds[1:]:
                await self._slices(feed.part, feed.at, 1, 1)  # one that cannot be read is refused now
            self._first = [await self._next()]
        except BaseException:
            self._seats.leave()
            raise

    async def _next(self) -> bytes:
        """The bytes of the next batch or more; none at the end."""
        while self._feeds:
            feed = self._feeds[0]
            found = await self._slices(feed.part, feed.at, BATCH_ROWS, BATCH_BYTES)
            await self._pace.wait(found.bytes, found.pace)
            built, reached = await asyncio.to_thread(self._build, feed.part, found)
            feed.tries = feed.tries + 1 if reached == feed.at and reached < found.next else 0
            if feed.tries >= MOST_TRIES:
                raise UnreadableMessage(self._wanted.queue, feed.part.partition, reached)
            feed.at = reached if reached < found.next else max(found.next, feed.at + 1)
            if feed.at >= feed.part.end:
                del self._feeds[0]
                self._batches = None
            if built:
                return built
            await asyncio.sleep(TRY_SECONDS if feed.tries else 0.0)
        return b""

    def _build(self, part: Part, found: Slice) -> tuple[bytes, int]:
        """The batches of a slice, and how far they go."""
        parts: list[memoryview] = []
        if self._batches is None:
            self._batches = self._batches_of(part.partition, found.pid)
        batches = self._batches
        reached = found.next
        for nth, record in enumerate(found.records):
            seq, _, size = worker_protocol.PLACE.unpack_from(found.places, nth * worker_protocol.PLACE.size)
            if record is None or not batches.columns.add(record, 0, size, seq):
                reached = seq
                break
            if batches.columns.bytes >= BATCH_BYTES:
                parts += batches.take_copied()
        if batches.columns.rows:
            parts += batches.take_copied()
        return b"".join(parts), reached

    def _batches_of(self, partition: int, pid: int) -> Batches:
        return Batches(self._wanted.columns, self._wanted.queue, [(partition, pid)], ZstdCodec())

    def go(self) -> None:
        pass

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._batches_of(0, 0).head()
        part = self._first.pop()
        while part:
            yield part
            part = await self._next()
        yield END

    async def close(self) -> None:
        self._seats.leave()

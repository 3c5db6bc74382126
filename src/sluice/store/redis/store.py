"""The Redis store's face: the contract of `store/protocol`, kept by a Redis that several brokers may reach.

This object lives in the loop's thread and never waits for Redis once it is open: the writer and the reader do, each in
a thread of its own, and a keeper renews the lease. What lies where: KEYS.md. Why it is so:
docs/decisions/0017-redis-store.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from redis.exceptions import RedisClusterException, RedisError

from sluice.errors import StoreError, messages_by_queue
from sluice.store.embedded.store import check_crc32c
from sluice.store.changes import Meaning
from sluice.store.snapshot_policy import Pace
from sluice.store.protocol import Loader, Recovery
from sluice.store.redis.log.plan_builder import Composer
from sluice.store.redis.errors import text_of
from sluice.store.redis.log.log_entries import Parts, take_frame_apart
from sluice.store.redis.server_checks import advice
from sluice.store.redis.log.address_index import Index
from sluice.store.redis.ownership.lease_renewer import LeaseKeeper
from sluice.store.redis.keys import Keys
from sluice.store.redis.ownership.lease import Lease
from sluice.store.redis.connection import PatientLink, Server, patiently
from sluice.store.redis.log.frame_losses import LossDetector, Losses, queue_name, read_losses
from sluice.store.redis.options import Options
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.write_plan import ClusterScribe, Plan, Scribe, SingleScribe
from sluice.store.redis.log.reader import Reader
from sluice.store.redis.log.log_recovery import Recoverer
from sluice.store.redis.log.log_segments import FRAME_GAP
from sluice.store.redis.views.maintenance import Showing
from sluice.store.redis.ownership.takeover import raise_fences, remove_torn
from sluice.store.redis.views.group_views import Views
from sluice.store.redis.log.writer import WriteJob, Writer

COUNTS_READS = (7, 0)  # from here on a group knows how many entries it has read
_LIMIT = 0xF000_0000  # of a segment: an offset has 32 bits


class RedisStore:
    """`on_failure` is called once, in the loop's thread, when there is no going on. `on_stall` is called with the
    reason when Redis has not taken a write for `wait_seconds`, and with nothing when it takes them again."""

    def __init__(
        self,
        url: str,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        *,
        on_stall: Callable[[str], None] | None = None,
        meaning: Meaning | None = None,
        options: Options | None = None,
        segment_bytes: int = 64 << 20,
        snapshot_bytes: int = 64 << 20,
    ) -> None:
        self._url = url
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_stall = on_stall if on_stall is not None else _nobody_listens
        self._meaning = meaning if meaning is not None else Meaning()
        self._options = options if options is not None else Options()
        self._segment_bytes = segment_bytes
        self._snapshot_bytes = snapshot_bytes
        self._keys = Keys(self._options.prefix, self._options.tag)
        self._server: Server | None = None
        self._lease = Lease(self._keys, self._options.lease_seconds)
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._keeper: LeaseKeeper | None = None
        self._index = Index()
        self._places = Places(self._keys)
        self._scribe: Scribe = SingleScribe(self._keys)
        self._composer = Composer(self._keys, self._index, self._places, self._meaning, False)
        self._views = Views(self._keys, self._places, self._meaning, 1, False)
        self._showing: Showing | None = None
        self._detector = LossDetector(self._keys, self._queue_of)
        self.losses = Losses()  # as recorded when the store was opened
        self._frame = 0
        self._segment = 1
        self._offset = 0
        self._sizes: dict[int, int] = {}
        self._pace = Pace(snapshot_bytes)
        self._covers = -1  # the last frame before the snapshot that is being written; -1: none is
        self._failed = False

    # -- the contract

    def open(self, loader: Loader) -> Recovery:
        check_crc32c()
        if self._writer is not None:
            raise StoreError("the store is open already")
        self._index = Index()
        self._places = Places(self._keys)
        self._failed = False
        self._pace = Pace(self._snapshot_bytes)
        server = Server(self._url, self._options.answer_seconds)
        try:
            return self._open(server, loader)
        except (RedisError, RedisClusterException) as fault:
            server.close()
            raise StoreError(
                f"Redis cannot be used: {text_of(fault)}", "Start Redis, or give its address with --store"
            ) from fault
        except BaseException:
            server.close()
            raise

    def _open(self, server: Server, loader: Loader) -> Recovery:
        told = patiently(server.look, self._options.wait_seconds)
        link = PatientLink(server.link(), self._options.wait_seconds)
        if self._options.seize:
            self._lease.seize(link)
        else:
            self._lease.acquire(link, "Redis")
        try:
            if server.is_cluster:
                raise_fences(link, self._keys, self._lease.token)
            log = Recoverer(link, self._keys, self._index, self._places, loader, self._pace).run()
            if server.is_cluster:
                remove_torn(link, self._places, self._index, self._lease.token, log.report)
            self.losses = read_losses(link, self._keys)
        except BaseException:
            self._lease.release(link)
            raise
        finally:
            link.close()
        log.report.notes += advice(told, patiently(server.settings, self._options.wait_seconds))
        unconfirmed = self.losses.unconfirmed
        if unconfirmed is not None:
            log.report.notes.append(
                f"Redis has lost frames that it had confirmed, the latest being {unconfirmed.first} to "
                f"{unconfirmed.last} ({messages_by_queue(unconfirmed.queues)}), and nobody has confirmed it yet: "
                "find out what was lost, then run `sluice losses confirm`"
            )
        self._detector = LossDetector(self._keys, self._queue_of, self._lease.token, log.frame)
        self._frame = log.frame
        self._segment = log.segment
        self._sizes = log.sizes
        self._offset = self._sizes[self._segment]
        self._roll_if_full()
        log.report.segments = len(self._sizes)
        self._composer = Composer(self._keys, self._index, self._places, self._meaning, server.is_cluster)
        self._scribe = ClusterScribe(self._keys) if server.is_cluster else SingleScribe(self._keys)
        self._views = Views(
            self._keys,
            self._places,
            self._meaning,
            self._options.batch,
            server.version >= COUNTS_READS,
            self._options.max_length,
        )
        self._writer = Writer(
            server.link(),
            self._lease.token,
            self._detector,
            self._options.wait_seconds,
            self._call_soon_threadsafe,
            self._fail,
            self._on_stall,
        )
        self._reader = Reader(
            server.link(), self._keys, self._index, self._places, self._call_soon_threadsafe, self._fail
        )
        self._keeper = LeaseKeeper(
            server.link(),
            self._lease,
            self._options.renew_seconds,
            self._detector,
            self._call_soon_threadsafe,
            self._fail,
        )
        self._showing = Showing(
            self._keys,
            self._places,
            self._meaning,
            self._views,
            self._scribe,
            self._options,
            server.is_cluster,
            self._writer.put,
        )
        self._server = server
        self._writer.start()
        self._reader.start()
        self._keeper.start()
        return log.report

    def next_frame(self) -> int:
        return self._segment << 32 | (self._offset + FRAME_GAP)

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        """Redis decides by its own `appendfsync` what an answer is worth: `sync` asks for no more than that."""
        writer = self._open_writer()
        size = FRAME_GAP + len(frame)
        if self._offset + size > _LIMIT:
            raise ValueError(f"a frame of {len(frame)} bytes does not fit into a segment")
        parts = take_frame_apart(frame, count)
        self._frame += 1
        plan = Plan(self._frame)
        self._take_in(parts)
        if parts.counts:
            self._detector.remember(self._frame, parts.counts)
        gone = self._views.show(parts.notes, plan)
        composer = self._composer
        composer.write_names(plan)
        facts = (plan, parts, self.next_frame(), len(frame), self._offset == 0, gone)
        writer.put(WriteJob(self._scribe, partial(composer.write_frame, *facts), done))
        self._offset += size
        self._pace.written += size
        self._sizes[self._segment] = self._offset
        self._roll_if_full()

    def _take_in(self, parts: Parts) -> None:
        for pid, count in parts.counts.items():
            self._views.name(pid)
            self._views.count(pid, "produced", count)

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.read(list(addresses), done)

    def scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.scan(segment, done)

    def wants_snapshot(self) -> bool:
        return self._pace.wants()

    def begin_snapshot(self) -> None:
        self._covers = self._frame
        self._pace.begin()

    def snapshot(self, state: list[bytes], free: Sequence[int], done: Callable[[], None]) -> None:
        writer = self._open_writer()
        if self._covers < 0:
            self.begin_snapshot()
        self._pace.given(state)
        gone = [segment for segment in free if segment in self._sizes and segment != self._segment]
        for segment in gone:
            del self._sizes[segment]
        covers, self._covers = self._covers, -1
        make = partial(self._composer.write_snapshot, state, gone, covers, self._segment)
        writer.put(WriteJob(self._scribe, make, partial(self._snapshot_done, done)))

    def _snapshot_done(self, done: Callable[[], None]) -> None:
        self._pace.done()
        done()

    def seal(self) -> bool:
        return False  # how much room there is, Redis knows: it refuses writes by itself

    def segment_sizes(self) -> dict[int, int]:
        return dict(self._sizes)

    def begin_showing(self) -> None:
        """The queues are back, and the meaning can be asked: make the views true, before the first commit."""
        if self._showing is not None:
            self._showing.begin()

    def look(self, now: float) -> None:
        """To be called every `poll_seconds`: pending lists follow deliveries, and due retries are moved."""
        if self._showing is not None and not self._failed:
            self._showing.look(now)

    def close(self) -> None:
        self._showing = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- inside

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise StoreError("the store is not open")
        return self._writer

    def _queue_of(self, pid: int) -> str | None:
        if not self._meaning.is_queue(pid) or not self._places.knows(pid):
            return None
        return queue_name(self._places.name_of(pid))

    def _roll_if_full(self) -> None:
        if self._offset >= self._segment_bytes:
            self._segment += 1
            self._offset = 0
            self._sizes[self._segment] = 0
            self._pace.sealed = True

    def _fail(self, fault: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(fault)


def _nobody_listens(reason: str) -> None:
    """Who builds a store without `on_stall` waits."""

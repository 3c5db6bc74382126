"""Drives the engine against a store: the thin shell between deterministic queues and a disk that takes its time.

One frame is under way at any time. What arrives meanwhile gathers in the next one and goes when the store has answered:
group commit without a timer. The runner owns the engine's clock, its wake-ups, its reads and its snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_bytes
from typing import Any, Final

from mypy_extensions import i64

from sluice.clock import Clock
from sluice.message import Message
from sluice.queues.model.message_columns import GONE
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.engine import Engine
from sluice.queues.compacted.exclusive import OwnedRead
from sluice.queues.log.frame_builder import Frame
from sluice.queues.log.broker_state import FIRST_OWNER, FIRST_PID, Kept
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.bodies.body_reads import Read
from sluice.queues.log.recovery import EngineLoader
from sluice.queues.model.queue_rules import Rules
from sluice.queues.log.incremental_snapshot import Saving
from sluice.queues.flow.delivery_tokens import RUN_BYTES, SECRET_BYTES
from sluice.store.protocol import ROW_BYTES, Record, Recovery, Store, pid_of_row, read_row

LOOK_SECONDS: Final = 2.0  # a segment whose last messages do not go away for so long is compacted
ROOM_SECONDS: Final = 1.0  # how long an emptied segment waits: others may be emptied meanwhile,
ROOM_BYTES: Final = 4 << 20  # and a second longer for so many bytes of a snapshot: one is written for it
SEAL_BYTES: Final = 1 << 20  # of the open segment that must be dead for it to be ended when room is short
COMPACT_BELOW: Final = 0.4  # a sealed segment of which less than this lives is written anew
COMPACT_LASTING: Final = 0.5  # the same where most of what lives are last values of keys,
COMPACT_SWEPT: Final = (
    0.7  # and after a sweep: the disk then holds at most about one and a half times what lives
)
COMPACT_AT_ONCE: Final = 256  # messages that compaction moves in one go,
LOOK_AT_ONCE: Final = 4096  # and rows that it looks through for them
SAVE_AT_ONCE: Final = 50_000  # last values that are written into a snapshot in one go
SAVE_SECONDS: Final = 0.001  # between two of those


class Runner:
    """`flushed` is called when the engine has said all it has to say for now: whatever it made consumers and publishers
    write can leave. `report` gets alerts and warnings. `call_later` is the loop's. `settle_seconds` is how long
    settlements alone wait for something more urgent to ride with: a frame of their own costs as much as a full one.
    With `call_soon`, the loop's, a frame that follows another at once waits for one look at the sockets first: under
    load that makes frames fewer and larger, and costs nobody a timer. `entropy` gives so many random bytes that nobody
    can guess, for delivery tokens."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Any],
        flushed: Callable[[], None],
        report: Callable[[list[Alert], list[str]], None],
        settle_seconds: float = 0.0,
        call_soon: Callable[[Callable[[], None]], Any] | None = None,
        entropy: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.engine: Engine = engine
        self.on_made: Callable[[Queue], None] | None = None  # hears of queues that the engine made by itself
        self.frame_kept: Callable[[Frame], None] | None = None  # hears of each frame that the store has
        self.on_broken: Callable[[Exception], None] | None = None  # hears that the open frame cannot be kept
        self.frame_taken: Callable[[], None] | None = None  # hears whenever what had gathered is under way
        self._store = store
        self._clock = clock
        self._call_later = call_later
        self._flushed = flushed
        self._report = report
        self._settle_seconds = settle_seconds
        self._call_soon = call_soon
        self._entropy = entropy
        self._gathering: bool = False  # a frame was just kept: what its answers bring goes into the next one
        self._gather: Callable[[], None] = self._gathered
        self._settle_timer: Any = None
        self._room_timer: Any = None
        self._look_timer: Any = None
        self._save_timer: Any = None
        self.save_at_once: int = SAVE_AT_ONCE
        self._snapshot_bytes: int = 0  # of the last one
        self._saving: Saving | None = None  # the snapshot that is being written,
        self._free: list[int] = []  # and what it makes superfluous
        self._wants_room: bool = False
        self._is_short: bool = False  # of room on disk
        self._wants_seal: bool = False  # the open segment is to end with the next frame
        self._frame: Frame | None = None
        self._timer: Any = None
        self._wake_at: float = 0.0
        self._compacting: int = -1
        self._rows: list[
            bytes
        ] = []  # of the segment that is being compacted, in pieces: what is still to be looked at
        self._row_at: int = 0  # in the first of them
        self._compacted: set[int] = (
            set()
        )  # segments that were gone through: what is left in them cannot be moved
        self._lasting_share: float = COMPACT_LASTING
        self._closed: bool = False
        self._frozen: bool = False
        self._held: bool = False  # the open frame is not complete yet: see `hold`
        # Records from here on are not in the store yet: of the frame under way, and of the one that is being made.
        self._unkept_from: int = 0
        self._open_from: int = 0
        self._early: list[
            tuple[list[int], Callable[[list[bytes | None]], None]]
        ] = []  # reads of such records
        # Who waits until all so far is kept: for the frame under way, and for the one that is being made.
        self._waiting: list[Callable[[], None]] = []
        self._waiting_next: list[Callable[[], None]] = []

    def open(self, parse: Callable[[str, str], Rules]) -> Recovery:
        """Bring the queues back. Blocking: nothing else runs yet."""
        recovery = self.load(parse)
        self.begin()
        return recovery

    def load(self, parse: Callable[[str, str], Rules]) -> Recovery:
        """The part of `open` that takes long. Nobody may ask anything of the engine meanwhile; any thread may do it."""
        engine = self.engine
        engine.now = self._clock()
        engine.started_at = engine.now
        loader = EngineLoader(engine, parse)
        recovery = self._store.open(loader)
        try:
            loader.finish()
        except BaseException:
            self._store.close()
            raise
        return recovery

    def begin(self) -> None:
        engine = self.engine
        self._begin_frame()
        run = int.from_bytes(self._entropy(RUN_BYTES), "little")
        engine.begin_tokens(self._entropy(SECRET_BYTES), run)
        self._unkept_from = self._open_from
        engine.exclusive.kept_before = self._open_from
        self._set_timer(engine.next_wake())

    def restore(self, done: Callable[[list[Kept]], None]) -> None:
        """Read what the broker itself had asked to keep, oldest first.

        A new secret of delivery tokens is synced before: the broker serves nobody until `done` is called, so no token
        leaves it that a power cut could make unknown.
        """
        self.when_kept(_Restoring(self, done))

    def read_kept(self, done: Callable[[list[Kept]], None]) -> None:
        self._store.read(self.engine.keeping.found(), _Restored(self.engine, done))

    # ---- turns

    def end_turn(self) -> None:
        """What came in during this turn of the loop is complete: offer, read and commit."""
        if self._frozen:
            return
        engine = self.engine
        engine.end_turn()
        if engine.made:
            self._announce_made()
        self._pump()
        if engine.alerts or engine.warnings:
            alerts = engine.alerts
            warnings = engine.warnings
            engine.alerts = []
            engine.warnings = []
            self._report(alerts, warnings)
        wake = engine.next_wake()
        if wake and (self._wake_at == 0.0 or wake < self._wake_at):
            self._set_timer(wake)

    def _announce_made(self) -> None:
        made = self.engine.made
        self.engine.made = []
        if self.on_made is not None:
            for queue in made:
                self.on_made(queue)
            self.engine.end_turn()

    def _pump(self) -> None:
        if self._frozen:
            return
        engine = self.engine
        if engine.reads:
            reads = engine.reads
            engine.reads = []
            addresses = reads[0].addresses
            if len(reads) > 1:
                addresses = [address for read in reads for address in read.addresses]
            self.read(addresses, _ReadsDone(self, reads))
        if engine.exclusive.reads:
            owned = engine.exclusive.reads
            engine.exclusive.reads = []
            self.read([address for one in owned for address in one.addresses], _OwnedDone(self, owned))
        if self._frame is None and not self._gathering and not self._held and engine.journal.waits():
            if self._settle_seconds and not self._waiting_next and not engine.journal.hurries():
                if self._settle_timer is None:
                    self._settle_timer = self._call_later(self._settle_seconds, self._commit_settled)
            else:
                self._commit()

    def _gathered(self) -> None:
        self._gathering = False
        if not self._closed:
            self._pump()

    def _commit_settled(self) -> None:
        self._settle_timer = None
        if self._frozen:
            return
        if self._frame is None and not self._closed and not self._held and self.engine.journal.waits():
            self._gathering = False
            self.engine.now = self._clock()
            self._commit()

    def _commit(self) -> None:
        engine = self.engine
        frame = engine.take_frame()
        self._frame = frame
        self._waiting = self._waiting_next
        self._waiting_next = []
        if frame.count:
            self._hand_over(frame)
            if self._saving is None and (self._wants_room or self._store.wants_snapshot()):
                self._snapshot()
            if self.frame_taken is not None:
                self.frame_taken()
        else:
            self._committed()

    def _hand_over(self, frame: Frame) -> None:
        self._store.commit(frame.data, int(frame.count), frame.sync, self._committed)
        if self._wants_seal:
            self._wants_seal = False
            self._wants_room = self._store.seal()
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._open_from = self._store.next_frame()
        self.engine.journal.begin(self._open_from)

    def _committed(self) -> None:
        frame = self._frame
        if frame is None or self._closed or self._frozen:
            return
        self._frame = None
        self._unkept_from = self._open_from
        if self._early:
            early = self._early
            self._early = []
            for addresses, done in early:
                self.read(addresses, done)
        waiting = self._waiting
        self._waiting = []
        self.engine.now = self._clock()
        if self._call_soon is not None and self.engine.journal.waits():
            self._gathering = True
            self._call_soon(self._gather)
        self.engine.frame_done(frame)
        if self.frame_kept is not None:
            self.frame_kept(frame)
        self.end_turn()
        if self.engine.segments.emptied and self._room_timer is None:
            self._room_timer = self._call_later(
                ROOM_SECONDS + self._snapshot_bytes // ROOM_BYTES, self._make_room
            )
        for callback in waiting:
            callback()
        self._flushed()

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        """Read records, once they are there: compaction may have moved them into a frame that is still to be kept."""
        if addresses and max(addresses) >= self._unkept_from:
            self._early.append((addresses, done))
        else:
            self._store.read(addresses, done)

    def reads_done(self, reads: list[Read], records: list[bytes | None]) -> None:
        if self._closed or self._frozen:
            return
        self.engine.now = self._clock()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.fetched(read, records[at:end])
            at = end
        self.end_turn()
        self._flushed()

    def owned_done(self, reads: list[OwnedRead], records: list[bytes | None]) -> None:
        """The same for the owners of exclusive queues."""
        if self._closed or self._frozen:
            return
        self.engine.now = self._clock()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.owned_fetched(read, records[at:end])
            at = end
        self.end_turn()
        self._flushed()

    # ---- time

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = when
        if when:
            self._timer = self._call_later(max(0.0, when - self._clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._wake_at = 0.0
        if self._closed or self._frozen:
            return
        self._set_timer(self.engine.tick(self._clock()))
        self.end_turn()
        if self.engine.exclusive.swept:
            self.engine.exclusive.swept = False
            self._lasting_share = COMPACT_SWEPT
            self._after_snapshot()
        self._flushed()

    # ---- room on disk

    def _make_room(self) -> None:
        """A segment was emptied a while ago: with a snapshot it can be given back, now or with the next frame."""
        self._room_timer = None
        if self._closed or self._frozen:
            return
        sealed = False
        if self._is_short:
            sealed = self._seal_if_dead()
            self._room_timer = self._call_later(ROOM_SECONDS, self._make_room)
        self._wants_room = sealed or len(self.engine.segments.free(self._sealed())) > 0
        self.engine.segments.emptied = False
        if self._wants_room and self._frame is None and self._saving is None and not self._held:
            if self.engine.journal.waits():
                self._commit()
            else:
                self._snapshot()

    def short_of_room(self, is_short: bool) -> None:
        """The disk is nearly full, or has room again. Segments are given back whole, and the open
        one never: while room
        is short, one that is mostly dead is ended early, so that acknowledging messages makes
        room."""
        self._is_short = is_short
        if is_short and self._room_timer is None:
            self._room_timer = self._call_later(0.0, self._make_room)

    def _seal_if_dead(self) -> bool:
        """End the open segment if that gives back more than the snapshot takes that must be written
        for it. Returns
        whether it has ended already."""
        sizes = self._store.segment_sizes()
        size = sizes[max(sizes)]
        live: i64 = self.engine.segments.live_bytes(max(sizes))
        if float(live) >= size * COMPACT_BELOW or size - live < SEAL_BYTES + self._snapshot_bytes:
            return False
        if self._frame is not None or self._held or self.engine.journal.waits():
            self._wants_seal = True  # records of the open frame know their addresses: after it
            return False
        if not self._store.seal():
            return False
        self._begin_frame()
        self._unkept_from = self._open_from
        return True

    def leave_damage_behind(self) -> None:
        """After a salvage: a snapshot now, so that the next start begins behind what was broken.

        A snapshot covers whole frames. If records wait, their commit takes the snapshot: the one made here, or the one
        that follows the frame under way.
        """
        if self.engine.journal.waits():
            if self._frame is None and not self._held:
                self._commit()
        elif self._saving is None and self._store.wants_snapshot():
            self._snapshot()

    def _sealed(self) -> list[int]:
        return sorted(self._store.segment_sizes())[:-1]

    def _snapshot(self) -> None:
        """Between two frames: the state that all frames so far add up to, and the segments it makes superfluous."""
        if not self.engine.keeping.is_whole:
            return
        self._wants_room = False
        self._free = self.engine.segments.free(self._sealed())
        self._store.begin_snapshot()
        self._saving = Saving(self.engine, self.save_at_once)
        self._save()

    def _save(self) -> None:
        """A part of the snapshot at a time: nobody waits for more than that."""
        self._save_timer = None
        saving = self._saving
        if saving is None or self._closed:
            return
        if not saving.save_some():
            self._save_timer = self._call_later(SAVE_SECONDS, self._save)
            return
        self._saving = None
        pieces = saving.pieces()
        self._snapshot_bytes = sum(len(piece) for piece in pieces)
        self._store.snapshot(pieces, self._free, self._after_snapshot)
        self.engine.segments.given_back(self._free)

    def _after_snapshot(self) -> None:
        """A good moment to look for a segment that a few old messages keep alive."""
        if self._closed or self._compacting >= 0:
            return
        sizes = self._store.segment_sizes()
        self._compacted &= sizes.keys()
        segment = self.engine.segments.pinned(sizes, COMPACT_BELOW, self._lasting_share, self._compacted)
        if self.engine.segments.draining and self._look_timer is None:
            self._look_timer = self._call_later(LOOK_SECONDS, self._look_again)
        if segment >= 0:
            self._compacting = segment
            self._compacted.add(segment)
            self._store.scan(segment, self._scanned)
        else:
            self._lasting_share = COMPACT_LASTING

    def _look_again(self) -> None:
        self._look_timer = None
        self._after_snapshot()

    def _scanned(self, pieces: list[bytes]) -> None:
        self._rows = pieces
        self._row_at = 0
        self._move()

    def _row_lives(self, rows: bytes, at: i64) -> bool:
        """Whether a row of the index stands for a message that lives there. Those of owners are many."""
        if FIRST_OWNER <= pid_of_row(rows, at) < FIRST_PID:
            return self.engine.exclusive.row_lives(rows, at)
        return self._lives(read_row(rows, at))

    def _lives(self, record: Record) -> bool:
        if record.pid >= FIRST_OWNER:
            if record.pid >= FIRST_PID:
                return self.engine.keeping.lives(record)
            return self.engine.exclusive.lives(record)
        partition = self.engine.partitions.get(int(record.pid))
        return partition is not None and partition.address(record.seq) == record.address

    def _move(self) -> None:
        """Write the living anew, some at a time, and look for the next segment when all are through."""
        if self._closed:
            return
        living: list[Record] = []
        looked: i64 = 0
        while self._rows and looked < LOOK_AT_ONCE and len(living) < COMPACT_AT_ONCE:
            rows = self._rows[0]
            at: i64 = self._row_at
            if at >= len(rows):
                self._rows.pop(0)
                self._row_at = 0
                continue
            end = self.engine.exclusive.bring_near(rows, at)
            while at < end and len(living) < COMPACT_AT_ONCE:
                if self._row_lives(rows, at):
                    living.append(read_row(rows, at))
                at += ROW_BYTES
                looked += 1
            self._row_at = int(at)
        if living or self._rows:
            self.read([int(record.address) for record in living], _MoveDone(self, living))
            return
        self._compacting = -1
        self._after_snapshot()

    def moved(self, living: list[Record], records: list[bytes | None]) -> None:
        if self._closed or self._frozen:
            return
        engine = self.engine
        engine.now = self._clock()
        for record, data in zip(living, records, strict=True):
            if data is not None:
                engine.rewrite(data, record.address)
            elif record.pid < FIRST_PID and self._lives(record):
                if record.pid >= FIRST_OWNER:
                    engine.warnings.append(engine.exclusive.damaged(record, engine.now))
                else:
                    engine.damaged(engine.partitions[int(record.pid)], record.seq)
        self.end_turn()
        self._move()

    # ---- for whoever looks from outside

    def look(self, places: list[tuple[Partition, int]], done: Callable[[list[Message | None]], None]) -> None:
        """The messages at these places, as they are kept; None for what is gone or damaged."""
        _Look(self.engine, places, done).start(self)

    def segment_sizes(self) -> dict[int, int]:
        """Bytes of each segment that the store keeps."""
        return self._store.segment_sizes()

    def when_kept(self, callback: Callable[[], None]) -> None:
        """Call back once everything that the engine has decided so far is kept."""
        if self.engine.journal.waits():
            self._waiting_next.append(callback)
            self._pump()
        elif self._frame is not None:
            self._waiting.append(callback)
        else:
            callback()

    # ---- a frame that takes more than one turn

    def hold(self) -> None:
        """What comes from here on belongs into one frame, over several turns: the open frame is not committed before
        `release`. Whatever else comes meanwhile is in it too."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._pump()

    def break_off(self, fault: BaseException) -> None:
        """Half of what belongs together is in the open frame, and the rest will not come. It must not be kept, and it
        cannot be taken back: the process ends as if it had been killed now, and a restart finds none of it."""
        if self.on_broken is not None:
            self.on_broken(RuntimeError(f"a batch broke off: {fault!r}"))

    def freeze(self) -> None:
        """What is in memory cannot be trusted any more, or not be kept: from here on nothing is written, nothing is
        delivered and nobody is answered."""
        self._frozen = True

    def close(self) -> None:
        """The end: keep what is left, and close the store. Blocking."""
        close_store = self.finish()
        if close_store is not None:
            close_store()

    def finish(self, keep: bool = True) -> Callable[[], None] | None:
        """The end as far as the loop has to do with it. What is left, closing the store, blocks and may be called in
        another thread. Without `keep`, what is not in the store yet is dropped: nobody was told that it is."""
        for timer in (
            self._timer,
            self._settle_timer,
            self._room_timer,
            self._look_timer,
            self._save_timer,
        ):
            if timer is not None:
                timer.cancel()
        self._timer = None
        self._settle_timer = None
        self._room_timer = None
        self._look_timer = None
        self._save_timer = None
        if self._closed:
            return None
        self._closed = True
        if keep and not self._held and not self._frozen:
            frame = self.engine.take_frame()
            if frame.count:
                self._hand_over(frame)
        return self._store.close


class _ReadsDone:
    """All that a turn has asked for is read in one go."""

    def __init__(self, runner: Runner, reads: list[Read]) -> None:
        self._runner = runner
        self._reads = reads

    def __call__(self, records: list[bytes | None]) -> None:
        self._runner.reads_done(self._reads, records)


class _OwnedDone:
    def __init__(self, runner: Runner, reads: list[OwnedRead]) -> None:
        self._runner = runner
        self._reads = reads

    def __call__(self, records: list[bytes | None]) -> None:
        self._runner.owned_done(self._reads, records)


class _MoveDone:
    def __init__(self, runner: Runner, living: list[Record]) -> None:
        self._runner = runner
        self._living = living

    def __call__(self, records: list[bytes | None]) -> None:
        self._runner.moved(self._living, records)


class _Restoring:
    def __init__(self, runner: Runner, done: Callable[[list[Kept]], None]) -> None:
        self._runner = runner
        self._done = done

    def __call__(self) -> None:
        self._runner.read_kept(self._done)


class _Restored:
    def __init__(self, engine: Engine, done: Callable[[list[Kept]], None]) -> None:
        self._engine = engine
        self._done = done

    def __call__(self, records: list[bytes | None]) -> None:
        self._done(self._engine.keeping.restore(records))


class _Look:
    """A read on behalf of somebody outside: what is in the cache needs none."""

    def __init__(
        self,
        engine: Engine,
        places: list[tuple[Partition, int]],
        done: Callable[[list[Message | None]], None],
    ) -> None:
        self._engine = engine
        self._done = done
        self._found: list[Message | None] = []
        self._missing: list[int] = []
        self._addresses: list[int] = []
        for nth, (partition, seq) in enumerate(places):
            message = partition.young.get(seq)
            self._found.append(message)
            address = partition.address(seq)
            if message is None and address != GONE:
                self._missing.append(nth)
                self._addresses.append(int(address))

    def start(self, runner: Runner) -> None:
        if self._missing:
            runner.read(self._addresses, self._read)
        else:
            self._done(self._found)

    def _read(self, records: list[bytes | None]) -> None:
        for nth, data in zip(self._missing, records, strict=True):
            self._found[nth] = None if data is None else self._engine.message_of(data)
        self._done(self._found)

"""The queue engine: commands and the time go in; records, deliveries and acknowledgements come out.

The engine is deterministic and does no I/O. It knows no socket, no file and no MQTT. Its callers
call commands with `now` set. The commit loop closes the frame, commits it to the store and reports
the commit to the parts that wait for it, carries out effects, and calls `tick` when `wake_at` is
due.

    publish ─▶ frame_builder ─▶ frame … store … on_frame_committed ─▶ notifications of publishers,
               and dispatch ─▶ Consumer.deliver
    settle  ─▶ cursor ─▶ frame_builder (a note); dispatch to the consumer at the end of the turn
    fail    ─▶ a retry (a note, and an entry in the timer heap), or dead_letters

`Engine` wires the parts; what follows the time and the frames are its methods, and commands are the
methods of its parts. Each part owns its state and names the parts it needs in its constructor; none
knows the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from librt.strings import read_i32_le
from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.bodies import BodyCache, BodyReads, decode_message
from sluice.queues.bulk import BatchWriting, BulkProgress, Redrive
from sluice.queues.compacted import ExclusiveQueues, OwnerRead
from sluice.queues.flow import (
    Appender,
    DeadLetters,
    DeliveryControl,
    DeliveryTokens,
    Dispatch,
    DispatchSchedule,
    IdSearches,
    KeyCompaction,
    KeyHolds,
    LeaseLookup,
    Lifecycle,
    MessageCommands,
    PendingDeadLetters,
    Publishing,
    Removal,
    Retention,
    Settlement,
    Timers,
)
from sluice.queues.log import (
    FIRST_OWNER_PID,
    FIRST_STATE_PID,
    BrokerState,
    FrameBuilder,
    NoteWriter,
    SegmentUsage,
    notes,
)
from sluice.queues.model import (
    BodyRead,
    Effects,
    EngineState,
    Group,
    Partition,
    Queue,
    QueueRules,
    RowBudget,
)
from sluice.queues.ports import Codec
from sluice.queues.schedules import Schedules
from sluice.store.protocol import PID_OFFSET, decode_record


class Engine:
    """All queues of one store.

    `rules_for` returns the rules and the configuration of a queue that is created from a template.
    `draw` returns a random number in [0, 1). `read_content_type` finds the content type
    among the properties of a message, or returns the empty string. `ack_rows` bounds how many
    acknowledgements are remembered.
    """

    def __init__(
        self,
        rules_for: Callable[[str], tuple[QueueRules, str]],
        draw: Callable[[], float],
        cache_bytes: int = 16_777_216,
        codec: Codec | None = None,
        read_content_type: Callable[[bytes], str] | None = None,
        ack_rows: RowBudget | None = None,
    ) -> None:
        state = EngineState()
        self.state: EngineState = state
        self.queues: dict[str, Queue] = state.queues
        self.partitions: dict[int, Partition] = state.partitions
        self.groups: dict[int, Group] = state.groups
        self.frame_builder: FrameBuilder = state.frame_builder
        self.segment_usage: SegmentUsage = state.segment_usage
        self.codec: Codec = codec if codec is not None else Codec()
        self._draw = draw
        self.wake_at: float = 0.0  # when `tick` is due after this turn; 0.0: never

        # Values and state that have their own records.
        self.broker_state: BrokerState = BrokerState(self.frame_builder, self.segment_usage)
        self.exclusive: ExclusiveQueues = ExclusiveQueues(self.frame_builder, self.segment_usage)

        # Bodies, tokens, and work for later.
        self.tokens: DeliveryTokens = DeliveryTokens()
        self.body_cache: BodyCache = BodyCache(cache_bytes)
        body_reads = BodyReads(state.effects, self.body_cache)
        self.timers: Timers = Timers(state)
        dispatch_schedule = DispatchSchedule(state, self.timers, self.body_cache)
        self.dispatch_schedule: DispatchSchedule = dispatch_schedule
        self.delivery_control: DeliveryControl = DeliveryControl(
            state, dispatch_schedule, self.timers
        )

        self.key_holds: KeyHolds = KeyHolds(state, dispatch_schedule, self.timers)

        # Parts that store and remove messages.
        self.removal: Removal = Removal(state, dispatch_schedule, self.timers, self.body_cache)
        self.appender: Appender = Appender(state, self.timers, self.body_cache, self.codec)
        self.key_compaction: KeyCompaction = KeyCompaction(
            state, dispatch_schedule, self.removal, self.appender
        )
        self.lifecycle: Lifecycle = Lifecycle(
            state, dispatch_schedule, self.timers, self.removal, self.body_cache, rules_for
        )
        self.dead_letters: DeadLetters = DeadLetters(
            state,
            self.lifecycle,
            self.key_compaction,
            self.appender,
            read_content_type or _no_content_type,
        )
        self.retention: Retention = Retention(
            state, self.timers, self.removal, self.dead_letters, body_reads
        )
        self.publishing: Publishing = Publishing(
            state, self.appender, self.key_compaction, self.removal, self.dead_letters
        )

        self.schedules: Schedules = Schedules(state, self.publishing, self.lifecycle)

        # Parts that deliver messages and end deliveries.
        self.settlement: Settlement = Settlement(
            state,
            dispatch_schedule,
            self.timers,
            self.delivery_control,
            self.removal,
            self.retention,
            self.dead_letters,
            body_reads,
            self.tokens,
            draw,
            ack_rows if ack_rows is not None else RowBudget(),
            self.key_holds,
        )
        self.commands: MessageCommands = MessageCommands(
            state, dispatch_schedule, self.timers, self.removal, self.appender, self.settlement
        )
        self.id_searches: IdSearches = IdSearches(state.effects, self.codec)
        self.lease_lookup: LeaseLookup = LeaseLookup(
            state,
            dispatch_schedule,
            self.timers,
            self.removal,
            self.settlement,
            self.tokens,
            self.body_cache,
        )
        self.dispatch: Dispatch = Dispatch(
            state,
            dispatch_schedule,
            self.timers,
            self.removal,
            self.retention,
            self.settlement,
            self.delivery_control,
            self.tokens,
            self.body_cache,
            body_reads,
            self.codec,
        )

        self.pending_dead_letters: PendingDeadLetters = PendingDeadLetters(state)

        # Operations on many messages.
        self.bulk_progress: BulkProgress = BulkProgress(state, self.removal)
        self.batches: BatchWriting = BatchWriting(
            state, self.appender, self.key_compaction, self.dead_letters, self.publishing
        )
        self.redrive: Redrive = Redrive(
            state, self.removal, self.appender, self.key_compaction, self.key_holds
        )

    @property
    def now(self) -> float:
        """The time of the current turn, set by the caller."""
        return self.state.now

    @now.setter
    def now(self, now: float) -> None:
        self.state.now = now

    # ---- turns, frames and effects

    def begin_tokens(self, secret: bytes, run: i64) -> None:
        """Start the delivery tokens of this run. `secret` is stored if the store has none yet.

        The counters start with the time and grow by one for each delivery, so they are above those
        of every earlier run, unless the clock was set back. For that case, runs have random
        numbers.
        """
        random_fraction = self._draw()  # two starts may happen in the same millisecond
        first: i64 = (self.state.now_ms() << 20) + i64(int(random_fraction * 1_048_576.0))
        if self.tokens.secret:
            secret = self.tokens.secret
        else:
            note = NoteWriter(notes.TOKEN_SECRET)
            note.write_bytes(secret)
            # Without the secret, tokens that clients hold cannot be verified.
            self.frame_builder.add_note(note, self.state.now_ms(), True)
        self.tokens.start_run(secret, run, first)

    def end_turn(self) -> Effects:
        """Dispatch to the scheduled consumers; return what the caller has to do."""
        if self.dispatch_schedule.has_work():
            self.dispatch.end_turn()
        if self.exclusive.scheduled_subscribers:
            self.exclusive.dispatch_scheduled(self.state.now)
        self.pending_dead_letters.end_turn()
        self.wake_at = self.next_wakeup_at()
        return self.state.effects.take()

    def on_read_done(self, read: BodyRead, records: list[bytes | None]) -> None:
        if read.search is not None:
            self.id_searches.on_read_done(read.search, read, records)
        else:
            self.dispatch.on_read_done(read, records)

    def on_owner_read_done(self, read: OwnerRead, records: list[bytes | None]) -> None:
        for warning in self.exclusive.on_read_done(read, records, self.state.now, self.codec):
            self.state.warn(warning)

    # ---- records

    def decode_message(self, data: bytes) -> Message | None:
        return decode_message(data, self.codec)

    def rewrite_record(self, data: bytes, address: i64) -> bool:
        """Copy a record that is live at `address` into the open frame, so its segment can go."""
        pid: i64 = i64(read_i32_le(data, PID_OFFSET)) & 0xFFFF_FFFF
        if FIRST_OWNER_PID <= pid < FIRST_STATE_PID:
            return self.exclusive.rewrite_record(pid, data, address)
        record = decode_record(data, 0, len(data), address)
        if pid >= FIRST_STATE_PID:
            return self.broker_state.rewrite_record(record)
        partition = self.partitions.get(int(record.pid))
        if partition is None or partition.address(record.seq) != address:
            return False
        new_address = self.frame_builder.copy_message(partition, data)
        partition.set_address(record.seq, new_address)
        self.segment_usage.drop(address, record.size)
        self.segment_usage.add(new_address, record.size)
        return True

    # ---- time

    def tick(self, now: float) -> None:
        """Run the timers that are due."""
        self.state.now = now
        self._run_due_timers()
        self.schedules.run_due()
        if self.exclusive.sweep_due_at and self.exclusive.sweep_due_at <= now:
            self.exclusive.apply_retention(now)

    def _run_due_timers(self) -> None:
        timers = self.timers
        queue = timers.pop_deadline()
        while queue is not None:
            self.settlement.expire_leases(queue)
            queue = timers.pop_deadline()
        lease = timers.pop_retry()
        while lease is not None:
            self.settlement.on_retry_due(lease)
            lease = timers.pop_retry()
        delayed = timers.pop_delayed()
        while delayed is not None:
            self.dispatch.on_delay_over(delayed[0], delayed[1])
            delayed = timers.pop_delayed()
        partition = timers.pop_expiry()
        while partition is not None:
            self.retention.sweep_expired(partition)
            partition = timers.pop_expiry()
        partition = timers.pop_retention()
        while partition is not None:
            self.retention.sweep_retention(partition)
            partition = timers.pop_retention()
        group = timers.pop_partition_move()
        while group is not None:
            self.dispatch_schedule.add_group(group)
            group = timers.pop_partition_move()
        group = timers.pop_admission()
        while group is not None:
            self.dispatch_schedule.update_admission(group)
            group = timers.pop_admission()
        held = timers.pop_held_key()
        while held is not None:
            self.key_holds.release(held)
            held = timers.pop_held_key()

    def next_wakeup_at(self) -> float:
        """Return the time of the next wake-up, 0.0 for none."""
        first = self.timers.next_due()
        due = self.exclusive.sweep_due_at
        if due and (first == 0.0 or due < first):
            first = due
        due = self.schedules.next_due()
        return due if due and (first == 0.0 or due < first) else first


def _no_content_type(properties: bytes) -> str:
    return ""

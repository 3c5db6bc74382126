"""The queue engine: commands and the time go in; records, deliveries and acknowledgements come out.

The engine is deterministic and does no I/O. It knows no socket, no file and no MQTT. Its caller
(`commit_loop`, a test, the simulator) does four things: call commands with `now` set, commit
closed frames to the store and report their commit, carry out effects, and call `tick` when a timer
is due.

    publish ─▶ frame_builder ─▶ take_frame … store … on_frame_committed ─▶ notifications
               of publishers, and dispatch ─▶ Consumer.deliver
    settle  ─▶ cursor ─▶ frame_builder (a note); dispatch to the consumer at the end of the turn
    fail    ─▶ a retry (a note, and an entry in the timer heap), or dead_letters

`Engine` wires the parts, and its methods are the commands of the broker. Each part owns its state
and names the parts it needs in its constructor; none knows the engine. Recovery, snapshots and
administration use the parts that they need directly.
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
    DeliveryToken,
    DeliveryTokens,
    Dispatch,
    DispatchSchedule,
    IdSearches,
    KeyCompaction,
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
    Frame,
    FrameBuilder,
    NoteWriter,
    SegmentUsage,
    notes,
)
from sluice.queues.model import (
    BodyRead,
    Consumer,
    Effects,
    EngineState,
    Group,
    Lease,
    Partition,
    Queue,
    QueueRules,
    RowBudget,
)
from sluice.queues.ports import Codec, Publisher
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

        # Values and state that have their own records.
        self.broker_state: BrokerState = BrokerState(self.frame_builder, self.segment_usage)
        self.exclusive: ExclusiveQueues = ExclusiveQueues(self.frame_builder, self.segment_usage)

        # Bodies, tokens, and work for later.
        self.tokens: DeliveryTokens = DeliveryTokens()
        self.body_cache: BodyCache = BodyCache(cache_bytes)
        body_reads = BodyReads(state.effects, self.body_cache)
        self.timers: Timers = Timers(state)
        schedule = DispatchSchedule(state, self.timers, self.body_cache)
        self._schedule: DispatchSchedule = schedule
        self.control: DeliveryControl = DeliveryControl(state, schedule, self.timers)

        # Parts that store and remove messages.
        self.removal: Removal = Removal(state, schedule, self.timers, self.body_cache)
        self._appender: Appender = Appender(state, self.timers, self.body_cache, self.codec)
        self.compaction: KeyCompaction = KeyCompaction(
            state, schedule, self.removal, self._appender
        )
        self.lifecycle: Lifecycle = Lifecycle(
            state, schedule, self.timers, self.removal, self.body_cache, rules_for
        )
        self.dead_letters: DeadLetters = DeadLetters(
            state, self.lifecycle, self.compaction, read_content_type or _no_content_type
        )
        self.retention: Retention = Retention(
            state, self.timers, self.removal, self.dead_letters, body_reads
        )
        self.publishing: Publishing = Publishing(
            state, self._appender, self.compaction, self.removal, self.dead_letters
        )

        self.schedules: Schedules = Schedules(state, self.publishing, self.lifecycle)

        # Parts that deliver messages and end deliveries.
        self.settlement: Settlement = Settlement(
            state,
            schedule,
            self.timers,
            self.control,
            self.removal,
            self.retention,
            self.dead_letters,
            body_reads,
            self.tokens,
            draw,
            ack_rows if ack_rows is not None else RowBudget(),
        )
        self.commands: MessageCommands = MessageCommands(
            state, schedule, self.timers, self.removal, self._appender, self.settlement
        )
        self.id_searches: IdSearches = IdSearches(state.effects, self.codec)
        self._lease_lookup: LeaseLookup = LeaseLookup(
            state,
            schedule,
            self.timers,
            self.removal,
            self.settlement,
            self.tokens,
            self.body_cache,
        )
        self.dispatch: Dispatch = Dispatch(
            state,
            schedule,
            self.timers,
            self.removal,
            self.retention,
            self.settlement,
            self.control,
            self.tokens,
            self.body_cache,
            body_reads,
            self.codec,
        )

        self._pending_dead_letters: PendingDeadLetters = PendingDeadLetters(state)

        # Operations on many messages.
        self.bulk_progress: BulkProgress = BulkProgress(state, self.removal)
        self.batches: BatchWriting = BatchWriting(
            state, self.compaction, self.dead_letters, self.publishing
        )
        self.redrive: Redrive = Redrive(state, self.removal, self._appender, self.compaction)

    @property
    def now(self) -> float:
        """The time of the current turn, set by the caller."""
        return self.state.now

    @now.setter
    def now(self, now: float) -> None:
        self.state.now = now

    # ---- queues and groups

    def create_queue(self, rules: QueueRules, config: str) -> Queue:
        return self.lifecycle.create_queue(rules, config)

    def reconfigure_queue(self, queue: Queue, rules: QueueRules, config: str) -> None:
        self.lifecycle.reconfigure_queue(queue, rules, config)

    def delete_queue(self, queue: Queue) -> None:
        self.lifecycle.delete_queue(queue)

    def get_or_create_queue(self, name: str) -> Queue:
        return self.lifecycle.get_or_create_queue(name)

    def get_queue(self, name: str) -> Queue:
        return self.lifecycle.get_queue(name)

    def get_or_create_group(
        self, queue: Queue, name: str, start_sequences: list[int] | None = None
    ) -> Group:
        return self.lifecycle.get_or_create_group(queue, name, start_sequences)

    def check_group_limit(self, group_name: str, partition_count: int) -> None:
        """Refuse a new group with so many partitions if all groups together have too many."""
        self.lifecycle.check_group_limit(group_name, partition_count)

    def delete_group(self, group: Group) -> None:
        self.lifecycle.delete_group(group)

    def seek_group(self, group: Group, start_sequences: list[int]) -> None:
        self.lifecycle.seek_group(group, start_sequences)

    def purge_queue(self, queue: Queue) -> int:
        """Remove all messages without a lease; return their number."""
        return self.removal.purge_queue(queue)

    def remove_for_all_groups(self, partition: Partition, seq: i64, outcome: i64) -> bool:
        """Settle a message for groups without a lease of it; return whether it is deleted."""
        return self.removal.remove_for_all_groups(partition, seq, outcome)

    # ---- publishing

    def publish(
        self, queue: Queue, message: Message, publisher: Publisher | None, tag: i64
    ) -> None:
        """Add a message to the open frame; the publisher is notified of its commit."""
        self.publishing.publish(queue, message, publisher, tag)

    def check_store_available(self) -> None:
        """Raise an error while the store accepts no new records."""
        self.publishing.check_store_available()

    # ---- consumers

    def join(self, queue: Queue, group: Group, consumer: Consumer) -> None:
        self.dispatch.join(group, consumer)

    def leave(self, consumer: Consumer) -> None:
        self.dispatch.leave(consumer)

    def pause(self, consumer: Consumer) -> None:
        self.dispatch.set_paused(consumer, True)

    def resume(self, consumer: Consumer) -> None:
        self.dispatch.set_paused(consumer, False)

    def set_identity(self, consumer: Consumer, identity: str) -> None:
        self.dispatch.set_identity(consumer, identity)

    def set_prefetch(self, consumer: Consumer, prefetch: i64) -> None:
        self.dispatch.set_prefetch(consumer, prefetch)

    def schedule_dispatch(self, consumer: Consumer) -> None:
        """Dispatch to a consumer that may have capacity again, at the end of the turn."""
        self._schedule.add(consumer)

    # ---- settling

    def find_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease:
        """Return the lease that a client wants to settle, if the client may still settle it."""
        return self._lease_lookup.find_lease(group, message_id, token, identity)

    def ack(self, lease: Lease) -> None:
        """Settle a delivery as done, also after its deadline."""
        self.settlement.ack(lease)

    def nack(self, lease: Lease, delay: float, description: str) -> None:
        """Record a failure: retry after `delay` seconds, or after the backoff if negative."""
        self.settlement.nack(lease, delay, description)

    def release(self, lease: Lease) -> None:
        """Return a delivery unused: not a failure."""
        self.settlement.release(lease)

    def extend(self, lease: Lease) -> None:
        """Restart the deadline of a delivery that is still being processed."""
        self.settlement.extend(lease)

    def dead_letter(self, lease: Lease, reason: str, description: str) -> None:
        """Move a message to the dead-letter queue, in the same frame as its settlement here."""
        self.settlement.dead_letter(lease, reason, description, True)

    def add_settlement_waiter(self, publisher: Publisher, tag: i64, leases: list[Lease]) -> None:
        """Notify `publisher` of the commit after the dead letters of `leases` are written."""
        self._pending_dead_letters.add_waiter(publisher, tag, leases)

    def ack_late(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> bool:
        """Acknowledge a delivery whose lease is unknown; return whether that counts."""
        return self._lease_lookup.ack_late(group, message_id, token, identity)

    def reclaim_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease | None:
        """Recreate the lease of a delivery that is no longer known, so that it can be settled."""
        return self._lease_lookup.reclaim_lease(group, message_id, token, identity)

    def is_from_previous_run(self, group: Group, message_id: bytes) -> bool:
        """Return whether the message is unsettled and a previous run may have delivered it."""
        return self._lease_lookup.is_from_previous_run(group, message_id)

    def is_token_forged(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str, is_known: bool
    ) -> bool:
        """Return whether `token` was never issued to `identity` for this unsettled message."""
        return self._lease_lookup.is_token_forged(group, message_id, token, identity, is_known)

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
            self.state.add_note(note, True)
        self.tokens.start_run(secret, run, first)

    def end_turn(self) -> Effects:
        """Dispatch to consumers that settled something; return what the caller has to do."""
        self._dispatch_scheduled()
        self._pending_dead_letters.end_turn()
        return self.state.effects.take()

    def _dispatch_scheduled(self) -> None:
        if self._schedule.has_work():
            self.dispatch.end_turn()
        if self.exclusive.scheduled_subscribers:
            self.exclusive.dispatch_scheduled(self.state.now)

    def take_frame(self) -> Frame:
        """Close the open frame. Call `frame_builder.begin_frame` next, before any other command."""
        frame = self.frame_builder.close(self.state.now_ms())
        self._appender.on_frame_closed()
        self.exclusive.on_frame_closed()
        return frame

    def on_frame_committed(self, frame: Frame) -> None:
        """Acknowledge the frame's messages to publishers and deliver them to consumers."""
        self.publishing.on_frame_committed(frame)
        self.dispatch.on_frame_committed(frame)
        self.exclusive.on_frame_committed(self.frame_builder.base_address(), self.state.now)

    def on_read_done(self, read: BodyRead, records: list[bytes | None]) -> None:
        if read.search is not None:
            self.id_searches.on_read_done(read.search, read, records)
        else:
            self.dispatch.on_read_done(read, records)

    def on_owner_read_done(self, read: OwnerRead, records: list[bytes | None]) -> None:
        for warning in self.exclusive.on_read_done(read, records, self.state.now, self.codec):
            self.warn(warning)

    def warn(self, text: str) -> None:
        """Report a problem to the log of the caller, when the turn ends."""
        self.state.warn(text)

    # ---- records

    def decode_message(self, data: bytes) -> Message | None:
        return decode_message(data, self.codec)

    def drop_damaged(self, partition: Partition, seq: i64) -> None:
        """Remove a message whose record the store cannot read."""
        self.removal.drop_damaged(partition, seq)

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

    def tick(self, now: float) -> float:
        """Run the timers that are due. Return the time of the next call, 0.0 for none."""
        self.state.now = now
        self._run_due_timers()
        self.schedules.run_due()
        if self.exclusive.sweep_due_at and self.exclusive.sweep_due_at <= now:
            self.exclusive.apply_retention(now)
        self._dispatch_scheduled()
        return self.next_wakeup_at()

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
            self.dispatch.release_delayed(delayed[0], delayed[1])
            delayed = timers.pop_delayed()
        partition = timers.pop_expiry()
        while partition is not None:
            self.retention.sweep_expired(partition)
            partition = timers.pop_expiry()
        partition = timers.pop_retention()
        while partition is not None:
            self.retention.sweep_retained(partition)
            partition = timers.pop_retention()
        group = timers.pop_handover()
        while group is not None:
            self._schedule.add_group(group)
            group = timers.pop_handover()
        group = timers.pop_admission()
        while group is not None:
            self._schedule.update_admission(group)
            group = timers.pop_admission()

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

"""One queue: its rules, partitions, groups, counters, and the message ids of the dedup window."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.metrics import Histogram
from sluice.placement import fnv1a32
from sluice.queues.log import NoteReader, NoteWriter
from sluice.queues.model.admission import NOT_PAUSED, Pause
from sluice.queues.model.containers.last_values import LastValues
from sluice.queues.model.containers.recent_acks import RecentAcks
from sluice.queues.model.cursor import SEQUENCE_BITS, SEQUENCE_MASK
from sluice.queues.model.delivery_lease import DeadlineList
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import STRICT, QueueRules

# Shared by all work queues; never modified.
NO_LAST_VALUES: Final = LastValues()
NO_IDS: Final[dict[bytes, int]] = {}
MIN_CHECKED_IDS: Final = 1024  # fewer ids of delayed messages are not worth a check


class PartitionGate:
    """The end of each old partition when the partition count was raised.

    Messages published after the gate wait, per key, until the partition that had the key before is
    settled up to its boundary.
    """

    def __init__(self, boundary_seqs: list[int]) -> None:
        self.boundary_seqs: list[int] = boundary_seqs


class Queue:
    def __init__(self, qid: i64, rules: QueueRules) -> None:
        self.qid: i64 = qid
        self.name: str = rules.name
        self.rules: QueueRules = rules
        self.config_json: str = ""  # the configuration as JSON
        self.is_deleted: bool = False  # holders of a reference must look up the name again
        self.partitions: list[Partition] = []
        self.groups: dict[str, Group] = {}
        # Oldest first; removed when no message from before them is stored.
        self.partition_gates: list[PartitionGate] = []
        # Of a compacted queue: the location of each key's last message.
        self.last_values: LastValues = LastValues() if rules.is_compacted else NO_LAST_VALUES
        self.deadlines: DeadlineList = DeadlineList()
        self.recent_acks: RecentAcks | None = None  # created with the first acknowledgement
        # When the engine checks the deadlines next; 0.0: not scheduled.
        self.deadline_check_at: float = 0.0
        self.pause: Pause = NOT_PAUSED  # changed by `set_pause`
        self.consumer_count: i64 = 0  # of all groups
        # Counted by `Partition`: messages that a group has still to settle, bytes of all stored
        # messages, and messages since the queue was created.
        self.depth: i64 = 0
        self.bytes: i64 = 0
        self.enqueued: i64 = 0
        self.created_at: float = 0.0
        self.duplicates: i64 = 0
        self.refused: i64 = 0
        self.retried: i64 = 0
        # Counted by groups that were deleted since, so that the sums of the queue do not fall.
        self.past_delivered: i64 = 0
        self.past_redelivered: i64 = 0
        self.past_nacked: i64 = 0
        self.past_acked: i64 = 0
        self.dead_by_reason: dict[str, int] = {}
        self.delivery_latency: Histogram = Histogram()
        self.process_latency: Histogram = Histogram()
        # Where messages with a delay and an id of their publisher are: pid and sequence. Entries of
        # deleted messages are dropped from time to time.
        self.delayed_ids: dict[bytes, int] = NO_IDS
        self._delayed_ids_checked: int = 0  # how many were left after the last check
        self.strategy_fault: str = ""  # of the partition strategy, until it is reported
        self.strategy_reported_at: float = 0.0
        self._round_robin: i64 = 0
        self._ids: dict[bytes, float] = {}
        self._older_ids: dict[bytes, float] = {}
        self._ids_since: float = 0.0

    def key_hash(self, key: bytes) -> i64:
        """Return the hash that decides partition and order, or 0. Strict queues have one key."""
        if self.rules.ordering == STRICT:
            return 1
        if not key:
            return 0
        return fnv1a32(key) or 1

    def choose_partition(self, key: bytes, key_hash: i64) -> Partition:
        """Return the partition of a key; without a key, the next one in turn."""
        count: i64 = len(self.partitions)
        if key_hash:
            if self.rules.choose_partition is not None:
                return self.partitions[self._ask_strategy(key, key_hash)]
            return self.partitions[key_hash % count]
        self._round_robin += 1
        return self.partitions[self._round_robin % count]

    def _ask_strategy(self, key: bytes, key_hash: i64) -> int:
        """Return the partition that the plug-in chooses.

        If it fails, the hash decides: a message that is dead-lettered here cannot be refused.
        """
        count = len(self.partitions)
        choose = self.rules.choose_partition
        if choose is not None and count > 1:
            try:
                number = choose(key, count)
                if 0 <= number < count:
                    return number
                self.strategy_fault = f"it returned {number} for {count} partitions"
            except Exception as error:  # of the plug-in: it must not end the broker
                self.strategy_fault = f"{type(error).__name__}: {error}"
        return int(key_hash % i64(count))

    # ---- changes

    def set_rules(self, rules: QueueRules, config: str) -> None:
        """Set new rules. Messages stored for their retention alone do not count in the depth."""
        starts_retention = self.rules.retention <= 0.0 < rules.retention
        self.rules = rules
        self.config_json = config
        for partition in self.partitions:
            partition.retention_check_at = 0.0
            if starts_retention:
                partition.uncount_without_groups(partition.next_seq)

    def set_pause(self, pause: Pause) -> None:
        """Pause or resume all groups; `Group.update_admission` is next."""
        self.pause = pause
        for group in self.groups.values():
            group.admission.queue_pause = pause

    def mark_deleted(self) -> None:
        """Mark the queue as deleted, with all its groups and messages."""
        self.groups = {}
        self.depth = 0
        self.is_deleted = True
        if self.recent_acks is not None:
            self.recent_acks.release()

    def drop_passed_gates(self) -> None:
        """Remove the gates before which no message is stored."""
        while self.partition_gates:
            for number, boundary_seq in enumerate(self.partition_gates[0].boundary_seqs):
                if self.partitions[number].first_live(0) < boundary_seq:
                    return
            self.partition_gates.pop(0)

    def keep_counters(self, group: Group) -> None:
        """Add the counters of a group that is deleted to those of the queue."""
        self.past_delivered += group.delivered
        self.past_redelivered += group.redelivered
        self.past_nacked += group.nacked
        self.past_acked += group.count_acked()

    def count_dead(self, reason: str) -> None:
        self.dead_by_reason[reason] = self.dead_by_reason.get(reason, 0) + 1

    # ---- ids of the dedup window, in two generations: the older one is dropped as a whole

    def is_duplicate(self, message_id: bytes, now: float) -> bool:
        window = self.rules.dedup_window
        stored_at = self._ids.get(message_id, -1.0)
        if stored_at < 0.0 and self._older_ids:
            stored_at = self._older_ids.get(message_id, -1.0)
        return stored_at >= 0.0 and now - stored_at < window

    def remember_id(self, message_id: bytes, now: float) -> None:
        window = self.rules.dedup_window
        if window <= 0.0:
            return
        if now - self._ids_since >= window:
            self._older_ids = self._ids if now - self._ids_since < 2.0 * window else {}
            self._ids = {}
            self._ids_since = now
        self._ids[message_id] = now

    # ---- ids of delayed messages

    def index_delayed(self, message_id: bytes, partition: Partition, seq: i64) -> None:
        """Remember where a delayed message is, so that a command can name it by its id."""
        if self.delayed_ids is NO_IDS:
            self.delayed_ids = {}
        if len(self.delayed_ids) > 2 * self._delayed_ids_checked + MIN_CHECKED_IDS:
            self._drop_deleted_ids()
        self.delayed_ids[message_id] = (int(partition.pid) << SEQUENCE_BITS) | int(seq)

    def _drop_deleted_ids(self) -> None:
        by_pid = {int(partition.pid): partition for partition in self.partitions}
        self.delayed_ids = {
            message_id: location
            for message_id, location in self.delayed_ids.items()
            if by_pid[location >> SEQUENCE_BITS].holds(location & SEQUENCE_MASK)
        }
        self._delayed_ids_checked = len(self.delayed_ids)

    def write_delayed_ids(self, out: NoteWriter) -> None:
        self._drop_deleted_ids()
        out.write_int(len(self.delayed_ids))
        for message_id, location in self.delayed_ids.items():
            out.write_bytes(message_id)
            out.write_int(location)

    def load_delayed_ids(self, note: NoteReader) -> None:
        """Load the ids, after the partitions; raise ValueError for one of another queue."""
        count = note.read_int()
        if count:
            self.delayed_ids = {}
        pids = [int(partition.pid) for partition in self.partitions] if count else []
        for _ in range(count):
            message_id = note.read_bytes()
            location = int(note.read_int())
            if location >> SEQUENCE_BITS not in pids:
                raise ValueError(f"{message_id!r} is in a partition of another queue")
            self.delayed_ids[message_id] = location

    def id_stored_at(self, message_id: bytes) -> float:
        """Return when a message with this id was last stored, or 0.0 if that is unknown."""
        return self._ids.get(message_id, 0.0) or self._older_ids.get(message_id, 0.0)

    def recent_ids(self, now: float) -> list[tuple[bytes, float]]:
        """Return the ids that a snapshot stores so that the window survives a restart."""
        window = self.rules.dedup_window
        found = [(key, at) for key, at in self._older_ids.items() if now - at < window]
        found.extend((key, at) for key, at in self._ids.items() if now - at < window)
        return found

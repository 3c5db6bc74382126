"""Inspection of one consumer group: its view, its counters, and what holds its messages back.

Read-only, and for display: values leave this module, no group, cursor or lease does.
"""

from __future__ import annotations

from typing import Final

from sluice.queues.engine import Engine
from sluice.queues.log import CANCELLED, DEAD, EXPIRED, PURGED
from sluice.queues.model import (
    ANY_ORDER,
    BACKOFF,
    BREAKER_NAMES,
    CLOSED,
    DEAD_LETTERING,
    LEASED,
    READY,
    STRICT,
    Consumer,
    Cursor,
    Group,
    HeldKey,
    Lease,
    Pause,
    QueueRules,
    build_ledger,
    history,
    verify_group,
)
from sluice.queues.service import stored_messages, views
from sluice.queues.service.message_events import show_event
from sluice.queues.service.stored_messages import MessageLocation

MAX_EXAMINED_MESSAGES: Final = 1000  # stored messages of a partition that a search examines
MAX_SHOWN_KEYS: Final = 100  # held keys in the view of a group

_PHASES: Final[dict[int, views.Phase]] = {
    LEASED: "delivered",
    BACKOFF: "backoff",
    READY: "due",
    DEAD_LETTERING: "dead-lettering",
}


class GroupInspector:
    """Read-only access to one group."""

    def __init__(self, engine: Engine, group: Group) -> None:
        self._engine: Engine = engine
        self._group: Group = group
        self.name: str = group.name
        self.gid: int = int(group.gid)
        self.queue: str = group.queue.name
        self.rules: QueueRules = group.queue.rules

    def is_current(self) -> bool:
        """Return whether the group exists; it may have been deleted since this was made."""
        return self._group.queue.groups.get(self.name) is self._group

    def is_ordered(self) -> bool:
        return self.rules.ordering != ANY_ORDER

    def is_strict(self) -> bool:
        return self.rules.ordering == STRICT

    def count_partitions(self) -> int:
        return len(self._group.cursors)

    # ---- what APIs show

    def view(self) -> views.Group:
        group = self._group
        ledger = self._ledger()
        oldest = 0
        for cursor in group.cursors:
            partition = cursor.partition
            seq = partition.first_live(cursor.low_watermark)
            if seq < partition.next_seq:
                time = int(partition.arrival_ms(seq))
                if oldest == 0 or time < oldest:
                    oldest = time
        return views.Group(
            name=self.name,
            lag=ledger.lag(),
            ledger=ledger,
            floors=[int(cursor.low_watermark) for cursor in group.cursors],
            oldest_at=oldest / 1000.0,
            redelivered=int(group.redelivered),
            nacked=int(group.nacked),
            pause=show_pause(group.admission.pause),
            breaker=BREAKER_NAMES[group.admission.breaker.state],
            held_by=[
                *group.admission.closed_reasons(self.rules, group.in_flight),
                *group.admission.keys.limits_reached(),
            ],
            held_keys=self.held_keys(),
            consumers=[self._consumer_view(member) for member in self.members()],
        )

    def _ledger(self) -> views.Ledger:
        ledger = build_ledger(self._group.queue, self._group)
        return views.Ledger(
            enqueued=ledger.enqueued,
            waiting=ledger.waiting,
            delivered=ledger.delivered,
            retrying=ledger.retrying,
            acked=ledger.acked,
            dead=ledger.dead,
            expired=ledger.expired,
            purged=ledger.purged,
            cancelled=ledger.cancelled,
        )

    def _consumer_view(self, member: views.Member) -> views.Consumer:
        connection = member.connection
        last_read_at = 0.0 if connection is None else connection.last_read_at
        return views.Consumer(
            client=member.client,
            group=self.name,
            partitions=list(member.partitions),
            inflight=member.in_flight,
            prefetch=member.prefetch,
            priority=member.priority,
            exclusive=member.is_exclusive,
            connected=member.is_connected,
            stalled=member.is_stalled,
            slow=connection is not None and connection.is_slow,
            settled_at=member.settled_at,
            last_heartbeat=max(member.active_at, last_read_at, member.settled_at),
        )

    def metrics(self) -> views.GroupMetrics:
        group = self._group
        ledger = self._ledger()
        delayed = int(group.count_delayed())
        # Consumers that could hold all deliverable messages; with an order, one per partition.
        wanted = -(-(ledger.waiting - delayed + ledger.delivered) // max(1, self.rules.prefetch))
        if self.is_ordered():
            wanted = min(wanted, self.count_partitions())
        return views.GroupMetrics(
            name=self.name,
            consumers=len(group.consumers),
            ledger=ledger,
            delayed=delayed,
            workers_wanted=int(wanted),
            oldest_at=int(group.oldest_due_ms()) / 1000.0,
            is_paused=group.admission.pause.is_active() or group.queue.pause.is_active(),
            is_breaker_open=group.admission.breaker.state != CLOSED,
            is_limited=group.admission.is_limited(self.rules, group.in_flight),
            held_keys=len(group.held_keys),
            limited_keys=group.admission.keys.count_held_keys(),
        )

    def verify(self) -> list[str]:
        """Return the inconsistencies of the counters of the group."""
        return verify_group(self._group)

    # ---- keys that are held for repair

    def held_keys(self) -> list[views.HeldKey]:
        """Return the keys of which nothing is delivered, those first that are held for longest."""
        held = sorted(self._group.held_keys.values(), key=_held_at)
        return [self._show_held_key(one) for one in held[:MAX_SHOWN_KEYS]]

    def held_key_of(self, location: MessageLocation) -> views.HeldKey | None:
        """Return the held key for which a message waits."""
        key_hash = int(self._cursor_of(location).key_hash_of(location[1]))
        held = self._group.held_keys.get(key_hash)
        if held is None or (int(location[0].pid), location[1]) in held.repaired:
            return None
        return self._show_held_key(held)

    def _show_held_key(self, held: HeldKey) -> views.HeldKey:
        return views.HeldKey(
            key=held.key.decode("utf-8", "replace"),
            message_id=held.message_id.decode("utf-8", "replace"),
            held_at=held.held_at,
            releases_at=held.release_at(self.rules.hold_timeout),
            dead_letters=len(held.dead_letters),
            repaired=len(held.repaired),
            waiting=sum(int(cursor.count_held(held.key_hash)) for cursor in self._group.cursors),
        )

    # ---- counters

    def lag(self) -> int:
        return self.waiting() + sum(len(cursor.leases) for cursor in self._group.cursors)

    def waiting(self) -> int:
        """Return how many messages were not delivered yet."""
        return sum(int(cursor.count_waiting()) for cursor in self._group.cursors)

    def in_flight(self) -> int:
        return int(self._group.in_flight)

    def delivered(self) -> int:
        return int(self._group.delivered)

    def acked(self) -> int:
        return int(self._group.count_acked())

    def dead(self) -> int:
        return sum(cursor.outcome_counts[DEAD] for cursor in self._group.cursors)

    def has_enqueued(self) -> bool:
        """Return whether the group ever had a message to settle."""
        return any(cursor.count_enqueued() for cursor in self._group.cursors)

    # ---- members

    def members(self) -> list[views.Member]:
        return [_show_member(consumer) for consumer in self._group.consumers]

    def groups_with_members(self) -> list[str]:
        """Return the groups of the queue that have members."""
        return [group.name for group in self._group.queue.groups.values() if group.consumers]

    def can_redistribute(self) -> bool:
        """Return whether a message could go to another member if one has no capacity."""
        return self._group.can_redistribute()

    def has_ready_messages(self, member: views.Member) -> bool:
        """Return whether a partition of a member has a message to deliver."""
        return any(self._group.cursors[number].has_more() for number in member.partitions)

    def held_by(self, member: views.Member) -> views.HeldDeliveries | None:
        """Return what a member holds, or None for nothing."""
        leases = [
            lease
            for cursor in self._group.cursors
            if cursor.in_flight
            for lease in cursor.leases.values()
            if lease.consumer is not None and lease.consumer.join_number == member.number
        ]
        if not leases:
            return None
        return views.HeldDeliveries(
            len(leases),
            min(lease.last_delivered_at for lease in leases),
            min(lease.deadline for lease in leases),
        )

    # ---- deliveries of the group

    def connected_deliveries(self) -> tuple[int, views.Delivery | None]:
        """Return how many deliveries are with connected consumers, and the oldest of them."""
        leases = [
            lease
            for cursor in self._group.cursors
            for lease in cursor.leases.values()
            if lease.state == LEASED and (lease.consumer is None or not lease.consumer.is_paused)
        ]
        if not leases:
            return 0, None
        return len(leases), _show_lease(min(leases, key=_delivered_at))

    def held_back(self) -> views.HeldBack | None:
        """Return what holds back all undelivered messages; None if one could be delivered."""
        cursors = self._group.cursors
        delayed = sum(_count_delayed(cursor) for cursor in cursors)
        parked = sum(int(cursor.count_parked()) for cursor in cursors)
        retrying: list[Lease] = []
        for cursor in cursors:
            for lease in cursor.leases.values():
                if lease.state == BACKOFF:
                    retrying.append(lease)
                elif lease.state != LEASED:
                    return None
        if self.waiting() > delayed + parked:
            return None
        return views.HeldBack(
            retrying=len(retrying),
            parked=parked,
            gated=sum(len(cursor.gated_seqs()) for cursor in cursors),
            delayed=delayed,
            next_due=self._engine.timers.next_delayed_due(self._group.queue.partitions)
            if delayed
            else 0.0,
            next_retry=min([lease.retry_at for lease in retrying], default=0.0),
            last_failed=_show_lease(max(retrying, key=_delivered_at)) if retrying else None,
        )

    def key_blocker(self) -> views.Delivery | None:
        """Return the oldest delivery that blocks its key, best one that waits for a retry."""
        blockers: list[Lease] = []
        for cursor in self._group.cursors:
            if cursor.count_parked():
                for key in cursor.active_by_key():
                    blocker = _find_blocker(cursor, key)
                    if blocker is not None:
                        blockers.append(blocker)
        failed = [lease for lease in blockers if lease.state == BACKOFF]
        if failed:
            return _show_lease(min(failed, key=_first_delivered_at))
        held = [lease for lease in blockers if lease.state == LEASED]
        return _show_lease(min(held, key=_delivered_at)) if held else None

    def busy_keys(self) -> views.BusyKeys | None:
        """Return that no waiting message can be delivered: all their keys are with consumers.

        None when some message could go. The consumers need not have looked at the messages yet.
        Only the first messages of each partition are examined. None also if none of those waits
        for a consumer and there are more: then nothing is known of the messages that do.
        """
        max_deliveries = int(self.rules.batch_size)
        waiting = 0
        blockers: list[Lease] = []
        for cursor in self._group.cursors:
            leases_by_key: dict[int, list[Lease]] = {}
            for lease in cursor.leases.values():
                if lease.state != READY and lease.key_hash:
                    leases_by_key.setdefault(int(lease.key_hash), []).append(lease)
            keys: set[int] = set()
            undelivered, is_all = _find_undelivered(cursor)
            if not undelivered and not is_all:
                return None
            for seq in undelivered:
                key = int(cursor.key_hash_of(seq))
                if not key or len(leases_by_key.get(key, [])) < max_deliveries:
                    return None
                keys.add(key)
                waiting += 1
            blockers += [min(leases_by_key[key], key=_sequence) for key in keys]
        if not blockers or any(lease.state != LEASED for lease in blockers):
            return None  # a message that waits for its retry is reported by itself
        return views.BusyKeys(waiting, len(blockers), _show_lease(min(blockers, key=_delivered_at)))

    # ---- one message

    def describe(self, location: MessageLocation) -> views.StoredMessage:
        return stored_messages.describe(location, self._group)

    def find_delivery(self, location: MessageLocation) -> views.Delivery | None:
        lease = self._cursor_of(location).leases.get(location[1])
        return None if lease is None else _show_lease(lease)

    def find_by_message_id(self, message_id: bytes) -> MessageLocation | None:
        lease = self._group.leases_by_message_id.get(message_id)
        return None if lease is None else (lease.cursor.partition, int(lease.seq))

    def has_settled(self, location: MessageLocation) -> bool:
        return self._cursor_of(location).is_settled(location[1])

    def is_for_group(self, location: MessageLocation) -> bool:
        return location[0].is_for_group(location[1], self.gid)

    def server_of(self, location: MessageLocation) -> views.Member | None:
        """Return the member that serves the partition of a message."""
        consumer = self._cursor_of(location).consumer
        return None if consumer is None else _show_member(consumer)

    def is_gated(self, location: MessageLocation) -> bool:
        """Return whether older messages of its key are in another partition."""
        return location[1] in self._cursor_of(location).gated_seqs()

    def limited_keys(self) -> int:
        """Return how many keys have messages that wait for a limit of their key."""
        return self._group.admission.keys.count_held_keys()

    def key_limit_of(self, location: MessageLocation) -> str:
        """Return the limit of its key for which a message waits, by name; empty for none."""
        partition, seq = location
        cursor = self._cursor_of(location)
        return self._group.admission.keys.holding_limit(
            partition.key_hash(seq), cursor.location(seq)
        )

    def has_key(self, location: MessageLocation) -> bool:
        return self._cursor_of(location).key_hash_of(location[1]) != 0

    def blocker_of(self, location: MessageLocation) -> views.Delivery | None:
        """Return the oldest delivery of the key of an undelivered message."""
        cursor = self._cursor_of(location)
        key = cursor.key_hash_of(location[1])
        if not key or location[1] in cursor.leases:
            return None
        blocker = _find_blocker(cursor, int(key))
        return None if blocker is None else _show_lease(blocker)

    def has_only_acked(self, location: MessageLocation) -> bool:
        """Return whether everything that the group settled in the partition was acknowledged."""
        counts = self._cursor_of(location).outcome_counts
        return not any(counts[outcome] for outcome in (DEAD, EXPIRED, PURGED, CANCELLED))

    def events_of(self, location: MessageLocation) -> list[views.Event]:
        """Return the events of a delivery that the group has not settled."""
        cursor = self._cursor_of(location)
        lease = cursor.leases.get(location[1])
        steps = None if lease is None else lease.history
        if steps is None and cursor.released_history is not None:
            steps = cursor.released_history.get(location[1])
        events = [show_event(step) for step in steps or []]
        if lease is not None and lease.state == LEASED:
            times = [(lease.last_delivered_at, history.DELIVERED)]
            if lease.lease_started_at > lease.last_delivered_at:
                times.append((lease.lease_started_at, history.EXTENDED))
            consumer = lease.holder_client_id()
            events += [
                views.Event(at, kind, self.name, consumer, int(lease.attempt)) for at, kind in times
            ]
        return events

    def _cursor_of(self, location: MessageLocation) -> Cursor:
        return self._group.cursors[location[0].number]


def show_pause(pause: Pause) -> views.Pause | None:
    if not pause.is_active():
        return None
    return views.Pause(at=pause.paused_at, by=pause.by, reason=pause.reason)


def _show_member(consumer: Consumer) -> views.Member:
    return views.Member(
        number=int(consumer.join_number),
        client=consumer.client,
        prefetch=int(consumer.prefetch),
        in_flight=int(consumer.in_flight),
        priority=int(consumer.priority),
        is_exclusive=consumer.is_exclusive,
        is_connected=not consumer.is_paused,
        is_stalled=consumer.is_stalled,
        settled_at=consumer.settled_at,
        active_at=consumer.active_at,
        partitions=tuple([int(cursor.partition.number) for cursor in consumer.cursors]),
        connection=consumer.describe_connection(),
    )


def _show_lease(lease: Lease) -> views.Delivery:
    message = lease.message
    own_id = lease.publisher_message_id
    location = (lease.cursor.partition, int(lease.seq))
    consumer = lease.holder_client_id()
    if not consumer and lease.history:
        consumer = lease.history[-1].consumer
    return views.Delivery(
        message_id=own_id.decode("utf-8", "replace")
        if own_id
        else stored_messages.displayed_id(location, message),
        key=message.key.decode("utf-8", "replace") if message is not None else "",
        phase=_PHASES[int(lease.state)],
        consumer=consumer,
        holder=None if lease.consumer is None else _show_member(lease.consumer),
        attempt=int(lease.attempt),
        failures=int(lease.failures),
        description=lease.description,
        last_delivered_at=lease.last_delivered_at,
        retry_at=lease.retry_at,
        deadline=lease.deadline,
    )


def _delivered_at(lease: Lease) -> float:
    return lease.last_delivered_at


def _first_delivered_at(lease: Lease) -> float:
    return lease.first_delivered_at


def _held_at(held: HeldKey) -> float:
    return held.held_at


def _sequence(lease: Lease) -> int:
    return int(lease.seq)


def _count_delayed(cursor: Cursor) -> int:
    partition = cursor.partition
    return sum(
        1
        for seq in partition.delayed_seqs
        if not cursor.is_settled(seq) and partition.is_for_group(seq, cursor.group.gid)
    )


def _find_blocker(cursor: Cursor, key: object) -> Lease | None:
    """Return the oldest delivery of a key, which blocks all other messages of the key."""
    found: Lease | None = None
    for lease in cursor.leases.values():
        if (
            int(lease.key_hash) == key
            and lease.state != READY
            and (found is None or lease.seq < found.seq)
        ):
            found = lease
    return found


def _find_undelivered(cursor: Cursor) -> tuple[list[int], bool]:
    """Return the sequences that are neither delivered nor delayed, and whether those are all.

    At most MAX_EXAMINED_MESSAGES stored messages are examined: this runs on the event loop.
    """
    partition = cursor.partition
    found: list[int] = []
    seq = partition.first_live(cursor.low_watermark)
    for _ in range(MAX_EXAMINED_MESSAGES):
        if seq >= partition.committed_end:
            return found, True
        lease = cursor.leases.get(int(seq))
        if (
            (lease is None or lease.state == READY)
            and seq not in partition.delayed_seqs
            and not cursor.is_settled(seq)
            and partition.is_for_group(seq, cursor.group.gid)
        ):
            found.append(int(seq))
        seq = partition.first_live(seq + 1)
    return found, seq >= partition.committed_end

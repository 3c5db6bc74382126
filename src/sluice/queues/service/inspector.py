"""Inspection of the engine and of its queues: names, statistics, stored messages. Read-only.

This is the one way in which APIs, metrics and diagnosis read queues: values of `views` and
locations of messages leave it. The caller sets `engine.now` before it asks.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from sluice.errors import UnknownQueue
from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.model import (
    REJECT_NEW,
    Queue,
    QueueRules,
    history,
    verify_queue,
)
from sluice.queues.names import DLQ_PREFIX, client_id_of, parse_message_id
from sluice.queues.service import stored_messages, views
from sluice.queues.service.group_inspector import GroupInspector, show_pause
from sluice.queues.service.message_events import show_event
from sluice.queues.service.queue_config import read_config
from sluice.queues.service.rates import LatencySum, Rates, Sample, Sampler
from sluice.queues.service.stored_messages import MessageLocation

_ORDERINGS: Final = ("none", "partition", "strict")
DEAD_LETTER_REASONS: Final = ("max_retries", "timeout", "rejected", "expired", "overflow")


class EngineInspector:
    """Read-only access to all queues: their names, in order, and the inspector of each."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = engine
        self._samplers: dict[int, Sampler] = {}  # by qid
        # The names are sorted again only when queues were created, deleted or changed.
        self._version: tuple[int, int] = (-1, -1)
        self._names: list[str] = []
        self._dead_letter_queues: set[str] = set()

    # ---- names

    def on_config_changed(self) -> None:
        self._version = (-1, -1)

    def _refresh(self) -> None:
        engine = self.engine
        version = (int(engine.state.next_qid), len(engine.queues))
        if version == self._version:
            return
        self._version = version
        self._names = sorted(engine.queues)
        self._dead_letter_queues = set()
        for queue in engine.queues.values():
            if queue.rules.dlq_enabled:
                self._dead_letter_queues.add(queue.rules.dlq_name)
            if queue.rules.invalid_queue_name:
                self._dead_letter_queues.add(queue.rules.invalid_queue_name)

    def list_names(self, prefix: str, after: str, limit: int) -> list[str]:
        self._refresh()
        names = self._names
        index = max(bisect_right(names, after) if after else 0, bisect_left(names, prefix))
        found: list[str] = []
        while index < len(names) and len(found) < limit and names[index].startswith(prefix):
            found.append(names[index])
            index += 1
        return found

    def all_names(self) -> list[str]:
        self._refresh()
        return self._names

    def is_dead_letter_queue(self, name: str) -> bool:
        """Return whether some queue sends its dead letters or invalid messages here."""
        self._refresh()
        return name in self._dead_letter_queues or name.startswith(DLQ_PREFIX)

    # ---- queues

    def queues(self, limit: int = -1) -> list[QueueInspector]:
        """Return all queues or the first `limit`, in the order of their creation."""
        found: list[QueueInspector] = []
        for queue in self.engine.queues.values():
            if len(found) == limit:
                break
            found.append(QueueInspector(self, queue))
        return found

    def find_by_location(self, message_id: str) -> str:
        """Return the name of the queue to which a generated id belongs, or the empty string."""
        pid, seq = parse_message_id(message_id.encode("utf-8", "replace"))
        partition = self.engine.partitions.get(int(pid))
        return "" if partition is None or seq >= partition.next_seq else partition.queue.name

    def find(self, name: str) -> QueueInspector | None:
        queue = self.engine.queues.get(name)
        return None if queue is None else QueueInspector(self, queue)

    def get(self, name: str) -> QueueInspector:
        found = self.find(name)
        if found is None:
            raise UnknownQueue(name)
        return found

    def count_messages(self) -> int:
        return sum(int(queue.depth) for queue in self.engine.queues.values())

    def dead_letter_queues_of(self, name: str) -> list[QueueInspector]:
        """Return the queues with the dead letters of a queue.

        The name may also be that of a dead-letter queue, even if its queue is gone.
        """
        queues = self.engine.queues
        queue = queues.get(name)
        if queue is None:
            orphaned = self.find(f"{DLQ_PREFIX}{name}")
            if orphaned is None:
                raise UnknownQueue(name)
            return [orphaned]
        rules = queue.rules
        found: list[Queue] = []
        for channel in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_queue_name):
            other = queues.get(channel)
            if other is not None and other is not queue and other not in found:
                found.append(other)
        if not found and name.startswith(DLQ_PREFIX):
            found.append(queue)
        return [QueueInspector(self, one) for one in found]

    # ---- rates

    def rates_of(self, queue: Queue, delivered: int, acked: int, nacked: int) -> Rates:
        """Return the rates as of `engine.now`."""
        sampler = self._samplers.get(int(queue.qid))
        if sampler is None:
            if len(self._samplers) > 2 * len(self.engine.queues):
                self._drop_deleted_samplers()
            sampler = self._samplers[int(queue.qid)] = Sampler()
        delivery, process = queue.delivery_latency, queue.process_latency
        return sampler.rates(
            Sample(
                self.engine.now,
                int(queue.enqueued),
                delivered,
                acked,
                nacked,
                LatencySum(int(delivery.count()), delivery.total),
                LatencySum(int(process.count()), process.total),
            )
        )

    def _drop_deleted_samplers(self) -> None:
        live_qids = {int(queue.qid) for queue in self.engine.queues.values()}
        self._samplers = {
            qid: sampler for qid, sampler in self._samplers.items() if qid in live_qids
        }


class QueueInspector:
    """Read-only access to one queue. It outlives the queue: see `is_current`."""

    def __init__(self, inspector: EngineInspector, queue: Queue) -> None:
        self._inspector: EngineInspector = inspector
        self._queue: Queue = queue
        self.name: str = queue.name

    def is_current(self) -> bool:
        """Return whether the queue exists; it may have been deleted since this was made."""
        return self._inspector.engine.queues.get(self.name) is self._queue

    def rules(self) -> QueueRules:
        return self._queue.rules

    def depth(self) -> int:
        return int(self._queue.depth)

    def enqueued(self) -> int:
        """Return how many messages came since the queue was created."""
        return int(self._queue.enqueued)

    def is_full(self) -> bool:
        """Return whether the queue refuses publishes because of its depth."""
        queue = self._queue
        return queue.depth >= queue.rules.max_depth and queue.rules.overflow == REJECT_NEW

    def groups(self) -> list[GroupInspector]:
        engine = self._inspector.engine
        return [GroupInspector(engine, group) for group in self._queue.groups.values()]

    def find_group(self, name: str) -> GroupInspector | None:
        group = self._queue.groups.get(name)
        return None if group is None else GroupInspector(self._inspector.engine, group)

    # ---- what APIs show

    def view(self) -> views.Queue:
        queue = self._queue
        rules = queue.rules
        inspector = self._inspector
        dlq = inspector.engine.queues.get(rules.dlq_name) if rules.dlq_enabled else None
        in_flight, leases, acked, delivered, nacked = 0, 0, 0, 0, 0
        partitions_assigned: dict[str, int] = {}
        for group in queue.groups.values():
            delivered += int(group.delivered)
            nacked += int(group.nacked)
            acked += int(group.count_acked())
            for consumer in group.consumers:
                served = partitions_assigned.get(consumer.client, 0) + len(consumer.cursors)
                partitions_assigned[consumer.client] = served
            for cursor in group.cursors:
                in_flight += int(cursor.in_flight)
                leases += len(cursor.leases)
        rates = inspector.rates_of(queue, delivered, acked, nacked)
        return views.Queue(
            name=queue.name,
            type="compacted" if rules.is_compacted else "work",
            ordering=_ORDERINGS[rules.ordering],
            partitions=len(queue.partitions),
            total_messages=int(queue.depth),
            max_depth=int(rules.max_depth),
            bytes=int(queue.bytes),
            inflight_messages=in_flight,
            retrying=leases - in_flight,
            dlq=rules.dlq_name if rules.dlq_enabled else "",
            dlq_messages=0 if dlq is None else int(dlq.depth),
            enqueue_rate=rates.enqueued,
            dequeue_rate=rates.delivered,
            ack_rate=rates.acked,
            nack_rate=rates.nacked,
            avg_delivery_latency=rates.delivery_seconds,
            avg_process_latency=rates.process_seconds,
            enqueued=int(queue.enqueued),
            acked=acked,
            duplicates=int(queue.duplicates),
            refused=int(queue.refused),
            retry_count=int(queue.retried),
            dead=dict(queue.dead_by_reason),
            active_consumers=int(queue.consumer_count),
            partitions_assigned=partitions_assigned,
            groups=len(queue.groups),
            pause=show_pause(queue.pause),
            is_dead_letters=inspector.is_dead_letter_queue(queue.name),
            created_at=queue.created_at,
        )

    def detail(self) -> views.QueueDetail:
        queue = self._queue
        return views.QueueDetail(
            stats=self.view(),
            config=read_config(json.loads(queue.config_json), queue.name).as_dict(),
            groups=self.group_views(),
            partitions=[
                views.Partition(
                    number=int(partition.number),
                    first=int(partition.first_live(0)),
                    next=int(partition.next_seq),
                    messages=int(partition.live_count),
                    last_delivery=partition.last_delivery_at,
                )
                for partition in queue.partitions
            ],
        )

    def group_views(self) -> list[views.Group]:
        return sorted([group.view() for group in self.groups()], key=_name_of)

    def statistics(self) -> dict[str, object]:
        """Return the queue and its groups as JSON values: all fields of the views.

        `last_delivery` is the time of the last delivery, null if there was none since the start.
        """
        groups: list[dict[str, object]] = []
        for group in self.group_views():
            shown = asdict(group)
            groups.append({**shown, **shown.pop("ledger")})
        last_delivery = max(one.last_delivery_at for one in self._queue.partitions)
        return {**asdict(self.view()), "last_delivery": last_delivery or None, "groups": groups}

    def metrics(self) -> views.QueueMetrics:
        """Return the counters of the queue, without those of its groups."""
        queue = self._queue
        rules = queue.rules
        groups = list(queue.groups.values())
        dead = dict.fromkeys(DEAD_LETTER_REASONS, 0) if rules.dlq_enabled else {}
        dead.update(queue.dead_by_reason)
        return views.QueueMetrics(
            name=queue.name,
            depth=int(queue.depth),
            max_depth=int(rules.max_depth),
            max_in_flight=int(rules.max_in_flight),
            max_rate=rules.max_rate,
            max_in_flight_per_key=int(rules.max_in_flight_per_key),
            max_rate_per_key=rules.max_rate_per_key,
            delivery_timeout=rules.delivery_timeout,
            bytes=int(queue.bytes),
            enqueued=int(queue.enqueued),
            dequeued=int(queue.past_delivered) + sum(int(one.delivered) for one in groups),
            acked=int(queue.past_acked) + sum(int(one.count_acked()) for one in groups),
            nacked=int(queue.past_nacked) + sum(int(one.nacked) for one in groups),
            redelivered=int(queue.past_redelivered) + sum(int(one.redelivered) for one in groups),
            retried=int(queue.retried),
            duplicates=int(queue.duplicates),
            refused=int(queue.refused),
            dead=dead,
            delivery_counts=queue.delivery_latency.counts(),
            delivery_seconds=queue.delivery_latency.total,
            process_counts=queue.process_latency.counts(),
            process_seconds=queue.process_latency.total,
            is_dead_letter_queue=self._inspector.is_dead_letter_queue(queue.name),
        )

    def verify(self) -> list[str]:
        """Return the inconsistencies of the counters of the queue itself."""
        return verify_queue(self._queue)

    # ---- stored messages

    def count_stored(self) -> int:
        return sum(int(partition.live_count) for partition in self._queue.partitions)

    def count_partitions(self) -> int:
        return len(self._queue.partitions)

    def locations(self) -> Iterator[MessageLocation]:
        """Yield all stored messages, oldest first; may span many turns."""
        return stored_messages.iterate_from_start(self._queue)

    def locations_after(self, location: MessageLocation) -> Iterator[MessageLocation]:
        return stored_messages.iterate_after(self._queue, location)

    def locations_from(
        self, partition: int, start: int, group: str = ""
    ) -> Iterator[MessageLocation]:
        """Yield messages from a sequence on, of one partition or of all (-1).

        With a group, from the first that it has not settled.
        """
        queue = self._queue
        chosen = queue.partitions if partition < 0 else [queue.partitions[partition]]
        starts = [max(0, start)] * len(chosen)
        if group:
            cursors = queue.groups[group].cursors
            starts = [max(start, int(cursors[one.number].low_watermark)) for one in chosen]
        return stored_messages.iterate_oldest_first(chosen, starts)

    def parse_location(self, message_id: str) -> MessageLocation | None:
        """Return the location that a generated id contains; None for other ids and queues."""
        pid, seq = parse_message_id(message_id.encode("utf-8", "replace"))
        partition = self._inspector.engine.partitions.get(int(pid))
        if partition is None or partition.queue is not self._queue or seq >= partition.next_seq:
            return None
        return partition, int(seq)

    def locate(self, message_id: str) -> MessageLocation | None:
        """Return where a message is, if its id tells or a group has the delivery."""
        own_id = message_id.encode("utf-8", "replace")
        for group in self.groups():
            found = group.find_by_message_id(own_id)
            if found is not None:
                return found
        found = self.parse_location(message_id)
        return found if found is not None and stored_messages.is_stored(found) else None

    def locations_around_id(self, message_id: str) -> Iterator[MessageLocation]:
        """Yield the messages that were stored when this id was, if that is known."""
        stored_at = self.id_stored_at(message_id)
        return stored_messages.iterate_around(self._queue, int(stored_at * 1000.0))

    def id_stored_at(self, message_id: str) -> float:
        """Return when a message with this id was last stored, or 0.0 if that is unknown."""
        return self._queue.id_stored_at(message_id.encode("utf-8", "replace"))

    def has_dead_letters(self) -> bool:
        """Return whether a message of the queue was ever dead-lettered."""
        return bool(self._queue.dead_by_reason)

    def knows(self, message_id: str) -> bool:
        """Return whether the id is that of a delivery, of a recent publish or of a recent ack."""
        own_id = message_id.encode("utf-8", "replace")
        queue = self._queue
        return bool(
            queue.id_stored_at(own_id)
            or any(own_id in group.leases_by_message_id for group in queue.groups.values())
            or (queue.recent_acks is not None and queue.recent_acks.find(own_id, -1, -1))
        )

    # ---- history

    def recorded_events(
        self, message_id: str, location: MessageLocation | None, message: Message | None
    ) -> list[views.Event]:
        """Return what is remembered of a message: failures, commands, acknowledgements."""
        recent = self._inspector.engine.settlement.recent_history.get(self.name, message_id)
        events = [show_event(step) for step in recent]
        return events + self._recent_acks(message_id, location, message, events)

    def _recent_acks(
        self,
        message_id: str,
        location: MessageLocation | None,
        message: Message | None,
        recorded: list[views.Event],
    ) -> list[views.Event]:
        """Return the events of remembered acknowledgements that `recorded` does not contain."""
        queue = self._queue
        if queue.recent_acks is None:
            return []
        pid, seq = -1, -1
        if location is not None:
            pid, seq = int(location[0].pid), location[1]
        known = {event.group for event in recorded if event.what == history.ACKED}
        names = {int(group.gid): group.name for group in queue.groups.values()}
        events: list[views.Event] = []
        # A stored message is known by its location: an earlier one may have had the same id.
        own_id = b"" if message is not None else message_id.encode("utf-8", "replace")
        for ack in queue.recent_acks.find(own_id, pid, seq):
            group = names.get(int(ack.gid))
            if group is None or group in known:
                continue
            if message is None and not recorded and not events and ack.enqueued_at:
                events.append(views.Event(ack.enqueued_at, history.ENQUEUED))
            consumer = client_id_of(ack.holder)
            for at, kind in ((ack.delivered_at, history.DELIVERED), (ack.acked_at, history.ACKED)):
                events.append(views.Event(at, kind, group, consumer, int(ack.attempt)))
        return events


def _name_of(group: views.Group) -> str:
    return group.name

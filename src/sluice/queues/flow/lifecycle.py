"""Queues and groups come, change and go. What is here runs twice: when it happens, and when recovery replays the notes
of it; so nothing but the functions that say so writes notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.errors import (
    InvalidQueueConfig,
    InvalidQueueName,
    QueueExists,
    TooManyFollowed,
    TooManyGroups,
    TooManyPartitions,
)
from sluice.message import TOMBSTONE
from sluice.queues.log import frame_builder as notes
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import PURGED, NoteWriter
from sluice.queues.bulk.lost_ranges import Losses
from sluice.queues.names import fault_of_name
from sluice.queues.model.partition import NOT_DELAYED, Partition
from sluice.queues.model.queue import Gate, Queue
from sluice.queues.flow.removal import keeps_settled, let_go_of, settled_by_all, waits_for_nobody
from sluice.queues.model.queue_rules import STRICT, Rules
from sluice.queues.flow.settlement import let_go

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

GROUPS_PER_QUEUE: Final = 5  # on average, for the partitions that all groups together may follow
WIDE_GROUP: Final = 100  # partitions


# ---- queues


def create(engine: Engine, rules: Rules, config: str) -> Queue:
    """A new queue, kept with the next frame."""
    fault = fault_of_name(rules.name)
    if fault:
        raise InvalidQueueName(rules.name, fault)
    if rules.name in engine.queues:
        raise QueueExists(rules.name)
    queue = Queue(engine.next_qid, rules)
    queue.config = config
    queue.created_at = engine.now
    engine.next_qid += 1
    engine.queues[rules.name] = queue
    count: i64 = 1 if rules.ordering == STRICT else rules.partitions
    _note_queue(engine, queue, count)
    add_partitions(engine, queue, engine.next_pid, count)
    return queue


def check_partitions(engine: Engine, rules: Rules, present: i64) -> None:
    """Refuse more partitions than the broker may have. Each costs memory, and time at each start.

    Recovery does not ask: a lower limit than before must not keep a broker from starting.
    """
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    count: i64 = len(engine.partitions)
    if engine.max_partitions and wanted > present and count + wanted - present > engine.max_partitions:
        raise TooManyPartitions(rules.name, int(wanted - present), int(count), int(engine.max_partitions))


def check_group(engine: Engine, group: str, added: i64) -> None:
    """Refuse a new group of `added` partitions if the groups of the broker would follow too many.

    Small groups are not counted: there are as many of them as there are queues, and counting
    would take time for each of them.
    """
    if not engine.max_partitions or added < WIDE_GROUP:
        return
    limit: i64 = engine.max_partitions * GROUPS_PER_QUEUE
    count = _followed_partitions(engine)
    if count + added > limit:
        raise TooManyGroups(group, int(added), int(count), int(limit))


def check_growth(engine: Engine, queue: Queue, rules: Rules) -> None:
    """Refuse more partitions for a queue if its groups would follow too many. Each group follows all."""
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    added: i64 = (wanted - len(queue.partitions)) * len(queue.groups)
    if not engine.max_partitions or added <= 0:
        return
    limit: i64 = engine.max_partitions * GROUPS_PER_QUEUE
    count = _followed_partitions(engine)
    if count + added > limit:
        raise TooManyFollowed(queue.name, len(queue.groups), int(added), int(count), int(limit))


def _followed_partitions(engine: Engine) -> i64:
    count: i64 = 0
    for group in engine.groups.values():
        count += len(group.cursors)
    return count


def _note_queue(engine: Engine, queue: Queue, added: i64) -> None:
    note = NoteWriter(notes.QUEUE_MADE)
    note.number(queue.qid)
    note.number(engine.next_pid)
    note.number(added)
    note.text(queue.name)
    note.text(queue.config)
    note.real(queue.created_at)
    write_gates(note, queue)
    engine.note(note, True)


def write_gates(note: NoteWriter, queue: Queue) -> None:
    note.number(len(queue.gates))
    for gate in queue.gates:
        note.number(len(gate.floors))
        for floor in gate.floors:
            note.number(floor)


def add_partitions(engine: Engine, queue: Queue, first_pid: i64, count: i64) -> None:
    added: list[Partition] = []
    for step in range(count):
        partition = Partition(queue, first_pid + step, len(queue.partitions))
        queue.partitions.append(partition)
        engine.partitions[int(partition.pid)] = partition
        added.append(partition)
    for group in queue.groups.values():
        tracks_losses = _tracks_losses(group)
        for partition in added:
            cursor = Cursor(group, partition, 0)
            if tracks_losses:  # who reads the others in bulk is to read this one from its beginning
                cursor.losses = Losses(0)
            group.cursors.append(cursor)
            partition.cursors.append(cursor)
    engine.next_pid = max(engine.next_pid, first_pid + count)


def _tracks_losses(group: Group) -> bool:
    for cursor in group.cursors:
        if cursor.losses is not None:
            return True
    return False


def reconfigure(engine: Engine, queue: Queue, rules: Rules, config: str) -> None:
    """New rules for a living queue, in force at once. The number of partitions may only grow; see `Gate`."""
    count: i64 = len(queue.partitions)
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    if wanted < count:
        raise InvalidQueueConfig(
            f"queue {queue.name!r} has {count} partitions, and {wanted} would be fewer",
            "Raise partitions, or make a new queue: messages cannot change their partition",
        )
    engine.journal.flush(int(engine.now * 1000.0))
    if wanted > count:
        queue.gates.append(Gate([int(partition.next) for partition in queue.partitions]))
    old = queue.rules
    set_rules(engine, queue, rules, config)
    _note_queue(engine, queue, wanted - count)
    if wanted > count:
        add_partitions(engine, queue, engine.next_pid, wanted - count)
    if wanted > count or old.ordering != rules.ordering or old.batch_size != rules.batch_size:
        for group in queue.groups.values():
            for cursor in group.cursors:
                cursor.rebuild()
    if old.delivery_timeout != rules.delivery_timeout:
        queue.deadlines.set_timeout(rules.delivery_timeout)
        if queue.deadlines.first is not None:
            engine.timers.watch(queue, queue.deadlines.first.deadline)
        else:
            queue.watch_at = 0.0  # else the next delivery would rely on a wake-up set for the old timeout
    for group in queue.groups.values():
        engine.rebalance(group)
        for consumer in group.consumers:
            engine.feed(consumer)


def set_rules(engine: Engine, queue: Queue, rules: Rules, config: str) -> None:
    """Other rules, with what follows from them for messages that no group waits for."""
    kept = queue.rules.retention > 0.0
    keeps = rules.retention > 0.0
    queue.rules = rules
    queue.config = config
    for partition in queue.partitions:
        partition.retention_set = 0.0
        if partition.cursors and kept != keeps and not rules.compacted:
            seq = partition.first_live(0)
            while seq < partition.next:
                if partition.left(seq) <= 0:
                    if keeps:
                        queue.depth -= 1
                    else:
                        let_go_of(engine, partition, seq)
                seq = partition.first_live(seq + 1)
        if keeps and partition.live:
            engine.expect_retention(partition)


def delete(engine: Engine, queue: Queue) -> None:
    """The queue and all in it. Its consumers stay subscribed to a name that is free again."""
    note = NoteWriter(notes.QUEUE_GONE)
    note.number(queue.qid)
    engine.note(note, True)
    forget_queue(engine, queue)


def forget_queue(engine: Engine, queue: Queue) -> None:
    for group in list(queue.groups.values()):
        _send_away(engine, group)
        engine.groups.pop(int(group.gid), None)
    queue.groups = {}
    for partition in queue.partitions:
        partition.cursors = []
        partition.delayed = NOT_DELAYED
        seq = partition.first_live(0)
        while seq < partition.next:
            let_go_of(engine, partition, seq)
            seq = partition.first_live(seq + 1)
        engine.young.forget(partition)
        engine.partitions.pop(int(partition.pid), None)
    engine.timers.forget(queue)
    queue.depth = 0
    queue.gone = True
    engine.queues.pop(queue.name, None)


def _send_away(engine: Engine, group: Group) -> None:
    """The members of a group that is no more; what they held is taken from them."""
    for cursor in group.cursors:
        _end_leases(engine, cursor)
        cursor.consumer = None
        engine.young.forget_ahead(cursor)
    for consumer in group.consumers:
        consumer.group = None
        consumer.cursors = []
        group.queue.consumers -= 1
    group.consumers = []


def _end_leases(engine: Engine, cursor: Cursor) -> None:
    for lease in list(cursor.leases.values()):
        consumer = lease.consumer
        if lease.state == LEASED:
            if consumer is not None:
                consumer.taken_away(lease)
            let_go(engine, lease, False)
        lease.state = SETTLED
        lease.message = None
        cursor.group.drop_name(lease)
    cursor.leases = {}


# ---- groups


def make_group(engine: Engine, queue: Queue, name: str, floors: list[int] | None) -> Group:
    """A new group begins at `floors`, or with the oldest message that is kept."""
    if floors is None:
        floors = [int(partition.first_live(0)) for partition in queue.partitions]
    engine.journal.flush(int(engine.now * 1000.0))
    group = add_group(engine, queue, engine.next_gid, name, floors)
    note = NoteWriter(notes.GROUP_MADE)
    note.number(queue.qid)
    note.number(group.gid)
    note.text(name)
    for floor in floors:
        note.number(floor)
    engine.note(note, True)
    for partition in queue.partitions:
        if partition.live:
            engine.expect_retention(partition)  # the group may begin behind all that is stored
    _expect_expiries(engine, queue)
    return group


def _expect_expiries(engine: Engine, queue: Queue) -> None:
    """Search for expired messages in time: some may be wanted again that no search looked for."""
    for partition in queue.partitions:
        soonest = partition.next_expiry()
        if soonest:
            engine.timers.expect_expiry(partition, soonest)


def add_group(engine: Engine, queue: Queue, gid: i64, name: str, floors: list[int]) -> Group:
    group = Group(queue, gid, name)
    engine.next_gid = max(engine.next_gid, gid + 1)
    queue.groups[name] = group
    engine.groups[int(gid)] = group
    for partition, floor in zip(queue.partitions, floors, strict=True):
        cursor = Cursor(group, partition, 0)
        group.cursors.append(cursor)
        first = not partition.cursors
        partition.cursors.append(cursor)
        cursor.advance(_within(partition, floor))
        _take_on(cursor, first)
    for cursor in group.cursors:
        cursor.rebuild()
    return group


def _within(partition: Partition, floor: i64) -> i64:
    return max(0, min(floor, partition.next))


def _take_on(cursor: Cursor, first: bool) -> None:
    """A cursor becomes responsible for every message at or behind its floor. `first`: of the first group."""
    partition = cursor.partition
    queue = partition.queue
    if first and not waits_for_nobody(partition):
        # Nobody has waited for a group longer than until now: from here on, settled and never wanted are one.
        seq = partition.first_live(0)
        while seq < cursor.floor:
            queue.depth -= 1
            seq = partition.first_live(seq + 1)
    gid = cursor.group.gid
    seq = partition.first_live(cursor.floor)
    while seq < partition.next:
        if not partition.is_for(seq, gid) or partition.flags(seq) & TOMBSTONE:
            cursor.pass_over(seq, True)  # a new group needs not hear of keys that are no more
        else:
            if not first and partition.left(seq) <= 0 and not waits_for_nobody(partition):
                queue.depth += 1
            partition.set_left(seq, partition.left(seq) + 1)
            partition.watch_expiry(seq)
            cursor.entered += 1
        seq = partition.first_live(seq + 1)


def drop_group(engine: Engine, group: Group) -> None:
    """Nobody reads for this group any more: what only it waited for is let go."""
    engine.journal.flush(int(engine.now * 1000.0))
    note = NoteWriter(notes.GROUP_GONE)
    note.number(group.gid)
    engine.note(note, True)
    forget_group(engine, group)
    _expect_expiries(engine, group.queue)


def forget_group(engine: Engine, group: Group) -> None:
    queue = group.queue
    _send_away(engine, group)
    last = len(queue.groups) == 1
    for cursor in group.cursors:
        partition = cursor.partition
        seq = partition.first_live(0)
        while seq < partition.next:
            _forget_one(engine, cursor, seq, last)
            seq = partition.first_live(seq + 1)
        partition.cursors.remove(cursor)
    queue.groups.pop(group.name, None)
    engine.groups.pop(int(group.gid), None)


def _forget_one(engine: Engine, cursor: Cursor, seq: i64, last: bool) -> None:
    """One message that is kept, and one group less. After the last group everything waits for the next one, but for
    what was meant for one group alone."""
    partition = cursor.partition
    queue = partition.queue
    counts = partition.left(seq) > 0 or waits_for_nobody(partition)
    waited = partition.is_for(seq, cursor.group.gid) and not cursor.settled(seq)
    if last:
        partition.set_left(seq, 0)
        if int(seq) in partition.targets or partition.flags(seq) & TOMBSTONE:
            if counts:
                queue.depth -= 1
            let_go_of(engine, partition, seq)
            return
        if not counts:
            queue.depth += 1
        partition.watch_expiry(seq)
    elif waited and partition.settle_one(seq):
        settled_by_all(engine, partition, seq, keeps_settled(partition, seq))


def seek(engine: Engine, group: Group, floors: list[int]) -> None:
    """Go back to messages that are still kept, or forward past some that are not done: those count as purged."""
    engine.journal.flush(int(engine.now * 1000.0))
    note = NoteWriter(notes.SOUGHT)
    note.number(group.gid)
    for floor in floors:
        note.number(floor)
    engine.note(note, True)
    move_group(engine, group, floors)
    _expect_expiries(engine, group.queue)
    for cursor in group.cursors:
        if cursor.consumer is not None:
            engine.feed(cursor.consumer)


def move_group(engine: Engine, group: Group, floors: list[int]) -> None:
    for cursor, floor in zip(group.cursors, floors, strict=True):
        _end_leases(engine, cursor)
        engine.young.forget_ahead(cursor)
        _move(engine, cursor, _within(cursor.partition, floor))
    for cursor in group.cursors:
        cursor.rebuild()


def _move(engine: Engine, cursor: Cursor, floor: i64) -> None:
    partition = cursor.partition
    queue = partition.queue
    gid = cursor.group.gid
    counts = waits_for_nobody(partition)
    not_ours: list[int] = []
    cursor.count_entered()
    seq = partition.first_live(min(cursor.floor, floor))
    while seq < partition.next:
        settled = cursor.settled(seq)
        if not partition.is_for(seq, gid):
            if seq >= floor:
                not_ours.append(int(seq))
        elif seq < floor and not settled:
            cursor.counts[PURGED] += 1
            last = partition.settle_one(seq)
            keeps = keeps_settled(partition, seq)
            if cursor.losses is not None and not (queue.rules.compacted and (keeps or not last)):
                cursor.losses.lose(seq, seq + 1)
            if last:
                settled_by_all(engine, partition, seq, keeps)
        elif seq >= floor:
            if settled:
                if not counts and partition.left(seq) <= 0:
                    queue.depth += 1
                partition.set_left(seq, partition.left(seq) + 1)
                cursor.entered += 1
            partition.watch_expiry(seq)
        seq = partition.first_live(seq + 1)
    cursor.done = set(not_ours)
    cursor.floor = floor
    cursor.fresh = floor
    cursor.advance(floor)

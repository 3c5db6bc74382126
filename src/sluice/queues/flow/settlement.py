"""What becomes of a delivery: done, failed and tried again, given back, or dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.message import Message
from sluice.queues.flow import dead_letters
from sluice.queues.flow import history
from sluice.queues.log import frame_builder as notes
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import DYING, LEASED, READY, SETTLED, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import ACKED, DEAD, NoteWriter
from sluice.queues.names import message_id, parse_message_id
from sluice.queues.bodies.body_reads import BURY, Read
from sluice.queues.flow.removal import drop_lease, expire_if_due, settle_one
from sluice.queues.flow.delivery_tokens import Token

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


# ---- who may settle what


def lease_of(engine: Engine, group: Group, name: bytes, token: Token, identity: str) -> Lease:
    """The delivery that a settling client means, if it may still settle it."""
    found: Lease | None = None
    lease = group.own_ids.get(name) if group.own_ids else None
    while lease is not None:
        if _may_settle(engine, lease, token, identity):
            return _seen(engine, lease, identity)
        found = lease
        lease = lease.namesake
    pid, seq = parse_message_id(name)
    partition = engine.partitions.get(int(pid))
    if partition is not None and partition.queue is group.queue:
        lease = group.cursors[partition.number].leases.get(int(seq))
        if lease is not None:
            if _may_settle(engine, lease, token, identity):
                return _seen(engine, lease, identity)
            found = lease
    sign_of_life(engine, group, identity)
    if found is None:
        raise UnknownDelivery(name.decode("utf-8", "replace"))
    raise StaleDelivery(name.decode("utf-8", "replace"))


def _may_settle(engine: Engine, lease: Lease, token: Token, identity: str) -> bool:
    """Return whether the token fits or, without a token, `identity` held the delivery last.

    An empty `identity` is an operator, who may settle every delivery of the group. The tag of a lease from an earlier
    run is not known: then the token must be one that was issued to `identity`.
    """
    if token.counter:
        if lease.token != token.counter:
            return False
        if lease.tag:
            return lease.tag == token.tag
        cursor = lease.cursor
        return engine.tokens.fits(token, cursor.group.gid, identity, cursor.partition.pid, lease.seq)
    return not identity or lease.holder == identity


def _seen(engine: Engine, lease: Lease, identity: str) -> Lease:
    if lease.state != LEASED:
        sign_of_life(engine, lease.cursor.group, identity)
    return lease


def sign_of_life(engine: Engine, group: Group, identity: str) -> None:
    """A consumer speaks, if too late: it is not stalled any more."""
    for consumer in group.consumers:
        if consumer.stalled and consumer.identity == identity:
            consumer.stalled = False
            consumer.active_at = engine.now
            engine.rebalance(group)
            return


def name_of(lease: Lease) -> bytes:
    if lease.own_id:
        return lease.own_id
    message = lease.message
    if message is not None and message.id:
        return message.id
    return message_id(lease.cursor.partition.pid, lease.seq)


# ---- done


def finish(engine: Engine, lease: Lease, how: i64) -> None:
    cursor = lease.cursor
    seq = lease.seq
    if how == ACKED and (lease.history is not None or (lease.message is not None and lease.message.headers)):
        engine.past.remember(lease, name_of(lease).decode("utf-8", "replace"), engine.now)
    if lease.state == LEASED:
        consumer = lease.consumer
        full = consumer is not None and consumer.held >= consumer.prefetch
        take_back(engine, lease, True)
        if consumer is not None and full:
            engine.feed(consumer)  # one with room had been offered all there was
    elif how == ACKED:
        _settled_late(engine, lease)
    cursor.end_out(lease)
    drop_lease(lease)
    cursor.log_settled(seq, how, engine.journal)
    settle_one(engine, cursor, seq, how)
    engine.after_settle(cursor)


def _settled_late(engine: Engine, lease: Lease) -> None:
    """An ack of the last holder counts after the deadline too: the work is done."""
    for consumer in lease.cursor.group.consumers:
        if consumer.identity == lease.holder:
            consumer.settled_at = engine.now


def let_go(engine: Engine, lease: Lease, alive: bool) -> None:
    """A LEASED one leaves its consumer, who is offered another; `alive`: by that consumer's own doing."""
    consumer = lease.consumer
    take_back(engine, lease, alive)
    if consumer is not None:
        engine.feed(consumer)


def take_back(engine: Engine, lease: Lease, alive: bool) -> None:
    """The same, and the consumer is offered nothing."""
    consumer = lease.consumer
    lease.consumer = None
    lease.cursor.out -= 1
    lease.cursor.group.queue.deadlines.remove(lease)
    if consumer is None:
        return
    consumer.held -= 1
    if alive:
        consumer.settled_at = engine.now
        if consumer.stalled:
            consumer.stalled = False
            if consumer.group is not None:
                engine.rebalance(consumer.group)


# ---- not done


def check_held(lease: Lease) -> None:
    """Only who has it can fail it, give it back or keep it longer."""
    if lease.state != LEASED:
        raise StaleDelivery(name_of(lease).decode("utf-8", "replace"))


def time_to_give_up(engine: Engine, lease: Lease) -> float:
    """Return when `total_timeout` is over."""
    return _counts_from(engine, lease) + lease.cursor.group.queue.rules.total_timeout


def time_spent(engine: Engine, lease: Lease) -> float:
    """Return the seconds of `total_timeout` that a message has used up since its first attempt."""
    return engine.now - _counts_from(engine, lease)


def _counts_from(engine: Engine, lease: Lease) -> float:
    """Return the time from which `total_timeout` counts: the first attempt.

    For a message that was tried before this process started it is the start, less the time that was
    spent up to its last retry note or the snapshot. Dates of a previous run do not count: the clock
    may have jumped, and no client could work on the message while the broker was down.
    """
    if lease.first_at > engine.started_at:
        return lease.first_at
    return engine.started_at - lease.spent_before


def fail(engine: Engine, lease: Lease, delay: float, alive: bool) -> None:
    """One failure more: a retry after `delay` seconds (its backoff if that is negative), or the end."""
    cursor = lease.cursor
    queue = cursor.group.queue
    rules = queue.rules
    lease.failures += 1
    what = history.NACKED if alive else history.TIMED_OUT if delay < 0.0 else history.VANISHED
    told = history.tell_end(lease, what, engine.now, lease.description)
    if lease.failures > rules.max_retries:
        bury(engine, lease, "max_retries", lease.description, alive)
        return
    gives_up_at = time_to_give_up(engine, lease)
    if engine.now >= gives_up_at:
        bury(engine, lease, "timeout", lease.description, alive)
        return
    message = lease.message
    let_go(engine, lease, alive)
    if delay < 0.0:
        delay = rules.backoff(lease.failures, engine.draw())
    queue.retried += 1
    lease.due = engine.now + delay
    if lease.due > gives_up_at:
        lease.due = gives_up_at
    lease.message = None
    lease.state = WAITING
    if expire_if_due(engine, cursor.partition, lease.seq, message):
        return
    _note_retry(engine, lease, told)
    if delay > 0.0:
        engine.timers.wait_for_retry(lease, lease.due)
    else:
        make_ready(engine, lease)


def _note_retry(engine: Engine, lease: Lease, told: i64) -> None:
    note = NoteWriter(notes.RETRY)
    note.number(lease.cursor.group.gid)
    note.number(lease.cursor.partition.pid)
    write_retry(note, lease)
    history.write_steps(note, lease.history, told)
    note.number(lease.token)
    note.real(time_spent(engine, lease))
    engine.journal.add_note(note.value(), int(engine.now * 1000.0), False)


def write_retry(note: NoteWriter, lease: Lease) -> None:
    note.number(lease.seq)
    note.number(lease.failures)
    note.real(lease.due)
    note.real(lease.first_at)
    note.real(lease.last_at)
    note.text(lease.description)


def make_ready(engine: Engine, lease: Lease) -> None:
    """A message that failed may be leased again, until it is time to give it up."""
    cursor = lease.cursor
    lease.state = READY
    cursor.put_back(lease.seq, cursor.partition.priority(lease.seq), lease.key)
    engine.timers.wait_for_retry(lease, time_to_give_up(engine, lease))
    if cursor.consumer is not None:
        engine.feed(cursor.consumer)


def retry_due(engine: Engine, lease: Lease, due: float) -> None:
    """A time that a failed message waited for has come: its retry, or the moment to give it up."""
    if lease.state == WAITING:
        if lease.due != due:
            return
        if engine.now >= time_to_give_up(engine, lease):
            bury(engine, lease, "timeout", lease.description, True)
        else:
            make_ready(engine, lease)
    elif lease.state == READY and lease.failures:
        if engine.now >= time_to_give_up(engine, lease):
            bury(engine, lease, "timeout", lease.description, True)


def release(engine: Engine, lease: Lease) -> None:
    """Given back unused: not a failure. What has never failed is as if it had never been delivered."""
    cursor = lease.cursor
    message = lease.message
    _note_returned(engine, lease, history.tell_end(lease, history.RELEASED, engine.now, ""))
    let_go(engine, lease, True)
    if lease.failures:
        lease.message = None
        make_ready(engine, lease)
        expire_if_due(engine, cursor.partition, lease.seq, message)
        return
    priority = cursor.partition.priority(lease.seq)
    if lease.history is not None:
        history.give_back(cursor, lease.seq, lease.history)
    drop_lease(lease)
    cursor.put_back(lease.seq, priority, lease.key)
    expire_if_due(engine, cursor.partition, lease.seq, message)
    if cursor.consumer is not None:
        engine.feed(cursor.consumer)


def _note_returned(engine: Engine, lease: Lease, told: i64) -> None:
    note = NoteWriter(notes.RETURNED)
    note.number(lease.cursor.group.gid)
    note.number(lease.cursor.partition.pid)
    note.number(lease.seq)
    history.write_steps(note, lease.history, told)
    engine.journal.add_note(note.value(), int(engine.now * 1000.0), False)


# ---- never again


def bury(engine: Engine, lease: Lease, reason: str, description: str, alive: bool) -> None:
    """To the dead letters, in one frame with its end here. Without its body at hand, that is read first."""
    if lease.state == SETTLED or lease.state == DYING:
        raise StaleDelivery(name_of(lease).decode("utf-8", "replace"))
    message = lease.message
    if message is None:
        message = lease.cursor.partition.young.get(int(lease.seq))
    if lease.state == LEASED:
        if reason != "max_retries" and reason != "timeout":
            history.tell_delivery(lease)  # those have failed, and it was told then
        let_go(engine, lease, alive)
        lease.state = WAITING
    if message is not None:
        _die(engine, lease, message, reason, description)
        return
    if lease.state == READY:
        lease.cursor.hold_back(lease.seq)
    lease.state = DYING
    lease.description = description
    ask_for_body(engine, lease, reason)


def ask_for_body(engine: Engine, lease: Lease, reason: str) -> None:
    partition = lease.cursor.partition
    read = Read(BURY, partition, [int(lease.seq)], [int(partition.address(lease.seq))])
    read.lease = lease
    read.reason = reason
    engine.reads.append(read)


def body_came(engine: Engine, lease: Lease, message: Message, reason: str) -> None:
    if lease.state == DYING:
        _die(engine, lease, message, reason, lease.description)


def _die(engine: Engine, lease: Lease, message: Message, reason: str, description: str) -> None:
    dead_letters.bury(engine, lease, message, reason, description)
    finish(engine, lease, DEAD)


# ---- and what follows from it


def look_at_gates(engine: Engine, cursor: Cursor) -> None:
    """A cursor's floor has come to a gate: it may have been the one that others waited for."""
    queue = cursor.group.queue
    cursor.set_gate_mark()
    for other in cursor.group.cursors:
        other.open_gates()
        if other.consumer is not None:
            engine.feed(other.consumer)
    while queue.gates:
        for number, floor in enumerate(queue.gates[0].floors):
            if queue.partitions[number].first_live(0) < floor:
                return
        queue.gates.pop(0)

"""What is said of a delivery that was made in an earlier life: before the queue had its present owner, or the server
was started.

No record tells what was leased, so the message counts as free from the start on. Late work is work all the same, and a
late failure is one, as long as nobody has the message again: it is found by its place and the token of its delivery,
taken up again for whoever had it, and then settled like any other. What has failed keeps its token, in the log as well:
so what was counted before, and is said again because its answer was lost, is not counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.cursor import Cursor
from sluice.queues.delivery import LEASED, READY, WAITING, Lease
from sluice.queues.group import Group
from sluice.queues.journal import ACKED
from sluice.queues.names import parse_message_id
from sluice.queues.removal import take_from
from sluice.queues.settling import finish as end

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


def _cursor_of(engine: Engine, group: Group, name: bytes, token: i64) -> Cursor | None:
    """Return the cursor of the message, if an earlier run can have delivered it.

    No record tells which tokens an earlier run gave out. So the message must have been there before this run, or any
    number below `first_token` would settle it.
    """
    if token and not 0 < token < engine.first_token:
        return None
    pid, seq = parse_message_id(name)
    partition = engine.partitions.get(int(pid))
    if partition is None or partition.queue is not group.queue or not partition.holds(seq):
        return None
    cursor = group.cursors[partition.number]
    if cursor.settled(seq) or seq >= partition.committed or not partition.is_for(seq, group.gid):
        return None
    if int(seq) in partition.delayed or seq >= partition.restored:
        return None
    return cursor


def finish(engine: Engine, group: Group, name: bytes, token: i64, client: str) -> bool:
    """Done; whether it counts."""
    cursor = _cursor_of(engine, group, name, token)
    if cursor is None:
        return False
    _, seq = parse_message_id(name)
    lease = cursor.leases.get(int(seq))
    if lease is None:
        take_from(engine, cursor, seq, ACKED, None)
        return True
    if not token or (lease.state == LEASED and lease.token != token and lease.holder != client):
        return False
    end(engine, lease, ACKED)
    return True


def retake(engine: Engine, group: Group, name: bytes, token: i64, client: str) -> Lease | None:
    """The delivery again, LEASED until a new deadline; None when the message is done, with another consumer, or must
    wait for an earlier one of its key. No consumer has it on its list, for it was not given out: its own words settle
    it, or the deadline does. One that has failed under this very token is what it is: it was counted. What the same
    client was given again meanwhile, because its session lasts, it speaks of by the old token as well."""
    cursor = _cursor_of(engine, group, name, token)
    if cursor is None:
        return None
    _, seq = parse_message_id(name)
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        if token and (token == lease.token or (lease.state == LEASED and lease.holder == client)):
            return lease
        if token < lease.token or (lease.state != WAITING and lease.state != READY):
            return None
        if lease.state == READY and not cursor.take_out_of_turn(seq):
            return None
    else:
        if not cursor.take_out_of_turn(seq):
            return None
        lease = Lease(cursor, seq, cursor.key_of(seq))
        lease.first_at = engine.now
        cursor.leases[int(seq)] = lease
    if cursor.ahead:
        engine.young.drop_ahead(cursor, seq)
    _hold(engine, lease, token, client)
    return lease


def _hold(engine: Engine, lease: Lease, token: i64, client: str) -> None:
    queue = lease.cursor.group.queue
    now = engine.now
    lease.holder = client
    lease.state = LEASED
    lease.token = token
    lease.attempt = lease.failures + 1
    lease.last_at = now
    lease.since = now
    lease.deadline = now + queue.rules.delivery_timeout
    lease.cursor.out += 1
    queue.deadlines.add(lease)
    if queue.watch_at == 0.0:
        engine.timers.watch(queue, lease.deadline)

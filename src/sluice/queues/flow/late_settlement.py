"""What is said of a delivery that was made in an earlier life: before the queue had its present owner, or the server
was started.

No record tells what was leased, so the message counts as free from the start on. Late work is work all the same, and a
late failure is one, as long as nobody has the message again: it is found by its place, the token proves that this
client received it, it is taken up again for that client, and then settled like any other. What has failed keeps its
token, in the log as well: so what was counted before, and is said again because its answer was lost, is not counted
twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import ACKED
from sluice.queues.names import parse_message_id
from sluice.queues.flow.removal import take_from
from sluice.queues.flow.settlement import finish as end
from sluice.queues.flow.delivery_tokens import Token

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


def cursor_of(engine: Engine, group: Group, name: bytes) -> Cursor | None:
    """Return the cursor of the message called `name`, if it is unsettled and an earlier run can have delivered it."""
    cursor = _cursor_at(engine, group, name)
    if cursor is None:
        return None
    _, seq = parse_message_id(name)
    partition = cursor.partition
    if seq >= partition.committed or int(seq) in partition.delayed or seq >= partition.restored:
        return None
    return cursor


def _cursor_at(engine: Engine, group: Group, name: bytes) -> Cursor | None:
    """Return the cursor of the message called `name`, if it is for the group and unsettled."""
    pid, seq = parse_message_id(name)
    partition = engine.partitions.get(int(pid))
    if partition is None or partition.queue is not group.queue or not partition.holds(seq):
        return None
    cursor = group.cursors[partition.number]
    if cursor.settled(seq) or not partition.is_for(seq, group.gid):
        return None
    return cursor


def _cursor_for(engine: Engine, group: Group, name: bytes, token: Token, identity: str) -> Cursor | None:
    """Return the cursor of the message, if `token` proves that an earlier run delivered it to `identity`.

    Counter 0 is no token. The caller decides who may settle without one, and then the name is enough.
    """
    if token.counter < 0 or (token.counter and token.run == engine.tokens.run):
        return None
    cursor = cursor_of(engine, group, name)
    if cursor is None or not token.counter:
        return cursor
    _, seq = parse_message_id(name)
    if not engine.tokens.fits(token, group.gid, identity, cursor.partition.pid, seq):
        return None
    return cursor


def is_forged(engine: Engine, group: Group, name: bytes, token: Token, identity: str, known: bool) -> bool:
    """Return whether `token` was never issued to `identity` for the message called `name`.

    Only for a message that the group has still to settle: of others, no token says anything any more. `known`: there is
    a delivery by that name. If the name tells no place, the token should have: each token of such a delivery does.

    A token of this run for a delivery that is over may be one that another client received and handed on.
    It settles nothing, genuine or not, and counts as stale: its client, which the tag depends on, is not known here.
    """
    pid, seq = parse_message_id(name)
    if pid < 0:
        return known
    cursor = _cursor_at(engine, group, name)
    if cursor is None:
        return False
    if engine.tokens.has_issued(token) and _is_superseded(cursor, seq, token.counter):
        return False
    return not engine.tokens.fits(token, group.gid, identity, cursor.partition.pid, seq)


def _is_superseded(cursor: Cursor, seq: i64, counter: i64) -> bool:
    """Return whether a delivery with this counter would be over: delivered again since, or released."""
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        return counter < lease.token
    return cursor.returned is not None and int(seq) in cursor.returned


def finish(engine: Engine, group: Group, name: bytes, token: Token, identity: str) -> bool:
    """Done; whether it counts."""
    cursor = _cursor_for(engine, group, name, token, identity)
    if cursor is None:
        return False
    _, seq = parse_message_id(name)
    lease = cursor.leases.get(int(seq))
    if lease is None:
        take_from(engine, cursor, seq, ACKED, None)
        return True
    if not token.counter or (
        lease.state == LEASED and lease.token != token.counter and lease.holder != identity
    ):
        return False
    end(engine, lease, ACKED)
    return True


def retake(engine: Engine, group: Group, name: bytes, token: Token, identity: str) -> Lease | None:
    """The delivery again, LEASED until a new deadline; None when the message is done, with another consumer, or must
    wait for an earlier one of its key. No consumer has it on its list, for it was not given out: its own words settle
    it, or the deadline does. One that has failed under this very token is what it is: it was counted. What the same
    client was given again meanwhile, because its session lasts, it speaks of by the old token as well."""
    cursor = _cursor_for(engine, group, name, token, identity)
    if cursor is None:
        return None
    _, seq = parse_message_id(name)
    counter = token.counter
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        if counter and (counter == lease.token or (lease.state == LEASED and lease.holder == identity)):
            return lease
        if counter < lease.token or (lease.state != WAITING and lease.state != READY):
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
    _hold(engine, lease, token, identity)
    return lease


def _hold(engine: Engine, lease: Lease, token: Token, identity: str) -> None:
    queue = lease.cursor.group.queue
    now = engine.now
    lease.holder = identity
    lease.state = LEASED
    lease.token = token.counter
    lease.tag = token.tag
    lease.attempt = lease.failures + 1
    lease.last_at = now
    lease.since = now
    lease.deadline = now + queue.rules.delivery_timeout
    lease.cursor.out += 1
    queue.deadlines.add(lease)
    if queue.watch_at == 0.0:
        engine.timers.watch(queue, lease.deadline)

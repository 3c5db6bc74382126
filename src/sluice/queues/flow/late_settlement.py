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

from sluice.queues.flow.delivery_tokens import DeliveryToken
from sluice.queues.flow.removal import settle_unleased
from sluice.queues.flow.settlement import finish_delivery as end
from sluice.queues.log.frame_builder import ACKED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.names import parse_message_id

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


def find_restored_cursor(engine: Engine, group: Group, message_id: bytes) -> Cursor | None:
    """Return the cursor of the message called `name`, if it is unsettled and an earlier run can have delivered it."""
    cursor = _find_unsettled_cursor(engine, group, message_id)
    if cursor is None:
        return None
    _, seq = parse_message_id(message_id)
    partition = cursor.partition
    if (
        seq >= partition.committed_end
        or int(seq) in partition.delayed_seqs
        or seq >= partition.restored_end
    ):
        return None
    return cursor


def _find_unsettled_cursor(engine: Engine, group: Group, message_id: bytes) -> Cursor | None:
    """Return the cursor of the message called `name`, if it is for the group and unsettled."""
    pid, seq = parse_message_id(message_id)
    partition = engine.partitions.get(int(pid))
    if partition is None or partition.queue is not group.queue or not partition.holds(seq):
        return None
    cursor = group.cursors[partition.number]
    if cursor.is_settled(seq) or not partition.is_for_group(seq, group.gid):
        return None
    return cursor


def _find_proven_cursor(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> Cursor | None:
    """Return the cursor of the message, if `token` proves that an earlier run delivered it to `identity`.

    Counter 0 is no token. The caller decides who may settle without one, and then the name is enough.
    """
    if token.counter < 0 or (token.counter and token.run == engine.tokens.run):
        return None
    cursor = find_restored_cursor(engine, group, message_id)
    if cursor is None or not token.counter:
        return cursor
    _, seq = parse_message_id(message_id)
    if not engine.tokens.is_valid(token, group.gid, identity, cursor.partition.pid, seq):
        return None
    return cursor


def is_token_forged(
    engine: Engine,
    group: Group,
    message_id: bytes,
    token: DeliveryToken,
    identity: str,
    is_known: bool,
) -> bool:
    """Return whether `token` was never issued to `identity` for the message called `name`.

    Only for a message that the group has still to settle: of others, no token says anything any more. `known`: there is
    a delivery by that name. If the name tells no place, the token should have: each token of such a delivery does.

    A token of this run for a delivery that is over may be one that another client received and handed on.
    It settles nothing, genuine or not, and counts as stale: its client, which the tag depends on, is not known here.
    """
    pid, seq = parse_message_id(message_id)
    if pid < 0:
        return is_known
    cursor = _find_unsettled_cursor(engine, group, message_id)
    if cursor is None:
        return False
    if engine.tokens.has_issued(token) and _is_superseded(cursor, seq, token.counter):
        return False
    return not engine.tokens.is_valid(token, group.gid, identity, cursor.partition.pid, seq)


def _is_superseded(cursor: Cursor, seq: i64, counter: i64) -> bool:
    """Return whether a delivery with this counter would be over: delivered again since, or released."""
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        return counter < lease.token_counter
    return cursor.released_history is not None and int(seq) in cursor.released_history


def ack_late(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> bool:
    """Done; whether it counts."""
    cursor = _find_proven_cursor(engine, group, message_id, token, identity)
    if cursor is None:
        return False
    _, seq = parse_message_id(message_id)
    lease = cursor.leases.get(int(seq))
    if lease is None:
        settle_unleased(engine, cursor, seq, ACKED, None)
        return True
    if not token.counter or (
        lease.state == LEASED and lease.token_counter != token.counter and lease.holder != identity
    ):
        return False
    end(engine, lease, ACKED)
    return True


def reclaim_lease(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> Lease | None:
    """The delivery again, LEASED until a new deadline; None when the message is done, with another consumer, or must
    wait for an earlier one of its key. No consumer has it on its list, for it was not given out: its own words settle
    it, or the deadline does. One that has failed under this very token is what it is: it was counted. What the same
    client was given again meanwhile, because its session lasts, it speaks of by the old token as well."""
    cursor = _find_proven_cursor(engine, group, message_id, token, identity)
    if cursor is None:
        return None
    _, seq = parse_message_id(message_id)
    counter = token.counter
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        if counter and (
            counter == lease.token_counter or (lease.state == LEASED and lease.holder == identity)
        ):
            return lease
        if counter < lease.token_counter or (lease.state != WAITING and lease.state != READY):
            return None
        if lease.state == READY and not cursor.select_out_of_order(seq):
            return None
    else:
        if not cursor.select_out_of_order(seq):
            return None
        lease = Lease(cursor, seq, cursor.key_hash_of(seq))
        lease.first_delivered_at = engine.now
        cursor.leases[int(seq)] = lease
    if cursor.prefetched_bodies:
        engine.body_cache.drop_prefetched(cursor, seq)
    _restore_lease(engine, lease, token, identity)
    return lease


def _restore_lease(engine: Engine, lease: Lease, token: DeliveryToken, identity: str) -> None:
    queue = lease.cursor.group.queue
    now = engine.now
    lease.holder = identity
    lease.state = LEASED
    lease.token_counter = token.counter
    lease.token_tag = token.tag
    lease.attempt = lease.failures + 1
    lease.last_delivered_at = now
    lease.lease_started_at = now
    lease.deadline = now + queue.rules.delivery_timeout
    lease.cursor.in_flight += 1
    queue.deadlines.add(lease)
    if queue.deadline_check_at == 0.0:
        engine.timers.schedule_deadline_check(queue, lease.deadline)

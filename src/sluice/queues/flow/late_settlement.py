"""Settlement of deliveries from a previous run: before a restart, or before a change of owner.

No record says which messages were leased, so after a start all messages are free. Late acks and
late failures still count as long as no other consumer holds the message: the message id gives its
location, the token proves that this client received it, the lease is recreated for that client and
then settled like any other. A failed delivery keeps its token, also in the log: a failure that was
counted, and is sent again because its acknowledgement was lost, does not count twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.flow.delivery_tokens import DeliveryToken
from sluice.queues.flow.removal import settle_unleased
from sluice.queues.flow.settlement import finish_delivery
from sluice.queues.log.notes import ACKED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.names import parse_message_id

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


def find_restored_cursor(engine: Engine, group: Group, message_id: bytes) -> Cursor | None:
    """Return the cursor of an unsettled message that may be from an earlier run, or None."""
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
    """Return the cursor of a message that is for the group and unsettled, else None."""
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
    """Return the cursor if `token` proves that an earlier run delivered the message to `identity`.

    Counter 0 is no token. The caller decides which clients may settle without a token; then the
    message id is enough.
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
    """Return whether `token` was never issued to `identity` for this message.

    Only for a message that the group has still to settle; for other messages, tokens have no
    meaning. `is_known`: there is a lease with that message id. If the id contains no location, the
    token should: each token of such a delivery does.

    A token of this run for an ended delivery may be one that another client received and passed on.
    It settles nothing, genuine or not, and counts as stale: the tag depends on the identity of its
    client, which is not known here.
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
    """Return whether a delivery with this counter has ended: redelivered since, or released."""
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        return counter < lease.token_counter
    return cursor.released_history is not None and int(seq) in cursor.released_history


def ack_late(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> bool:
    """Acknowledge a message of a previous run; return whether the acknowledgement counts."""
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
    finish_delivery(engine, lease, ACKED)
    return True


def reclaim_lease(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> Lease | None:
    """Recreate a lease with a new deadline.

    Return None if the message is settled, leased by another consumer, or must wait for an earlier
    one of its key. The lease is in no consumer's list, because it was not dispatched: the client
    settles it, or the deadline ends it. A lease that failed under this very token is returned as it
    is: the failure was counted. A client whose session continues may also use the old token for a
    message that was delivered to it again.
    """
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

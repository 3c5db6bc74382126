"""Lease lookup: which delivery a client wants to settle, and whether token or holder match.

Group membership and access rules are checked before (`settlement_topics` of the broker).

A delivery of this run has a lease, and its token is compared with that of the lease. For deliveries
of a previous run (before a restart, or before a change of owner) no record says which messages were
leased, so after a start all messages are free. Late acks and late failures still count as long as
no other consumer holds the message: the message id gives its location, the token proves that this
client received it, the lease is recreated for that client and then settled like any other. A failed
delivery keeps its token, also in the log: a failure that was counted, and is sent again because its
acknowledgement was lost, does not count twice.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.bodies import BodyCache
from sluice.queues.flow.delivery.delivery_tokens import DeliveryToken, DeliveryTokens
from sluice.queues.flow.delivery.settlement import Settlement
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.timers import Timers
from sluice.queues.log import ACKED
from sluice.queues.model import BACKOFF, LEASED, READY, Cursor, EngineState, Group, Lease
from sluice.queues.names import parse_message_id


class LeaseLookup:
    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        removal: Removal,
        settlement: Settlement,
        tokens: DeliveryTokens,
        body_cache: BodyCache,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._removal: Removal = removal
        self._settlement: Settlement = settlement
        self._tokens: DeliveryTokens = tokens
        self._body_cache: BodyCache = body_cache

    # ---- deliveries with a lease

    def find_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease:
        """Return the lease that a client wants to settle, if the client may still settle it."""
        found: Lease | None = None
        lease = group.leases_by_message_id.get(message_id) if group.leases_by_message_id else None
        while lease is not None:
            if self._may_settle(lease, token, identity):
                return self._on_found(lease, identity)
            found = lease
            lease = lease.next_same_id
        pid, seq = parse_message_id(message_id)
        partition = self._state.partitions.get(int(pid))
        if partition is not None and partition.queue is group.queue:
            lease = group.cursors[partition.number].leases.get(int(seq))
            if lease is not None:
                if self._may_settle(lease, token, identity):
                    return self._on_found(lease, identity)
                found = lease
        self._dispatch_schedule.clear_stalled(group, identity)
        if found is None:
            raise UnknownDelivery(message_id.decode("utf-8", "replace"))
        raise StaleDelivery(message_id.decode("utf-8", "replace"))

    def _may_settle(self, lease: Lease, token: DeliveryToken, identity: str) -> bool:
        """Return whether the token matches or, without a token, `identity` was the last holder.

        An empty `identity` is an operator, who may settle every delivery of the group. The tag of a
        lease from an earlier run is not known: then the token must be one that was issued to
        `identity`.
        """
        if token.counter:
            if lease.token_counter != token.counter:
                return False
            if lease.token_tag:
                return lease.token_tag == token.tag
            cursor = lease.cursor
            return self._tokens.is_valid(
                token, cursor.group.gid, identity, cursor.partition.pid, lease.seq
            )
        return not identity or lease.holder == identity

    def _on_found(self, lease: Lease, identity: str) -> Lease:
        """Return `lease`; a client that settles even too late is not stalled."""
        if lease.state != LEASED:
            self._dispatch_schedule.clear_stalled(lease.cursor.group, identity)
        return lease

    # ---- deliveries of a previous run

    def _find_restored_cursor(self, group: Group, message_id: bytes) -> Cursor | None:
        """Return the cursor of an unsettled message that may be from an earlier run, or None."""
        cursor = self._find_unsettled_cursor(group, message_id)
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

    def _find_unsettled_cursor(self, group: Group, message_id: bytes) -> Cursor | None:
        """Return the cursor of a message that is for the group and unsettled, else None."""
        pid, seq = parse_message_id(message_id)
        partition = self._state.partitions.get(int(pid))
        if partition is None or partition.queue is not group.queue or not partition.holds(seq):
            return None
        cursor = group.cursors[partition.number]
        if cursor.is_settled(seq) or not partition.is_for_group(seq, group.gid):
            return None
        return cursor

    def _find_proven_cursor(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Cursor | None:
        """Return the cursor if `token` proves that an earlier run delivered it to `identity`.

        Counter 0 is no token. The caller decides which clients may settle without a token; then the
        message id is enough.
        """
        if token.counter < 0 or (token.counter and token.run == self._tokens.run):
            return None
        cursor = self._find_restored_cursor(group, message_id)
        if cursor is None or not token.counter:
            return cursor
        _, seq = parse_message_id(message_id)
        if not self._tokens.is_valid(token, group.gid, identity, cursor.partition.pid, seq):
            return None
        return cursor

    def is_from_previous_run(self, group: Group, message_id: bytes) -> bool:
        """Return whether the message is unsettled and a previous run may have delivered it."""
        return self._find_restored_cursor(group, message_id) is not None

    def is_token_forged(
        self,
        group: Group,
        message_id: bytes,
        token: DeliveryToken,
        identity: str,
        is_known: bool,
    ) -> bool:
        """Return whether `token` was never issued to `identity` for this message.

        Only for a message that the group has still to settle; for other messages, tokens have no
        meaning. `is_known`: there is a lease with that message id. If the id contains no location,
        the token should: each token of such a delivery does.

        A token of this run for an ended delivery may be one that another client received and passed
        on. It settles nothing, genuine or not, and counts as stale: the tag depends on the identity
        of its client, which is not known here.
        """
        pid, seq = parse_message_id(message_id)
        if pid < 0:
            return is_known
        cursor = self._find_unsettled_cursor(group, message_id)
        if cursor is None:
            return False
        if self._tokens.has_issued(token) and _is_superseded(cursor, seq, token.counter):
            return False
        return not self._tokens.is_valid(token, group.gid, identity, cursor.partition.pid, seq)

    def ack_late(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> bool:
        """Acknowledge a message of a previous run; return whether the acknowledgement counts."""
        cursor = self._find_proven_cursor(group, message_id, token, identity)
        if cursor is None:
            return False
        _, seq = parse_message_id(message_id)
        lease = cursor.leases.get(int(seq))
        if lease is None:
            self._removal.settle_unleased(cursor, seq, ACKED, None)
            return True
        if not token.counter or (
            lease.state == LEASED
            and lease.token_counter != token.counter
            and lease.holder != identity
        ):
            return False
        self._settlement.settle_lease(lease, ACKED)
        return True

    def reclaim_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease | None:
        """Recreate a lease with a new deadline.

        Return None if the message is settled, leased by another consumer, or must wait for an
        earlier one of its key. The lease is in no consumer's list, because it was not dispatched:
        the client settles it, or the deadline ends it. A lease that failed under this very token is
        returned as it is: the failure was counted. A client whose session continues may also use
        the old token for a message that was delivered to it again.
        """
        cursor = self._find_proven_cursor(group, message_id, token, identity)
        if cursor is None:
            return None
        _, seq = parse_message_id(message_id)
        counter = token.counter
        lease = cursor.leases.get(int(seq))
        if lease is not None:
            if counter and (
                counter == lease.token_counter
                or (lease.state == LEASED and lease.holder == identity)
            ):
                return lease
            if counter < lease.token_counter or (lease.state != BACKOFF and lease.state != READY):
                return None
            if lease.state == READY and not cursor.choose_before_earlier(seq):
                return None
        else:
            if not cursor.choose_before_earlier(seq):
                return None
            lease = cursor.add_lease(seq, self._state.now)
        if cursor.prefetched_bodies:
            self._body_cache.take_prefetched(cursor, int(seq))
        lease.token_counter = counter
        lease.token_tag = token.tag
        cursor.resume_delivery(lease, identity, self._state.now)
        self._timers.watch_deadline(lease)
        return lease


def _is_superseded(cursor: Cursor, seq: i64, counter: i64) -> bool:
    """Return whether a delivery with this counter has ended: redelivered since, or released."""
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        return counter < lease.token_counter
    return cursor.released_history is not None and int(seq) in cursor.released_history

"""Lease: the delivery of one message to one group, with its holder, deadline and failures.

    State      Event     becomes
    LEASED     ack       (settled)          LEASED     expire, nack, vanish    WAITING, or dead
    LEASED     release   READY              WAITING    ack by its last holder  (settled)
    WAITING    due       READY              READY      lease                   LEASED
    WAITING, READY       reject, give up    DEAD_LETTERING until its body is read, then dead

A late ack by the last holder counts, because the work was done. Only messages that have been leased
at least once have a lease object; a message before its first delivery is only a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.names import client_id_of

if TYPE_CHECKING:
    from sluice.queues.flow.history import HistoryEvent
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.ports import Consumer

LEASED: Final = 0
WAITING: Final = 1
READY: Final = 2
SETTLED: Final = 3
DEAD_LETTERING: Final = 4


class Lease:
    def __init__(self, cursor: Cursor, seq: i64, key_hash: i64) -> None:
        self.cursor: Cursor = cursor
        self.seq: i64 = seq
        self.key_hash: i64 = key_hash
        self.state: i64 = READY
        self.message: Message | None = None  # present while leased; read again for a retry
        self.consumer: Consumer | None = None
        # Identity of the last consumer: see `names.make_identity`.
        self.holder: str = ""
        self.token_counter: i64 = 0  # counter of the delivery token
        self.token_tag: i64 = 0  # tag of the token; 0: unknown, issued in a previous run
        self.failures: i64 = 0
        self.attempt: i64 = 0  # number of deliveries, without released ones
        self.first_delivered_at: float = 0.0
        # Seconds of `total_timeout` that previous runs have used.
        self.spent_before_start: float = 0.0
        self.last_delivered_at: float = 0.0
        # Start of the deadline: the delivery, or its last extension.
        self.lease_started_at: float = 0.0
        self.deadline: float = 0.0
        self.retry_at: float = 0.0  # while WAITING
        self.description: str = ""
        self.history: list[HistoryEvent] | None = None  # created with the first failure
        self.publisher_message_id: bytes = b""  # the key in `Group.leases_by_message_id`
        # Another lease with the same id: the publisher used it twice.
        self.next_same_id: Lease | None = None
        self.previous_same_id: Lease | None = None  # the lease whose `next_same_id` this is
        self.previous_in_deadlines: Lease | None = None  # neighbors in order of deadline
        self.next_in_deadlines: Lease | None = None

    def holder_client_id(self) -> str:
        """Return the client id of the last holder, for display."""
        return client_id_of(self.holder)


class DeadlineList:
    """Leases in the order of their deadlines.

    All have the same timeout, so a new or extended lease goes to the end, and any lease can be
    removed in constant time: no heap, and no stale entries of settled deliveries.
    """

    def __init__(self) -> None:
        self.first: Lease | None = None
        self._last: Lease | None = None

    def add(self, lease: Lease) -> None:
        last = self._last
        lease.previous_in_deadlines = last
        lease.next_in_deadlines = None
        if last is None:
            self.first = lease
        else:
            last.next_in_deadlines = lease
        self._last = lease

    def remove(self, lease: Lease) -> None:
        previous = lease.previous_in_deadlines
        following = lease.next_in_deadlines
        if previous is None:
            self.first = following
        else:
            previous.next_in_deadlines = following
        if following is None:
            self._last = previous
        else:
            following.previous_in_deadlines = previous
        lease.previous_in_deadlines = None
        lease.next_in_deadlines = None

    def set_timeout(self, seconds: float) -> None:
        """Set another timeout for all leases; their order does not change."""
        lease = self.first
        while lease is not None:
            lease.deadline = lease.lease_started_at + seconds
            lease = lease.next_in_deadlines

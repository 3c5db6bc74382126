"""Lease: the deliveries of one message to one group, with holder, deadline and failures.

A lease object exists from the first delivery of a message in a group until its settlement, whether
a consumer holds the message or not: a message is *leased* in the state LEASED only. Before its
first delivery it is only a sequence.

`TRANSITIONS` lists every change of state: `Lease.change` is the only place that changes it, and the
interpreted build refuses a change that is not in the table. The table in ARCHITECTURE.md is made
from it.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.names import client_id_of

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.group import Consumer
    from sluice.queues.model.history import HistoryEvent

# ---- states

LEASED: Final = 0  # a consumer holds it until the deadline
BACKOFF: Final = 1  # it failed, and waits for its retry or its dead letter
READY: Final = 2  # it can be leased
ENDED: Final = 3  # the object is removed: settled, or as if never delivered
DEAD_LETTERING: Final = 4  # given up; its body is read for the dead letter

STATE_NAMES: Final = ("LEASED", "BACKOFF", "READY", "ENDED", "DEAD_LETTERING")
_STATE_MASK: Final = 7

# ---- events. An event always leads to the same state, which is in its low three bits: so a change
# of state is one assignment.

DISPATCH: Final = 0x10 | LEASED
RECLAIM: Final = 0x20 | LEASED
FAIL: Final = 0x10 | BACKOFF
REJECT: Final = 0x20 | BACKOFF
GIVE_UP: Final = 0x30 | BACKOFF
AWAIT_RETRY: Final = 0x40 | BACKOFF
DUE: Final = 0x10 | READY
RELEASE: Final = 0x20 | READY
SETTLE: Final = 0x10 | ENDED
FORGET: Final = 0x20 | ENDED
REVOKE: Final = 0x30 | ENDED
READ_BODY: Final = 0x10 | DEAD_LETTERING

EVENT_MEANINGS: Final = {
    DISPATCH: "chosen, and a consumer has capacity",
    RECLAIM: "settled by the client that a previous run delivered it to",
    FAIL: "nack, deadline, or the consumer left the group",
    REJECT: "rejected, or failed for the last time: becomes a dead letter",
    GIVE_UP: "chosen after `total_timeout`: becomes a dead letter",
    AWAIT_RETRY: "read from the log after a restart, or rescheduled by a command",
    DUE: "the backoff is over",
    RELEASE: "released after earlier failures",
    SETTLE: "acknowledged (late acks count), dead-lettered, expired, purged or replaced",
    FORGET: "released without failures: as if never delivered",
    REVOKE: "queue or group deleted, or the group was moved to another position",
    READ_BODY: "given up, and the body for the dead letter is not in memory",
}

TRANSITIONS: Final[dict[tuple[int, int], int]] = {
    (READY, DISPATCH): LEASED,
    (READY, RECLAIM): LEASED,
    (READY, GIVE_UP): BACKOFF,
    (READY, AWAIT_RETRY): BACKOFF,
    (READY, SETTLE): ENDED,
    (READY, REVOKE): ENDED,
    (READY, READ_BODY): DEAD_LETTERING,
    (LEASED, FAIL): BACKOFF,
    (LEASED, REJECT): BACKOFF,
    (LEASED, RELEASE): READY,
    (LEASED, SETTLE): ENDED,
    (LEASED, FORGET): ENDED,
    (LEASED, REVOKE): ENDED,
    (BACKOFF, RECLAIM): LEASED,
    (BACKOFF, AWAIT_RETRY): BACKOFF,
    (BACKOFF, DUE): READY,
    (BACKOFF, SETTLE): ENDED,
    (BACKOFF, REVOKE): ENDED,
    (BACKOFF, READ_BODY): DEAD_LETTERING,
    (DEAD_LETTERING, SETTLE): ENDED,
    (DEAD_LETTERING, REVOKE): ENDED,
}


class Lease:
    """The deliveries of one message to one group, one after the other, until it is settled."""

    def __init__(self, cursor: Cursor, seq: i64, key_hash: i64) -> None:
        self.cursor: Cursor = cursor
        self.seq: i64 = seq
        self.key_hash: i64 = key_hash
        self.state: i64 = READY  # changed by `change` only
        self.limited_key: i64 = 0  # the key under which `KeyLimits` counts the delivery
        self.message: Message | None = None  # only while LEASED; read again for a retry
        self.consumer: Consumer | None = None
        # Identity of the client that holds it or held it last: see `names.make_identity`.
        self.holder: str = ""
        self.token_counter: i64 = 0  # counter of the delivery token
        self.token_tag: i64 = 0  # tag of the token; 0: unknown, issued in a previous run
        self.failures: i64 = 0
        self.attempt: i64 = 0  # of the last delivery: the failures before it, plus one
        # For the counters: a dead letter ended a delivery, and whether a consumer's nack caused it.
        self.ended_by_dead_letter: bool = False
        self.dead_after_nack: bool = False
        self.first_delivered_at: float = 0.0
        # Seconds of `total_timeout` that previous runs have used.
        self.spent_before_start: float = 0.0
        self.last_delivered_at: float = 0.0
        # Start of the deadline: the delivery, or its last extension.
        self.lease_started_at: float = 0.0
        self.deadline: float = 0.0
        self.retry_at: float = 0.0  # while BACKOFF
        self.description: str = ""
        self.history: list[HistoryEvent] | None = None  # created with the first failure
        self.publisher_message_id: bytes = b""  # the key in `Group.leases_by_message_id`
        # Another lease with the same id: the publisher used it twice.
        self.next_same_id: Lease | None = None
        self.previous_same_id: Lease | None = None  # the lease whose `next_same_id` this is
        self.previous_in_deadlines: Lease | None = None  # neighbors in order of deadline
        self.next_in_deadlines: Lease | None = None

    def change(self, event: i64) -> None:
        """Change the state as `TRANSITIONS` says."""
        if _IS_INTERPRETED:
            assert TRANSITIONS[self.state, event] == event & _STATE_MASK
        self.state = event & _STATE_MASK

    def holder_client_id(self) -> str:
        """Return the client id of the last holder, for display."""
        return client_id_of(self.holder)


# Compiled methods are no functions, and do not check their transitions.
_IS_INTERPRETED: Final = isinstance(Lease.change, FunctionType)


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

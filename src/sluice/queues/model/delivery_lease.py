"""A message on its way to one group: who has it, until when, how often it failed.

    State      Event     becomes
    LEASED     ack       (settled)          LEASED     expire, nack, vanish    WAITING, or dead
    LEASED     release   READY              WAITING    ack by its last holder  (settled): the work was done
    WAITING    due       READY              READY      lease                   LEASED
    WAITING, READY       reject, give up    DYING until its body is read, then dead

Only what has been leased at least once has an object of this kind; a message that still waits for its first delivery is
a sequence and nothing more.
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
        self.message: Message | None = None  # held while it is leased, read again for a retry
        self.consumer: Consumer | None = None
        self.holder: str = (
            ""  # the identity of the consumer that had it last: see `names.identity_of`
        )
        self.token_counter: i64 = 0  # the counter of its delivery token,
        self.token_tag: i64 = 0  # and the tag; 0: not known, the token was issued in an earlier run
        self.failures: i64 = 0
        self.attempt: i64 = 0  # counts deliveries that were not given back
        self.first_delivered_at: float = 0.0  # when it was first delivered
        self.spent_before_start: float = (
            0.0  # seconds of `total_timeout` that previous runs have used up
        )
        self.last_delivered_at: float = 0.0
        self.lease_started_at: float = (
            0.0  # when its deadline began to run: its delivery, or the last time it was extended
        )
        self.deadline: float = 0.0
        self.retry_at: float = 0.0  # of a WAITING one
        self.description: str = ""
        self.history: list[HistoryEvent] | None = None  # made with the first failure
        self.publisher_message_id: bytes = b""  # the publisher's, under which the group finds it
        self.next_same_id: Lease | None = (
            None  # another one with that id: its publisher has used it again
        )
        self.previous_same_id: Lease | None = None  # the one whose `namesake` this is
        self.previous_in_deadlines: Lease | None = None  # neighbours in order of deadline
        self.next_in_deadlines: Lease | None = None

    def holder_client_id(self) -> str:
        """Return the client id of the last holder, for display."""
        return client_id_of(self.holder)


class DeadlineList:
    """Leases in the order in which their deadlines pass. All have the same time-out, so a new or extended one goes to
    the end, and any one can be taken out at once: no heap, and nothing left behind by what was settled in time."""

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
        """Another time-out for all of them: the order stays."""
        lease = self.first
        while lease is not None:
            lease.deadline = lease.lease_started_at + seconds
            lease = lease.next_in_deadlines

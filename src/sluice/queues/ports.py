"""What the engine calls up to. The broker gives it objects of these classes, and the engine knows no more of it.

They are classes to derive from, not protocols: a call to a native method is a jump, a call through a protocol a search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from sluice.message import Message

if TYPE_CHECKING:
    from sluice.queues.compacted.owner import Owner
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.model.group import Group


@mypyc_attr(allow_interpreted_subclasses=True)
class Publisher:
    """Who waits to hear that a message is kept."""

    def on_committed(self, tag: i64) -> None:
        """The message published under `tag` can no longer be lost."""

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """The same for `tags[start:end]`, in order. Publishers come in runs, and a run is answered in one call."""
        while start < end:
            self.on_committed(tags[start])
            start += 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Consumer:
    """One member of a group: takes deliveries while it has room."""

    def __init__(self, client: str, prefetch: i64, priority: i64, is_exclusive: bool) -> None:
        self.client: str = client
        self.identity: str = client  # what its deliveries are bound to: see `names.identity_of`
        self.prefetch: i64 = prefetch
        self.priority: i64 = priority
        self.is_exclusive: bool = is_exclusive
        self.group: Group | None = None
        self.cursors: list[Cursor] = []  # the partitions it serves
        self.in_flight: i64 = 0  # deliveries it has not settled
        self.join_number: i64 = 0  # when it came, as a running number
        self.is_paused: bool = False  # lives, but cannot be reached
        self.is_stalled: bool = False  # let a deadline pass, and has settled nothing since
        self.settled_at: float = 0.0  # when it last settled a delivery; 0.0: never
        # When it last joined, reconnected, extended a delivery or tried to settle one too late.
        self.active_at: float = 0.0
        self.is_scheduled: bool = False  # is offered more at the end of the turn
        self.next_cursor_index: i64 = 0  # which of its partitions is asked next
        self.full_since: float = (
            0.0  # since when it has had no room for messages of its partitions; 0.0: it has
        )
        self.was_offloaded: bool = (
            False  # partitions were moved from it because it had no room for long
        )
        # What its delivery tokens have in common, set when it joins: see `tokens`.
        self.token_member_hash_high: i64 = 0
        self.token_member_hash_low: i64 = 0
        self.token_run_text: bytes = b""

    def has_capacity(self) -> bool:
        """Whether it takes one more now: derived classes add what they know of the line. A consumer whose prefetch is
        0 is draining: it gets nothing more, and keeps what it holds until that is settled."""
        return self.in_flight < self.prefetch

    def next_blocked_consumer(self) -> Consumer | None:
        """After it was offered more: another that was turned away for want of something they share, if there is some
        of it left."""
        return None

    def deliver(self, lease: Lease) -> None:
        """Take a message. It is this consumer's until it is settled or its deadline passes."""

    def on_lease_revoked(self, lease: Lease) -> None:
        """The deadline has passed, or a younger message has taken its place: whatever it does with it from now on does
        not count."""


@mypyc_attr(allow_interpreted_subclasses=True)
class OwnerSubscriber:
    """The owner of an exclusive queue while it is subscribed: takes values while it has room."""

    def __init__(self) -> None:
        self.owner: Owner | None = None  # while it is subscribed
        self.last_owner: Owner | None = (
            None  # the same, and still when it is not: an acknowledgement may be on its way
        )
        self.last_sent_seq: i64 = 0  # the highest sequence that it was given
        self.epoch: i64 = 0  # of its owner, as it knows it: what was given in an earlier one does not count any more
        self.in_flight: dict[
            int, int
        ] = {}  # what it was given and has not acknowledged, in order; the epoch
        self.pending_bodies: dict[
            int, Message
        ] = {}  # values at hand that it has not been given yet
        self.is_reading: bool = False  # a read is under way for it,
        self.read_count: i64 = 0  # which is the so-manieth,
        self.last_checked_read_count: i64 = 0  # and when that was last looked at it was this one
        self.is_scheduled: bool = False  # is offered more at the end of the turn
        self.has_values_in_open_frame: bool = False  # the open frame has something for it

    def capacity(self) -> i64:
        """How many values it takes now."""
        return 0

    def deliver(self, seq: i64, message: Message) -> None:
        """Take a value."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Codec:
    """How payloads are made smaller: handed in, so that the engine needs no library for what most queues do not use."""

    def compress(self, data: bytes) -> bytes:
        return data

    def decompress(self, data: bytes) -> bytes:
        """What `compress` was given. Raises ValueError for bytes that it cannot have made."""
        return data

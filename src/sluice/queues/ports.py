"""Interfaces through which the engine calls its user: publishers, consumers, codecs.

The broker passes objects of these classes; the engine knows nothing else about the broker. They are
base classes and not protocols because mypyc calls a native method directly, but looks up a
protocol's method by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.model.group import Group


@mypyc_attr(allow_interpreted_subclasses=True)
class Publisher:
    """Waits for the commit of the messages that it publishes."""

    def on_committed(self, tag: i64) -> None:
        """Called when the message published under `tag` can no longer be lost."""

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """Called for `tags[start:end]`, in order: one call acknowledges a run of messages."""
        while start < end:
            self.on_committed(tags[start])
            start += 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Committer:
    """Commits what a turn of the event loop has decided. This base class has nothing to commit."""

    def end_turn(self) -> None:
        """Dispatch, start reads, and submit the open frame to the store."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Consumer:
    """A member of a group. It takes deliveries while it has capacity."""

    def __init__(self, client: str, prefetch: i64, priority: i64, is_exclusive: bool) -> None:
        self.client: str = client
        self.identity: str = client  # what its deliveries are bound to: see `names.make_identity`
        self.prefetch: i64 = prefetch
        self.priority: i64 = priority
        self.is_exclusive: bool = is_exclusive
        self.group: Group | None = None
        self.cursors: list[Cursor] = []  # the partitions it serves
        self.in_flight: i64 = 0  # deliveries it has not settled
        self.join_number: i64 = 0  # running number, in the order of joining
        self.is_paused: bool = False  # connected to the group, but unreachable
        self.is_stalled: bool = False  # missed a deadline and has settled nothing since
        self.settled_at: float = 0.0  # when it last settled a delivery; 0.0: never
        # When it last joined, reconnected, extended a delivery or tried to settle one too late.
        self.active_at: float = 0.0
        self.is_scheduled: bool = False  # dispatch at the end of the turn
        self.next_cursor_index: i64 = 0  # the partition that is served next
        # Since when it has had no capacity for messages of its partitions; 0.0: it has capacity.
        self.full_since: float = 0.0
        # Partitions were moved away because it had no capacity for long.
        self.was_offloaded: bool = False
        # The common parts of its delivery tokens, set when it joins: see `delivery_tokens`.
        self.token_member_hash_high: i64 = 0
        self.token_member_hash_low: i64 = 0
        self.token_run_text: bytes = b""

    def has_capacity(self) -> bool:
        """Return whether the consumer accepts one more delivery.

        Subclasses add the state of the connection. A consumer with prefetch 0 is draining: it gets
        no new deliveries and keeps its leases until they are settled.
        """
        return self.in_flight < self.prefetch

    def next_blocked_consumer(self) -> Consumer | None:
        """Return another consumer that is blocked on a shared limit, if the limit allows more now.

        Called after dispatch to this consumer.
        """
        return None

    def deliver(self, lease: Lease) -> None:
        """Send a message. The consumer holds the lease until it settles or the deadline passes."""

    def on_lease_revoked(self, lease: Lease) -> None:
        """Called when the deadline has passed or a newer message replaces this one.

        Settlements of the lease no longer count.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class Codec:
    """Compresses payloads. Injected, so that the engine needs no compression library."""

    def compress(self, data: bytes) -> bytes:
        return data

    def decompress(self, data: bytes) -> bytes:
        """Return the data that `compress` was given. Raise ValueError for other input."""
        return data

"""Interface through which exclusive queues call the subscribed owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64, mypyc_attr

from sluice.message import Message

if TYPE_CHECKING:
    from sluice.queues.compacted.owner import Owner


@mypyc_attr(allow_interpreted_subclasses=True)
class OwnerSubscriber:
    """The subscribed owner of an exclusive queue. It takes values while it has capacity."""

    def __init__(self) -> None:
        self.owner: Owner | None = None  # while subscribed
        # The owner, also after the subscription ends: an acknowledgement may still arrive.
        self.last_owner: Owner | None = None
        self.last_sent_seq: i64 = 0  # the highest sequence that was sent
        # The owner's epoch as the subscriber knows it: values sent in an earlier epoch no longer
        # count.
        self.epoch: i64 = 0
        # Values sent and not yet acknowledged, in order: sequence to epoch.
        self.in_flight: dict[int, int] = {}
        # Values in memory that are not sent yet.
        self.pending_bodies: dict[int, Message] = {}
        self.is_reading: bool = False  # a read is in progress for it
        self.read_count: i64 = 0  # reads issued
        self.last_checked_read_count: i64 = 0  # reads issued at the last health check
        self.is_scheduled: bool = False  # dispatch at the end of the turn
        self.has_values_in_open_frame: bool = False  # the open frame has values for it

    def capacity(self) -> i64:
        """Return how many values it accepts now."""
        return 0

    def deliver(self, seq: i64, message: Message) -> None:
        """Send a value."""

"""Send retained messages to the new subscriptions of one session, in slices.

A session has a sender while retained messages are looked up for it. Each turn of the event loop
does at most MAX_SLICE_SECONDS of that work and then serves other connections. Pending filters of
several SUBSCRIBE packets are looked up together, in one walk of the tree.

The sender pauses while the client does not read, and while half of the session's queue limit waits
for acknowledgements: retained messages wait in the tree and need no memory of their own. While the
client of a persistent session is disconnected, the sender queues QoS 1 and 2 up to the same half.
The other half is left for live messages, and `Session.attach` resumes the sender.

The session record names the filters of a persistent session whose lookup is not over
(`owed_retained`). After a restart they are looked up again from the beginning: messages may arrive
twice, but none is lost.

A filter is looked up as of its SUBSCRIBE. A message that is published later is delivered as a live
message and is left out here, so no older retained value follows a newer one. It may follow a newer
message that was published without the retain flag; MQTT permits that, and the flag distinguishes
the two. UNSUBSCRIBE and the end of the session cancel the lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.ports import NO_RETAINED_LOOKUP, RetainedLookup
from sluice.broker.sessions import (
    STEPS_PER_SLICE,
    Match,
    RetainedMessages,
    RetainedWalk,
    WalkFilter,
)
from sluice.broker.turn import MAX_SLICE_SECONDS, Turn

if TYPE_CHECKING:
    from sluice.broker.routing.router import Router
    from sluice.broker.sessions import Session

MAX_WALK_LEVELS: Final = 4096  # of one walk: the filters cost memory until it is over


class RetainedSender(RetainedLookup):
    def __init__(self, session: Session, router: Router) -> None:
        super().__init__()
        self._router: Router = router
        self._session: Session = session
        self._retained: RetainedMessages = router.retained
        self._turn: Turn = router.turn
        # Filters, and the change number of the tree at their SUBSCRIBE.
        self._pending: dict[bytes, i64] = {}
        self._active: dict[bytes, WalkFilter] = {}  # filters of the current walk
        self._walk: RetainedWalk | None = None
        self._found: list[Match] = []
        self._sent_count: int = 0  # how many of `_found` are sent
        self._paused: bool = True
        self._scheduled: bool = False

    def is_running(self) -> bool:
        return True

    def pending_filters(self) -> list[bytes]:
        """Return the filters that the store must remember. QoS 0 may be lost with the broker."""
        subscriptions = self._session.subscriptions
        pending: list[bytes] = []
        for topic_filter in [*self._active, *self._pending]:
            subscription = subscriptions.get(topic_filter)
            if subscription is not None and subscription.qos > 0:
                pending.append(topic_filter)
        return pending

    def add(self, topic_filter: bytes) -> None:
        """Look up a filter, from the beginning if its lookup is already running."""
        self.cancel(topic_filter)
        self._pending[topic_filter] = self._retained.changes

    def cancel(self, topic_filter: bytes) -> None:
        self._pending.pop(topic_filter, 0)
        walk_filter = self._active.pop(topic_filter, None)
        if walk_filter is not None:
            walk_filter.is_cancelled = True
            if not self._active:
                self._walk = None  # nothing is left to find

    def start(self) -> None:
        """Do the first slice of the added work, unless earlier work is running."""
        if self._paused and not self._scheduled:
            self._run(self._turn.now)

    def resume(self) -> None:
        """Continue in a later turn if the sender was waiting for the client."""
        if self._paused and not self._scheduled and not self._must_wait():
            self._scheduled = True
            self._turn.resume_later(self._continue)

    def _continue(self) -> None:
        self._scheduled = False
        if self._session.retained_lookup is self:  # else the session has ended
            self._run(self._turn.begin())

    def _run(self, started: float) -> None:
        self._paused = False
        while not self._must_wait():
            if self._sent_count < len(self._found):
                self._send_next()
                continue
            if self._walk is None and not self._begin_walk():
                self._end()
                return
            walk = self._walk
            if walk is not None:
                self._found.clear()
                self._sent_count = 0
                if walk.advance(STEPS_PER_SLICE, self._found):
                    self._walk = None
            if self._turn.current_time() - started > MAX_SLICE_SECONDS:
                self._scheduled = True
                self._turn.resume_later(self._continue)
                return
        self._paused = True

    def _end(self) -> None:
        """Detach from the session; delete the pending filters from its record if stored."""
        session = self._session
        session.retained_lookup = NO_RETAINED_LOOKUP
        if self.is_in_session_record:
            self._router.session_store.store_session(session)

    def _must_wait(self) -> bool:
        """Return whether the client must read or acknowledge first.

        `OutboundQos.resume_sending` then calls `resume`.
        """
        session = self._session
        connection = session.connection
        if connection is not None and connection.is_write_paused:
            return True
        waiting = session.outbound.queued
        if not waiting and connection is not None:
            return False  # no acknowledgement would call `resume`
        limits = self._router.limits
        count = len(waiting) if waiting is not None else 0
        return (
            2 * count >= limits.max_queued_messages
            or 2 * session.outbound.buffered_bytes >= limits.max_queued_bytes
        )

    def _send_next(self) -> None:
        match = self._found[self._sent_count]
        self._sent_count += 1
        message = self._retained.get_current(match, self._turn.now)
        subscription = self._session.subscriptions.get(match.walk_filter.topic_filter)
        if message is None or subscription is None:
            return
        if not self._retained.is_reserved(message.topic):  # the newer one may be queued already
            self._router.deliver_retained(subscription, [message])

    def _begin_walk(self) -> bool:
        """Start a walk with the pending filters; return whether there were any."""
        self._active.clear()
        if not self._pending:
            return False
        walk = self._retained.start_walk()
        levels = 0
        for topic_filter, since in self._pending.items():
            levels += topic_filter.count(b"/") + 1
            if levels > MAX_WALK_LEVELS and self._active:
                break
            self._active[topic_filter] = walk.add(topic_filter, since)
        for topic_filter in self._active:
            del self._pending[topic_filter]
        self._walk = walk
        return True

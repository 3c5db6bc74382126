"""Operations that the server answers: a publish, a subscribe or an unsubscribe.

A pending operation outlives connections: it is done when the answer has arrived or can never
arrive. Observers register a callback; there is no future and no task per message unless the
application awaits that message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sluice.client.errors import PublishRefused, SubscribeRefused, UnsubscribeRefused
from sluice.wire.packets import Ack, Publish, Suback, Subscribe, Unsuback, Unsubscribe
from sluice.wire.properties import PUBCOMP, Properties

log = logging.getLogger(__name__)


class PendingOperation:
    """`done` turns true once, by `complete` or by `fail`."""

    __slots__ = ("_callbacks", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self._callbacks: list[Callable[[PendingOperation], None]] | None = None

    def add_done_callback(self, callback: Callable[[PendingOperation], None]) -> None:
        """Call `callback(self)` when done, or at once if it is. The callback must be quick."""
        if self.done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[PendingOperation], None]) -> None:
        if self._callbacks is not None and callback in self._callbacks:
            self._callbacks.remove(callback)

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.done = True
        callbacks = self._callbacks
        if callbacks is not None:
            self._callbacks = None
            for callback in callbacks:
                try:
                    callback(self)
                except Exception:  # an error of one caller must not affect other messages
                    log.exception("callback of a confirmed operation failed")


class PublishResult:
    """The server's answer to a publish. Reason 0x10: accepted, without matching subscribers."""

    __slots__ = ("properties", "reason")

    def __init__(self, reason: int, properties: Properties | None) -> None:
        self.reason = reason
        self.properties = properties

    @property
    def reason_string(self) -> str | None:
        return self.properties.reason_string if self.properties is not None else None

    def __repr__(self) -> str:
        return f"PublishResult(reason=0x{self.reason:02x})"


class PendingPublish(PendingOperation):
    """A publish that is not acknowledged yet."""

    __slots__ = ("packet", "properties", "reason", "size")

    def __init__(self, packet: Publish) -> None:
        # Sets the fields of the base class: calling it would cost a tenth of a publish.
        self.done = False
        self.error = None
        self._callbacks = None
        self.packet = packet
        self.size = len(packet.payload) + len(packet.topic) + len(packet.raw_properties)
        self.reason = 0
        self.properties: Properties | None = None

    def complete(self, answer: Ack | None) -> None:
        """Finish with the server's last answer; None for QoS 0.

        A PUBCOMP with an unknown packet id still completes a message that the server accepted by
        its PUBREC.
        """
        if answer is not None and (answer.reason or answer.properties is not None):
            self.reason = int(answer.reason)
            self.properties = answer.properties
            if answer.reason >= 0x80 and answer.kind != PUBCOMP:
                text = answer.properties.reason_string if answer.properties is not None else None
                about = f"to {self.packet.topic.decode()!r}"
                self.error = PublishRefused(self.reason, text, answer.properties, about)
        self._finish()

    def result(self) -> PublishResult:
        """Return the answer or raise the error. Call it only when `done`."""
        if self.error is not None:
            raise self.error
        return PublishResult(self.reason, self.properties)


class PendingSubscription(PendingOperation):
    """A SUBSCRIBE or UNSUBSCRIBE that is not answered yet."""

    __slots__ = ("answer", "packet")

    def __init__(self, packet: Subscribe | Unsubscribe) -> None:
        super().__init__()
        self.packet = packet
        self.answer: Suback | Unsuback | None = None

    @property
    def filters(self) -> list[bytes]:
        if isinstance(self.packet, Subscribe):
            return [request.topic_filter for request in self.packet.requests]
        return self.packet.filters

    def complete(self, answer: Suback | Unsuback) -> None:
        self.answer = answer
        self._finish()

    def reasons(self) -> list[int]:
        """Return one reason code per filter. A 3.1.1 UNSUBACK has none and means success."""
        assert self.answer is not None
        return self.answer.reasons or [0] * len(self.filters)

    def refusal(self) -> SubscribeRefused | None:
        """Return the first failure among the reason codes as an error."""
        given = self.reasons()
        for reason, topic_filter in zip(given, self.filters):
            if reason >= 0x80:
                properties = self.answer.properties if self.answer is not None else None
                text = properties.reason_string if properties is not None else None
                kind = (
                    SubscribeRefused if isinstance(self.packet, Subscribe) else UnsubscribeRefused
                )
                return kind(given, reason, text, properties, repr(topic_filter.decode()))
        return None

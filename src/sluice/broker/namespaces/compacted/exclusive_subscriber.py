"""The subscribed owner of an exclusive queue: the engine's `OwnerSubscriber`, in MQTT.

Each value is a QoS 1 PUBLISH on `$ECQ/<client>/<key>`, with its sequence before the writer's own
properties. The PUBACK is the acknowledgement, and the client's Receive Maximum is the only flow
control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.sessions import Delivery
from sluice.message import Message
from sluice.queues.compacted import OwnerSubscriber
from sluice.queues.flow import format_iso_time
from sluice.wire.packets import V5, Publish
from sluice.wire.primitives import write_binary

if TYPE_CHECKING:
    from sluice.broker.namespaces.compacted.handler import ExclusiveQueueHandler
    from sluice.broker.sessions import Session

_SEQUENCE: Final = b"\x26\x00\x08sequence"
_ENQUEUED_AT: Final = b"\x26\x00\x0benqueued-at"


class ExclusiveSubscriber(OwnerSubscriber):
    def __init__(
        self, session: Session, extra_properties: bytes, queues: ExclusiveQueueHandler
    ) -> None:
        super().__init__()
        self.queues: ExclusiveQueueHandler = queues
        self.session: Session = session
        self.extra_properties: bytes = extra_properties  # subscription identifier
        self._topic_prefix: bytes = b"$ECQ/" + session.client_id.encode() + b"/"
        self._scratch: BytesWriter = BytesWriter()

    def capacity(self) -> i64:
        return self.session.outbound.get_capacity()

    def deliver(self, seq: i64, message: Message) -> None:
        packet = Publish(self._topic_prefix + message.key, message.payload, 1)
        if self.session.version == V5:
            out = self._scratch
            out.truncate(0)
            out.write(_SEQUENCE)
            write_binary(out, b"%d" % int(seq))
            out.write(_ENQUEUED_AT)
            write_binary(out, format_iso_time(float(message.enqueued_at_ms) / 1000.0).encode())
            out.write(message.props)
            packet.raw_properties = out.getvalue()
            if message.expires:
                packet.expires_at = message.expires_at()
        self.session.outbound.deliver_now(ExclusiveDelivery(packet, self, seq))


class ExclusiveDelivery(Delivery):
    """A value in flight to its owner."""

    def __init__(self, packet: Publish, subscriber: ExclusiveSubscriber, seq: i64) -> None:
        super().__init__(packet, 1, False, subscriber.extra_properties, None)
        self.subscriber: ExclusiveSubscriber = subscriber
        self.seq: i64 = seq
        self.token: i64 = subscriber.epoch

    def on_acknowledged(self, reason: i64) -> None:
        self.subscriber.queues.on_acknowledged(self)

    def on_abandoned(self) -> None:
        self.subscriber.queues.on_acknowledged(self)  # its owner can never accept it

    def is_obsolete(self) -> bool:
        """Return whether the value was replaced, removed or rewound; it then needs no resend."""
        return (
            self.subscriber.owner is None
            or self.subscriber.in_flight.get(int(self.seq), -1) != self.token
        )

"""Topics below `$SYS/`: the server's own. Clients may subscribe to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.namespaces.plain_topics import PlainTopics
from sluice.broker.ports import ConnectionPort
from sluice.wire.packets import Publish
from sluice.wire.reasons import NOT_AUTHORIZED

if TYPE_CHECKING:
    from sluice.broker.sessions import Session

SYS_RESERVED: Final = (
    "$SYS is the server's own: clients may not publish there; use a topic without $"
)


class ReservedTopics(PlainTopics):
    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        if packet.qos == 0:
            self._router.counters.publishes_dropped += 1
        else:
            session.inbound.refuse(packet, connection, NOT_AUTHORIZED, SYS_RESERVED)

    def publish_error(self) -> str:
        return SYS_RESERVED

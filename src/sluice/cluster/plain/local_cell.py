"""What the plain traffic of a node uses of the cells that are open there.

It is a base class of `Cell` and not a protocol because mypyc calls a native method directly.
"""

from __future__ import annotations

from sluice.broker.broker import Broker
from sluice.cluster.plain.fanout import Fanout
from sluice.wire.packets import Publish


class LocalCell:
    def __init__(self, number: int, broker: Broker) -> None:
        self.number = number
        self.broker = broker
        self.is_closed = False  # accepts no streams any more; retained searches skip it

    def deliver(self, message: Publish, shares: list[bytes], fanout: Fanout | None) -> list[bytes]:
        """Deliver a message from another cell; return the shares that have no member here."""
        raise NotImplementedError

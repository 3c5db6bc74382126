"""Check the reason codes that the broker sends against those that each packet may carry."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.wire.packets import (
    V5,
    Ack,
    Auth,
    Connack,
    Disconnect,
    Packet,
    Suback,
    Unsuback,
)
from sluice.wire.reasons import SERVER_REASONS, get_reason_name

CONNACK_311 = {0, 1, 2, 3, 4, 5}
SUBACK_311 = {0, 1, 2, 0x80}


def check_reasons(packets: Sequence[Packet], version: int) -> None:
    """Check packets of the broker [MQTT-3.2.2-8, 3.4.2-1, 3.9.3-2, 3.11.3-2, 3.14.2-1]."""
    for packet in packets:
        if isinstance(packet, Suback | Unsuback):
            reasons = packet.reasons
        elif isinstance(packet, Ack | Auth | Connack | Disconnect):
            reasons = [int(packet.reason)]
        else:
            continue
        allowed: set[int] | frozenset[int] = SERVER_REASONS[packet.kind]
        if version != V5 and isinstance(packet, Connack | Suback):
            allowed = CONNACK_311 if isinstance(packet, Connack) else SUBACK_311
        for reason in reasons:
            assert reason in allowed, (
                f"{type(packet).__name__} (type {packet.kind}) with {get_reason_name(reason)}"
            )

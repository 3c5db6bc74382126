"""Capabilities of the server from its CONNACK (MQTT 5.0 section 3.2.2.3).

Missing properties have the defaults of the specification, which also apply to MQTT 3.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.wire.properties import Properties


@dataclass(slots=True)
class ServerInfo:
    receive_maximum: int = 0xFFFF
    maximum_qos: int = 2
    retain_available: bool = True
    maximum_packet_size: int | None = None
    topic_alias_maximum: int = 0
    wildcard_available: bool = True
    subscription_ids_available: bool = True
    shared_available: bool = True
    keep_alive: int | None = None  # overrides the value of the client [MQTT-3.2.2-21]
    session_expiry: int | None = None
    assigned_client_id: str | None = None
    properties: Properties = field(default_factory=Properties)

    @property
    def limits_publishing(self) -> bool:
        """Return whether the server limits the QoS, retain flag or size of messages."""
        return (
            self.maximum_qos < 2
            or not self.retain_available
            or self.maximum_packet_size is not None
        )


def read_server_info(properties: Properties | None) -> ServerInfo:
    if properties is None:
        return ServerInfo()
    return ServerInfo(
        receive_maximum=0xFFFF
        if properties.receive_maximum is None
        else properties.receive_maximum,
        maximum_qos=2 if properties.maximum_qos is None else properties.maximum_qos,
        retain_available=properties.retain_available != 0,
        maximum_packet_size=properties.maximum_packet_size,
        topic_alias_maximum=properties.topic_alias_maximum or 0,
        wildcard_available=properties.wildcard_available != 0,
        subscription_ids_available=properties.subscription_ids_available != 0,
        shared_available=properties.shared_available != 0,
        keep_alive=properties.server_keep_alive,
        session_expiry=properties.session_expiry,
        assigned_client_id=properties.assigned_client_id,
        properties=properties,
    )

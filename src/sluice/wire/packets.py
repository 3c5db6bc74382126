"""The control packets of MQTT 3.1.1 and 5.0 as plain objects.

`Publish` is also the message on its way through the broker. Its properties stay the received bytes,
without those that apply to one hop alone (topic alias, message expiry, subscription identifiers).
So a delivery copies them without decoding.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64, mypyc_attr

from sluice.wire.properties import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBLISH,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Properties,
    encode_properties,
    read_properties,
)

V311: Final = 4
V5: Final = 5


@mypyc_attr(acyclic=True)
class Packet:
    """The base of all packets: the packet type of the fixed header.

    No packet refers to itself, so the cycle collector does not need to track packets.
    """

    def __init__(self, kind: i64) -> None:
        self.kind: i64 = kind


@mypyc_attr(acyclic=True, free_list_len=1)
class Publish(Packet):
    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: i64,
        retain: bool = False,
        dup: bool = False,
        packet_id: i64 = 0,
        raw_properties: bytes = b"",
    ) -> None:
        self.kind = PUBLISH
        self.topic: bytes = topic
        self.payload: bytes = payload
        self.qos: i64 = qos
        self.retain: bool = retain
        self.dup: bool = dup
        self.packet_id: i64 = packet_id
        # Encoded properties that are forwarded unchanged.
        self.raw_properties: bytes = raw_properties
        self.expiry_seconds: i64 = -1  # message expiry interval; -1: none
        self.topic_alias: i64 = 0
        self.subscription_ids: list[int] | None = None
        # Set by the broker: when the message expires; 0.0: never.
        self.expires_at: float = 0.0

    def decode_properties(self) -> Properties:
        """Return all properties, decoded; not for the message path."""
        found = read_properties(self.raw_properties, 0, len(self.raw_properties), PUBLISH)
        if self.expiry_seconds >= 0:
            found.message_expiry = int(self.expiry_seconds)
        if self.topic_alias:
            found.topic_alias = int(self.topic_alias)
        if self.subscription_ids is not None:
            found.subscription_ids = list(self.subscription_ids)
        return found


def build_publish(
    topic: bytes, payload: bytes, qos: int, retain: bool, properties: Properties | None
) -> Publish:
    """Build a PUBLISH from decoded properties, with hop properties separated from the raw block."""
    packet = Publish(topic, payload, qos, retain)
    if properties is not None:
        if properties.message_expiry is not None:
            packet.expiry_seconds = properties.message_expiry
        if properties.topic_alias is not None:
            packet.topic_alias = properties.topic_alias
        if properties.subscription_ids:
            packet.subscription_ids = list(properties.subscription_ids)
        forwarded = Properties()
        forwarded.payload_format = properties.payload_format
        forwarded.content_type = properties.content_type
        forwarded.response_topic = properties.response_topic
        forwarded.correlation_data = properties.correlation_data
        forwarded.user = properties.user
        packet.raw_properties = encode_properties(forwarded)
    return packet


class Connect(Packet):
    def __init__(self, client_id: str, version: int, clean_start: bool, keep_alive: int) -> None:
        self.kind = CONNECT
        self.client_id: str = client_id
        self.version: int = version
        self.clean_start: bool = clean_start
        self.keep_alive: int = keep_alive
        self.properties: Properties = Properties()
        self.will: Publish | None = None
        self.will_delay: int = 0
        self.username: str | None = None
        self.password: bytes | None = None


class Connack(Packet):
    def __init__(
        self, session_present: bool, reason: int, properties: Properties | None = None
    ) -> None:
        self.kind = CONNACK
        self.session_present: bool = session_present
        self.reason: int = reason
        self.properties: Properties | None = properties


class Ack(Packet):
    """PUBACK, PUBREC, PUBREL or PUBCOMP."""

    def __init__(
        self, kind: i64, packet_id: i64, reason: i64 = 0, properties: Properties | None = None
    ) -> None:
        self.kind = kind
        self.packet_id: i64 = packet_id
        self.reason: i64 = reason
        self.properties: Properties | None = properties


class SubscriptionRequest:
    """One topic filter of a SUBSCRIBE, with its options."""

    def __init__(
        self,
        topic_filter: bytes,
        qos: int,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
    ) -> None:
        self.topic_filter: bytes = topic_filter
        self.qos: int = qos
        self.no_local: bool = no_local
        self.retain_as_published: bool = retain_as_published
        self.retain_handling: int = retain_handling


class Subscribe(Packet):
    def __init__(
        self,
        packet_id: int,
        requests: list[SubscriptionRequest],
        properties: Properties | None = None,
    ) -> None:
        self.kind = SUBSCRIBE
        self.packet_id: int = packet_id
        self.requests: list[SubscriptionRequest] = requests
        # Number of filters sent; those beyond MAX_FILTERS are not read.
        self.count: int = len(requests)
        self.properties: Properties | None = properties


class Suback(Packet):
    def __init__(
        self, packet_id: int, reasons: list[int], properties: Properties | None = None
    ) -> None:
        self.kind = SUBACK
        self.packet_id: int = packet_id
        self.reasons: list[int] = reasons
        self.properties: Properties | None = properties


class Unsubscribe(Packet):
    def __init__(
        self, packet_id: int, filters: list[bytes], properties: Properties | None = None
    ) -> None:
        self.kind = UNSUBSCRIBE
        self.packet_id: int = packet_id
        self.filters: list[bytes] = filters
        # Number of filters sent; those beyond MAX_FILTERS are not read.
        self.count: int = len(filters)
        self.properties: Properties | None = properties


class Unsuback(Packet):
    def __init__(
        self, packet_id: int, reasons: list[int], properties: Properties | None = None
    ) -> None:
        self.kind = UNSUBACK
        self.packet_id: int = packet_id
        self.reasons: list[int] = reasons
        self.properties: Properties | None = properties


class Pingreq(Packet):
    def __init__(self) -> None:
        self.kind = PINGREQ


class Pingresp(Packet):
    def __init__(self) -> None:
        self.kind = PINGRESP


class Disconnect(Packet):
    def __init__(self, reason: int = 0, properties: Properties | None = None) -> None:
        self.kind = DISCONNECT
        self.reason: int = reason
        self.properties: Properties | None = properties


class Auth(Packet):
    def __init__(self, reason: int = 0, properties: Properties | None = None) -> None:
        self.kind = AUTH
        self.reason: int = reason
        self.properties: Properties | None = properties

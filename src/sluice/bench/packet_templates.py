"""The packets of a generator, encoded before the measurement starts."""

from __future__ import annotations

import os

from sluice.bench.tally import HEADER_BYTES
from sluice.bench.workload import Address, Workload
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connect, Subscribe, SubscriptionRequest, build_publish
from sluice.wire.properties import Properties


def connect_packet(client_id: str, address: Address) -> bytes:
    packet = Connect(client_id, V5, True, 0)
    packet.username = address.username
    packet.password = None if address.password is None else address.password.encode()
    return encode(packet, V5)


def subscribe_packet(topic_filter: str, qos: int, group: str) -> bytes:
    properties = Properties()
    if group:
        properties.user = [("consumer-group", group)]
    return encode(Subscribe(1, [SubscriptionRequest(topic_filter.encode(), qos)], properties), V5)


def reader_packets(work: Workload, reader: int, address: Address) -> tuple[bytes, bytes]:
    """Return CONNECT and SUBSCRIBE of one reader."""
    names = {"run": work.run, "reader": reader}
    wanted = subscribe_packet(
        work.filter.format(**names), max(work.qos, 1 if work.group else 0), work.group
    )
    return connect_packet(work.reader_id.format(**names), address), wanted


def publish_templates(work: Workload, publisher: int) -> tuple[list[bytes], list[bytes], bytes]:
    """Return, per slot, the bytes before and after the packet id, and the padding of the payload.

    The padding is random, so that compression cannot shrink it.
    """
    before: list[bytes] = []
    after: list[bytes] = []
    for slot in range(work.slots):
        owner = publisher * (work.slots // work.keys) + slot // work.keys
        topic = work.topic.format(
            run=work.run, publisher=publisher, slot=slot, owner=owner, key=slot % work.keys
        ).encode()
        properties = Properties()
        if work.by_key:
            properties.user = [("partition-key", f"{publisher}-{slot:05}")]
        packet = build_publish(
            topic, bytes(max(work.size, HEADER_BYTES)), work.qos, False, properties
        )
        packet.packet_id = 0x7FFF if work.qos else 0
        encoded = encode(packet, V5)
        topic_end = encoded.index(topic) + len(topic)
        before.append(encoded[:topic_end])
        after.append(
            encoded[topic_end + (2 if work.qos else 0) : len(encoded) - len(packet.payload)]
        )
    return before, after, os.urandom(max(work.size, HEADER_BYTES) - HEADER_BYTES)

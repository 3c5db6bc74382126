"""What clients of the broker's test kit do with queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.wire.packets import V311, Ack, Publish, Suback, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBREC
from tests.broker.peers import Client, props


def join(
    client: Client, topic_filter: str, qos: int = 1, identifier: int = 0, **options: object
) -> tuple[int, str]:
    """Subscribe to a queue with user properties; return the reason code and its text."""
    pairs = [(name.replace("_", "-"), str(value)) for name, value in options.items()]
    properties = props(user=pairs)
    if identifier:
        properties.subscription_ids = [identifier]
    version = client.version
    request = SubscriptionRequest(topic_filter.encode(), qos)
    client.send(Subscribe(client.next_id(), [request], properties if version != V311 else None))
    suback = client.first(Suback)
    return suback.reasons[0], reason_string(suback)


def reason_string(packet: Ack | Suback) -> str:
    return (packet.properties.reason_string or "") if packet.properties is not None else ""


def put(
    client: Client,
    topic: str,
    payload: bytes = b"",
    qos: int = 1,
    options: Mapping[str, object] | None = None,
    **properties: Any,
) -> tuple[int, str]:
    """Publish; return the reason code of the PUBACK or PUBREC, and its text."""
    if options:
        properties["user"] = [*properties.get("user", []), *option_pairs(options)]
    packet_id = client.publish(topic, payload, qos, **properties)
    ack = client.first_ack(PUBACK if qos == 1 else PUBREC, packet_id)
    return int(ack.reason), reason_string(ack)


def option_pairs(options: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in options.items()]


def delivery_properties(message: Publish) -> dict[str, str]:
    """Return the user properties of a delivery; each name occurs once."""
    user = message.decode_properties().user
    found = dict(user)
    assert len(found) == len(user), user
    return found


def settle(client: Client, verb: str, message: Publish, **options: str) -> tuple[int, str]:
    """Settle a delivery by its message id; return the reason code and its text."""
    reported = delivery_properties(message)
    pairs = [
        ("message-id", reported["message-id"]),
        *((k.replace("_", "-"), v) for k, v in options.items()),
    ]
    return put(client, f"$queue/{reported['queue']}/${verb}", user=pairs)


def take(client: Client) -> list[Publish]:
    """Return the deliveries that have arrived and send their PUBACKs, but do not settle them."""
    messages = client.messages()
    for message in messages:
        client.ack(message)
    return messages


def payloads(messages: Sequence[Publish]) -> list[bytes]:
    return [message.payload for message in messages]

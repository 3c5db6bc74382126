"""Settlements on their way to the broker.

The acks of one turn leave as one publish that names all of them: a worker with ten thousand small
jobs a second cannot afford a packet and an answer for each. Other settlements are rare and are sent
one by one, with the token of their delivery. A delivery stays in `tracked` until its settlement is
answered, so that a redelivery after a reconnect (its PUBACK was lost) is recognized and not
processed twice.

A restarted broker, or another node that took over the queue, does not know the leases; it finds
deliveries by their tokens. So deliveries of an earlier connection are settled one by one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from typing import Final

from sluice.client.errors import ClientError, PublishRefused, Unsupported
from sluice.client.net import Confirm
from sluice.client.protocol import PendingOperation, PendingPublish
from sluice.client.queues.delivery import Delivery
from sluice.client.queues.ports import QueueClient
from sluice.wire.packets import V5, Publish, build_publish
from sluice.wire.properties import Properties
from sluice.wire.reasons import IMPLEMENTATION_SPECIFIC_ERROR, NO_MATCHING_SUBSCRIBERS

log = logging.getLogger("sluice.client")

THEN_CONTENT_TYPE: Final = "application/vnd.sluice.then+json"
MAX_IDS_PER_PUBLISH: Final = 256  # deliveries that one publish settles


class Settler:
    """Tracks the deliveries of one consumer and sends their settlements."""

    def __init__(self, client: QueueClient) -> None:
        self.tracked: dict[str, Delivery] = {}
        self.connection_number = 0  # counts connections
        # True: a job that is redelivered while it runs continues under its new token.
        self.adopts_redelivery = False
        self._duplicates: list[Delivery] = []  # older deliveries of an id that is tracked again
        self._client = client
        self._is_v5 = client.options.version == V5
        self._acks: dict[str, list[Delivery]] = {}
        self._is_flush_scheduled = False

    # Tracking

    def track(self, delivery: Delivery) -> bool:
        """Track a new delivery; return False if it is only a redelivery of a tracked one."""
        delivery.connection_number = self.connection_number
        earlier = self.tracked.get(delivery.id)
        if earlier is not None:
            if earlier.token == delivery.token and (delivery.token or delivery.message.dup):
                return False
            if earlier.is_acked and delivery.token and earlier.position == delivery.position:
                # Redelivered before the broker received our ack: the work is done.
                self.tracked[delivery.id] = delivery
                self.settle_one(delivery, "$ack", [])
                return False
            if earlier.position != delivery.position or (
                earlier.is_taken and not self.adopts_redelivery
            ):
                earlier.has_duplicate = delivery.has_duplicate = True
                self._duplicates.append(earlier)
            elif not earlier.is_taken:
                # Its lease expired while it was buffered: the new delivery replaces it.
                earlier.settled = True
            elif not earlier.settled:
                earlier.token = delivery.token
                earlier.connection_number = self.connection_number
                return False
        self.tracked[delivery.id] = delivery
        return True

    def unsettled(self) -> list[Delivery]:
        return [one for one in [*self._duplicates, *self.tracked.values()] if not one.settled]

    def untrack(self, delivery: Delivery) -> None:
        """Forget a delivery that is settled or that belongs to another consumer."""
        delivery.settled = True
        if self.tracked.get(delivery.id) is delivery:
            del self.tracked[delivery.id]
        elif delivery in self._duplicates:
            self._duplicates.remove(delivery)

    # Settling

    def ack_soon(self, delivery: Delivery) -> None:
        """Ack together with the other acks of this turn."""
        delivery.settled = True
        delivery.is_acked = True
        if not self._is_v5:  # 3.1.1: the PUBACK is the ack
            self._client.acknowledge(delivery.message)
            self.untrack(delivery)
        elif delivery.has_duplicate or delivery.connection_number != self.connection_number:
            self.settle_one(delivery, "$ack", [])
        else:
            try:
                self._acks[delivery.topic].append(delivery)
            except KeyError:
                self._acks[delivery.topic] = [delivery]
            if not self._is_flush_scheduled:
                self._is_flush_scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the collected acks."""
        self._is_flush_scheduled = False
        if self._acks:
            batches = self._acks
            self._acks = {}
            for topic, deliveries in batches.items():
                self.settle_many(topic, "$ack", deliveries)

    def settle_many(self, topic: str, verb: str, deliveries: list[Delivery]) -> None:
        """Settle many deliveries by their ids: the broker checks that this client holds them."""
        if not self._is_v5:
            for delivery in deliveries:
                self.settle_one(delivery, verb, [])
            return
        name = f"{topic}/{verb}".encode()
        current: list[Delivery] = []
        for one in deliveries:
            if verb == "$ack" or (
                one.connection_number == self.connection_number and self._client.is_connected
            ):
                current.append(one)
            else:
                self.settle_one(one, verb, [])
        deliveries = current
        for at in range(0, len(deliveries), MAX_IDS_PER_PUBLISH):
            some = deliveries[at : at + MAX_IDS_PER_PUBLISH]
            properties = Properties()
            properties.user = [("message-id", one.id) for one in some]
            confirm = Confirm(build_publish(name, b"", 1, False, properties))
            self._submit(confirm, verb, some, True)

    def settle_one(self, delivery: Delivery, verb: str, extra: list[tuple[str, str]]) -> Confirm:
        """Settle one delivery by its token."""
        if verb != "$extend":
            delivery.settled = True
            delivery.is_acked = verb == "$ack"
        if self._is_v5:
            properties = Properties()
            properties.user = [
                ("message-id", delivery.id),
                ("delivery-token", delivery.token),
                *extra,
            ]
            confirm = Confirm(
                build_publish(f"{delivery.topic}/{verb}".encode(), b"", 1, False, properties)
            )
        else:
            if extra:
                raise Unsupported(
                    f"MQTT 3.1.1 cannot carry {', '.join(name for name, _ in extra)}",
                    "Connect with version=5, or leave it out",
                )
            confirm = Confirm(Publish(f"{delivery.topic}/{verb}/{delivery.id}".encode(), b"", 1))
        self._submit(confirm, verb, [delivery])
        if not self._is_v5 and verb != "$extend":
            # After the settlement: the PUBACK only frees the packet id.
            self._client.acknowledge(delivery.message)
        return confirm

    def ack_and_publish(self, delivery: Delivery, packets: list[Publish]) -> Confirm:
        """Acknowledge a delivery together with messages; it stays unsettled until the answer."""
        if not self._is_v5:
            raise Unsupported(
                "MQTT 3.1.1 cannot acknowledge and publish in one step", "Connect with version=5"
            )
        properties = Properties()
        properties.user = [("message-id", delivery.id), ("delivery-token", delivery.token)]
        properties.content_type = THEN_CONTENT_TYPE
        body = json.dumps([_describe_packet(packet) for packet in packets]).encode()
        confirm = Confirm(
            build_publish(f"{delivery.topic}/$ack".encode(), body, 1, False, properties)
        )
        self._client.submit(confirm)
        return confirm

    def _submit(
        self, confirm: Confirm, verb: str, deliveries: list[Delivery], by_id: bool = False
    ) -> None:
        """Send a settlement. Never raise: at the end of a turn no caller could catch it."""
        confirm.add_done_callback(_SettlementAnswer(self, verb, deliveries, by_id))
        try:
            self._client.submit(confirm)
        except ClientError as error:
            confirm.fail(error)


def _describe_packet(packet: Publish) -> dict[str, object]:
    """Return a message as the broker reads it in the payload of an ack."""
    properties = packet.decode_properties()
    user: dict[str, list[str]] = {}
    for name, value in properties.user:
        user.setdefault(name, []).append(value)
    found: dict[str, object] = {
        "topic": packet.topic.decode(),
        "payload_base64": b64encode(packet.payload).decode(),
        "properties": user,
    }
    if properties.content_type is not None:
        found["content_type"] = properties.content_type
    if properties.response_topic is not None:
        found["response_topic"] = properties.response_topic
    if properties.correlation_data is not None:
        found["correlation_data"] = b64encode(properties.correlation_data).decode()
    if packet.expiry_seconds >= 0:
        found["expiry"] = f"{packet.expiry_seconds}s"
    return found


class _SettlementAnswer:
    """Handles the broker's answer to a settlement."""

    __slots__ = ("_by_id", "_deliveries", "_settler", "_verb")

    def __init__(
        self, settler: Settler, verb: str, deliveries: list[Delivery], by_id: bool
    ) -> None:
        self._settler = settler
        self._verb = verb
        self._deliveries = deliveries
        self._by_id = by_id

    def __call__(self, operation: PendingOperation) -> None:
        deliveries, settler = self._deliveries, self._settler
        if self._by_id and isinstance(operation, PendingPublish):
            if operation.reason in (NO_MATCHING_SUBSCRIBERS, IMPLEMENTATION_SPECIFIC_ERROR):
                deliveries = self._retry_by_token(deliveries)
        error = operation.error
        if isinstance(error, PublishRefused | Unsupported):
            self._warn(
                error,
                [
                    one
                    for one in deliveries
                    if settler.tracked.get(one.id, one) is one or one.has_duplicate
                ],
            )
        if self._verb != "$extend":
            for delivery in deliveries:
                settler.untrack(delivery)

    def _warn(self, error: PublishRefused | Unsupported, deliveries: list[Delivery]) -> None:
        """Log a refusal, except for deliveries that a newer delivery has replaced."""
        if deliveries:
            log.warning(
                "%s of %s was refused: %s",
                self._verb,
                f"{len(deliveries)} deliveries" if len(deliveries) > 1 else deliveries[0].id,
                getattr(error, "reason_string", None) or error.what,
            )

    def _retry_by_token(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Settle deliveries by token that the broker does not know by id; return the others.

        Only a delivery of an earlier connection may be known by its token.
        """
        settler = self._settler
        unknown: list[Delivery] = []
        for one in deliveries:
            if (
                one.connection_number == settler.connection_number
                or settler.tracked.get(one.id) is not one
            ):
                unknown.append(one)
            else:
                settler.settle_one(one, self._verb, [])
        return unknown

"""What became of deliveries, on its way to the broker.

Acks of one turn of the loop leave as one publish that names them all: a worker that does ten thousand small jobs a
second cannot afford a packet and an answer for each. The other words are rare, and go one by one with the token of
their delivery. A delivery stays `held` until its settlement is answered, so that one the broker says again after a
reconnect (its line answer was lost) is known and not worked on twice.

A broker that was started again, or another node that has taken the queue over, does not know what it had given to whom:
it finds what we had by the tokens. So what came on an earlier connection is settled one by one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from sluice.client.net.confirm import Confirm
from sluice.client.queues.delivery import Delivery
from sluice.client.errors import ClientError, PublishRefused, Unsupported
from sluice.client.protocol.pending import Exchange, Outgoing
from sluice.wire.packets import V5, Publish, publish_with
from sluice.wire.properties import Properties
from sluice.wire.reasons import IMPLEMENTATION_SPECIFIC_ERROR, NO_MATCHING_SUBSCRIBERS

if TYPE_CHECKING:
    from sluice.client.client import Client

log = logging.getLogger("sluice.client")

MOST_AT_ONCE: Final = 256  # deliveries that one publish settles


class Settler:
    def __init__(self, client: Client) -> None:
        self.held: dict[str, Delivery] = {}
        self.line = 0  # counts connections
        self.adopts = False  # a job that is given again while it is being done goes on under its new token
        self._twins: list[Delivery] = []  # older deliveries of an id that is held anew
        self._client = client
        self._explicit = client.options.version == V5
        self._acks: dict[str, list[Delivery]] = {}
        self._scheduled = False

    # Taking

    def take(self, delivery: Delivery) -> bool:
        """A delivery has arrived; False: it is with us already, and was only said again."""
        delivery.line = self.line
        before = self.held.get(delivery.id)
        if before is not None:
            if before.token == delivery.token and (delivery.token or delivery.message.dup):
                return False
            if before.done and delivery.token and before.place == delivery.place:
                # Given again before our ack of it was heard: what is done is done.
                self.held[delivery.id] = delivery
                self.say(delivery, "$ack", [])
                return False
            if before.place != delivery.place or (before.taken and not self.adopts):
                before.has_twin = delivery.has_twin = True
                self._twins.append(before)
            elif not before.taken:
                # Its deadline has passed while it waited here: this one is in its stead.
                before.settled = True
            elif not before.settled:
                before.token = delivery.token
                before.line = self.line
                return False
        self.held[delivery.id] = delivery
        return True

    def unsettled(self) -> list[Delivery]:
        return [one for one in [*self._twins, *self.held.values()] if not one.settled]

    def drop(self, delivery: Delivery) -> None:
        """It is not ours any more, and the broker knows."""
        delivery.settled = True
        if self.held.get(delivery.id) is delivery:
            del self.held[delivery.id]
        elif delivery in self._twins:
            self._twins.remove(delivery)

    # Settling

    def ack_soon(self, delivery: Delivery) -> None:
        """Ack with the others of this turn."""
        delivery.settled = True
        delivery.done = True
        if not self._explicit:  # 3.1.1: the answer to the packet is the ack
            self._client.acknowledge(delivery.message)
            self.drop(delivery)
        elif delivery.has_twin or delivery.line != self.line:
            self.say(delivery, "$ack", [])
        else:
            try:
                self._acks[delivery.topic].append(delivery)
            except KeyError:
                self._acks[delivery.topic] = [delivery]
            if not self._scheduled:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """The acks that have gathered."""
        self._scheduled = False
        if self._acks:
            gathered = self._acks
            self._acks = {}
            for topic, deliveries in gathered.items():
                self.say_of_all(topic, "$ack", deliveries)

    def say_of_all(self, topic: str, verb: str, deliveries: list[Delivery]) -> None:
        """One verb for many, by their ids: the broker checks that this client has them."""
        if not self._explicit:
            for delivery in deliveries:
                self.say(delivery, verb, [])
            return
        name = f"{topic}/{verb}".encode()
        here: list[Delivery] = []
        for one in deliveries:
            if verb == "$ack" or (one.line == self.line and self._client.is_connected):
                here.append(one)
            else:
                self.say(one, verb, [])
        deliveries = here
        for at in range(0, len(deliveries), MOST_AT_ONCE):
            some = deliveries[at : at + MOST_AT_ONCE]
            properties = Properties()
            properties.user = [("message-id", one.id) for one in some]
            confirm = Confirm(publish_with(name, b"", 1, False, properties))
            self._submit(confirm, verb, some, True)

    def say(self, delivery: Delivery, verb: str, told: list[tuple[str, str]]) -> Confirm:
        """One verb for one delivery, by its token."""
        if verb != "$extend":
            delivery.settled = True
            delivery.done = verb == "$ack"
        if self._explicit:
            properties = Properties()
            properties.user = [("message-id", delivery.id), ("delivery-token", delivery.token), *told]
            confirm = Confirm(publish_with(f"{delivery.topic}/{verb}".encode(), b"", 1, False, properties))
        else:
            if told:
                raise Unsupported(
                    f"MQTT 3.1.1 cannot carry {', '.join(name for name, _ in told)}",
                    "Connect with version=5, or leave it out",
                )
            confirm = Confirm(Publish(f"{delivery.topic}/{verb}/{delivery.id}".encode(), b"", 1))
        self._submit(confirm, verb, [delivery])
        if not self._explicit and verb != "$extend":
            self._client.acknowledge(
                delivery.message
            )  # behind the word: it frees the line and settles nothing
        return confirm

    def _submit(self, confirm: Confirm, verb: str, deliveries: list[Delivery], by_name: bool = False) -> None:
        """Nothing is raised here: this is called at the end of turns as well, where nobody would hear it."""
        confirm.add_done_callback(_Answer(self, verb, deliveries, by_name))
        try:
            self._client.submit(confirm)
        except ClientError as error:
            confirm.fail(error)


class _Answer:
    """What the broker said to a settlement."""

    __slots__ = ("_by_name", "_deliveries", "_settler", "_verb")

    def __init__(self, settler: Settler, verb: str, deliveries: list[Delivery], by_name: bool) -> None:
        self._settler = settler
        self._verb = verb
        self._deliveries = deliveries
        self._by_name = by_name

    def __call__(self, exchange: Exchange) -> None:
        deliveries, settler = self._deliveries, self._settler
        if self._by_name and isinstance(exchange, Outgoing):
            if exchange.reason in (NO_MATCHING_SUBSCRIBERS, IMPLEMENTATION_SPECIFIC_ERROR):
                deliveries = self._say_again(deliveries)
        error = exchange.error
        if isinstance(error, PublishRefused | Unsupported):
            self._warn(
                error, [one for one in deliveries if settler.held.get(one.id, one) is one or one.has_twin]
            )
        if self._verb != "$extend":
            for delivery in deliveries:
                settler.drop(delivery)

    def _warn(self, error: PublishRefused | Unsupported, deliveries: list[Delivery]) -> None:
        """Of those in whose stead no other delivery has been acked meanwhile."""
        if deliveries:
            log.warning(
                "%s of %s was refused: %s",
                self._verb,
                f"{len(deliveries)} deliveries" if len(deliveries) > 1 else deliveries[0].id,
                getattr(error, "reason_string", None) or error.what,
            )

    def _say_again(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Some of what we have settled is not known by name. What came on an earlier connection may be known by its
        token; those that this is no hope for."""
        settler = self._settler
        left: list[Delivery] = []
        for one in deliveries:
            if one.line == settler.line or settler.held.get(one.id) is not one:
                left.append(one)
            else:
                settler.say(one, self._verb, [])
        return left

"""A member of a consumer group, as an async iterator over its deliveries.

    async with client.consumer("tasks", group="workers") as tasks:
        async for task in tasks:
            ...
            await task.ack()

When it closes, it releases unsettled deliveries, so that other members get them at once and no
attempt counts as failed. When the server loses the session, buffered deliveries are dropped: the
broker redelivers them, perhaps to another member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Self

from sluice.client.errors import ClientClosed, ClientError, PublishRefused, Unsupported
from sluice.client.message import Message, ReplyOptions
from sluice.client.net import Confirm, ReceiveBuffer
from sluice.client.queues.delivery import Delivery
from sluice.client.queues.ports import QueueClient
from sluice.client.queues.publisher import QUEUE_PREFIX, Publisher
from sluice.client.queues.settler import Settler
from sluice.wire.packets import V5
from sluice.wire.reasons import UNSPECIFIED_ERROR

LEAVE_SECONDS: Final = 5.0  # for the broker to acknowledge that we leave
BARRIER_FILTER: Final = "sluice/nothing"  # a filter without subscriptions


class Consumer:
    """Created by `client.consumer(...)`; subscribes on entry or before the first delivery."""

    def __init__(
        self,
        client: QueueClient,
        queue: str,
        group: str | None,
        prefetch: int | None,
        start: str | None,
        priority: int | None,
        exclusive: bool,
    ) -> None:
        self.queue = queue.removeprefix(QUEUE_PREFIX)
        self.group = group
        self.settler = Settler(client)
        self._client = client
        self._is_v5 = client.options.version == V5
        self._options = {
            "consumer-group": group,
            "prefetch": None if prefetch is None else str(prefetch),
            "start": start,
            "consumer-priority": None if priority is None else str(priority),
            "exclusive": "true" if exclusive else None,
        }
        self._buffer: ReceiveBuffer[Delivery] = ReceiveBuffer(0xFFFF)
        self._filter = ""
        self._closed = False

    # Joining and leaving

    async def open(self) -> None:
        """Join the group. Called automatically on entry and before the first delivery."""
        if self._filter:
            return
        if self._closed:
            raise ClientClosed("the consumer is closed", "Make a new one with client.consumer(...)")
        client = self._client
        if self._is_v5:
            topic_filter = topic = QUEUE_PREFIX + self.queue
        else:
            topic_filter = f"{QUEUE_PREFIX}{self.queue}/$group/{self._group_for_v311()}"
            topic = f"{QUEUE_PREFIX}{self.queue}/$msg/#"
        if client.dispatcher.has_filter(topic):  # the broker has one member per client and queue
            raise Unsupported(
                f"this client consumes {self.queue!r} already",
                "Take from that consumer, close it first, or use a second client for another group",
            )
        self._filter = topic_filter
        client.dispatcher.add(topic, self)
        try:
            await self._subscribe()
        except BaseException:
            client.dispatcher.remove(self)
            self._filter = ""
            raise

    async def _subscribe(self) -> None:
        options = {name: value for name, value in self._options.items() if value is not None}
        await self._client.subscribe(self._filter, qos=1, user=options if self._is_v5 else None)

    def _group_for_v311(self) -> str:
        """Return the group, which MQTT 3.1.1 names in the topic; refuse other options."""
        given = [
            name
            for name, value in self._options.items()
            if value is not None and name != "consumer-group"
        ]
        if given:
            raise Unsupported(
                f"MQTT 3.1.1 cannot carry {', '.join(given)}",
                "Connect with version=5, or leave it out",
            )
        client_id = self._client.client_id
        group = self.group or client_id.rpartition("-")[0] or client_id
        if not group:
            raise Unsupported(
                "a consumer of MQTT 3.1.1 needs a group", "Give group, or a client_id"
            )
        return group

    async def set_prefetch(self, prefetch: int) -> None:
        """Change how many unsettled deliveries this consumer accepts.

        With 0 it accepts no more: other members of the group get its partitions at once, and it can
        still settle the deliveries that it holds.
        """
        if self._is_v5 and self._filter:
            self._options["prefetch"] = str(prefetch)
            await self._subscribe()

    async def close(self) -> None:
        """Leave the group and release unsettled deliveries, without counting an attempt."""
        self._closed = True
        if not self._filter:
            return
        client = self._client
        try:
            if client.is_connected:
                async with asyncio.timeout(LEAVE_SECONDS):
                    # A barrier: the UNSUBACK arrives after all deliveries on their way to us.
                    await client.unsubscribe(BARRIER_FILTER, check=False)
                    self.release_all(self.settler.unsettled())
                    # In one write with the releases.
                    await client.unsubscribe(self._filter, check=False)
        except (TimeoutError, ClientError):
            pass  # the broker notices when the connection or the leases end
        finally:
            client.forget_subscription(self._filter)
            client.dispatcher.remove(self)
            self._filter = ""
            self._buffer.end(None)

    def release_all(self, deliveries: list[Delivery]) -> None:
        """Release deliveries with one publish per topic."""
        for one in deliveries:
            one.settled = True
        self.settler.flush()
        self._settle_by_topic("$release", deliveries)

    def extend(self, deliveries: list[Delivery]) -> None:
        """Restart the deadlines of deliveries with one publish per topic."""
        self._settle_by_topic("$extend", deliveries)

    def _settle_by_topic(self, verb: str, deliveries: list[Delivery]) -> None:
        by_topic: dict[str, list[Delivery]] = {}
        for one in deliveries:
            by_topic.setdefault(one.topic, []).append(one)
        for topic, some in by_topic.items():
            self.settler.settle_many(topic, verb, some)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.close()

    # Taking

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        delivery = await self.take()
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    async def take(self, timeout: float | None = None) -> Delivery | None:
        """Return the next delivery, or None after the end. A cancelled take loses nothing.

        Raise TimeoutError if none arrives in time.
        """
        if timeout is not None:
            async with asyncio.timeout(timeout):
                return await self.take()
        if not self._filter and not self._closed:
            await self.open()
        while True:
            delivery = await self._buffer.take()
            if delivery is None:
                return None
            if not delivery.settled:
                delivery.is_taken = True
                return delivery

    def take_waiting(self) -> list[Delivery]:
        """Take all buffered deliveries without waiting."""
        waiting = [one for one in self._buffer.take_waiting() if not one.settled]
        for one in waiting:
            one.is_taken = True
        return waiting

    def first_waiting(self) -> Delivery | None:
        """Return the delivery that is taken next, or None if none is buffered."""
        return self._buffer.peek()

    @property
    def buffered(self) -> int:
        """Return the number of buffered deliveries."""
        return len(self._buffer)

    # Called by deliveries

    async def settle(
        self, delivery: Delivery, verb: str, extra: list[tuple[str, str]], confirm: bool
    ) -> bool:
        if delivery.settled:
            return False
        if verb == "$ack" and not confirm:
            self.settler.ack_soon(delivery)
            return True
        answer = self.settler.settle_one(delivery, verb, extra)
        if confirm:
            await answer
        return True

    async def ack_and_publish(
        self, delivery: Delivery, messages: Iterable[tuple[str, object]]
    ) -> bool:
        if delivery.settled:
            return False
        packets = [
            Publisher(self._client, queue).make_packet(payload) for queue, payload in messages
        ]
        confirm = self.settler.ack_and_publish(delivery, packets)
        try:
            await confirm
        except PublishRefused as error:
            if error.reason != UNSPECIFIED_ERROR:
                raise
        else:
            self.settler.untrack(delivery)
            return True
        # A queue in another cell: at least once, and the message ids drop duplicates.
        for packet in packets:
            stored = Confirm(packet)
            self._client.submit(stored)
            await stored
        return await self.settle(delivery, "$ack", [], True)

    async def reply(self, message: Message, payload: object, options: ReplyOptions) -> None:
        await self._client.reply(message, payload, **options)

    # Called by the dispatcher

    def receive(self, message: Message) -> None:
        if self._is_v5:
            # The PUBACK frees the packet id; the queue waits for the settlement.
            self._client.acknowledge(message)
        delivery = Delivery(message, self)
        if self.settler.track(delivery):
            self._buffer.put(delivery)

    def on_reconnected(self) -> None:
        self.settler.connection_number += 1

    def on_session_lost(self) -> None:
        for delivery in self._buffer.take_waiting():
            self.settler.untrack(delivery)

    def flush(self) -> None:
        self.settler.flush()

    async def leave(self) -> None:
        await self.close()

    def end(self, error: ClientError | None) -> None:
        self._buffer.end(error)

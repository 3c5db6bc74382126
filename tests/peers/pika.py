"""A stub of pika for docs/migrating.md, with a broker inside the program.

The code under "before" on that page runs without RabbitMQ. `start_consuming` returns when the
queues are empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class ConnectionParameters:
    host: str


@dataclass
class BasicProperties:
    delivery_mode: int


@dataclass
class Method:
    delivery_tag: int


Handler = Callable[["Channel", Method, BasicProperties, bytes], None]


class Channel:
    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[bytes, BasicProperties]]] = {}
        self._handlers: dict[str, Handler] = {}
        self._open: set[int] = set()
        self._tag = 0

    def queue_declare(self, queue: str, durable: bool, arguments: dict[str, Any]) -> None:
        assert durable and set(arguments) <= {"x-dead-letter-exchange"}
        self._queues[queue] = deque()

    def confirm_delivery(self) -> None:
        pass

    def basic_publish(
        self, exchange: str, key: str, body: bytes, properties: BasicProperties
    ) -> None:
        assert exchange == "", "the one without a name, which gives to the queue of the key"
        self._queues[key].append((body, properties))

    def basic_qos(self, prefetch_count: int) -> None:
        assert prefetch_count > 0

    def basic_consume(self, queue: str, handler: Handler) -> None:
        assert queue in self._queues
        self._handlers[queue] = handler

    def start_consuming(self) -> None:
        for queue, handler in self._handlers.items():
            while self._queues[queue]:
                body, properties = self._queues[queue].popleft()
                self._tag += 1
                self._open.add(self._tag)
                handler(self, Method(self._tag), properties, body)
        assert not self._open, "something was not settled"

    def basic_ack(self, delivery_tag: int) -> None:
        self._open.remove(delivery_tag)

    def basic_nack(self, delivery_tag: int, requeue: bool) -> None:
        assert not requeue
        self._open.remove(delivery_tag)


class BlockingConnection:
    def __init__(self, parameters: ConnectionParameters) -> None:
        self.parameters = parameters

    def channel(self) -> Channel:
        return Channel()

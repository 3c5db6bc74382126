"""The broker's test kit with queues: engine, commit loop, handler and session store.

`QueueHarness` adds a memory store that can be held, cut off (`crash`, `kill`) or closed
(`restart`). Afterwards a new broker recovers from what the store has, at the same time of the same
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sluice.broker.limits import Limits
from sluice.broker_core import BrokerCore
from sluice.queues.model.effects import Alert
from sluice.queues.model.queue import Queue
from sluice.queues.service.templates import QueueTemplates, Template
from sluice.store.memory import MemoryStore
from sluice.wire.packets import V311, Ack, Publish, Suback, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBREC
from sluice.wire.topics import matches
from tests.broker.kit import BrokerHarness, Client, Loop, props

Templates = Sequence[tuple[str, Mapping[str, object]]]


def make_templates(templates: Templates) -> QueueTemplates:
    """Return templates from (pattern, configuration) pairs."""
    return QueueTemplates(matches, [Template(match, config) for match, config in templates])


class QueueHarness(BrokerHarness):
    """A broker with queues.

    `templates` are (pattern, configuration) pairs; other keywords are limits of the broker.
    """

    def __init__(
        self,
        templates: Templates = (),
        *,
        queues: bool = True,
        segment_bytes: int = 1 << 20,
        **limits: Any,
    ) -> None:
        self.loop = Loop()
        self.limits = Limits()
        for name, value in limits.items():
            assert hasattr(self.limits, name)
            setattr(self.limits, name, value)
        self.log: list[tuple[str, dict[str, object]]] = []
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []
        self._queue_templates = make_templates(templates)
        self._queues = queues
        self.store = MemoryStore(
            self._call_soon, segment_bytes=segment_bytes, snapshot_bytes=segment_bytes
        )
        self._build()

    def _call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon(partial(callback, *arguments))  # type: ignore[arg-type]

    def _build(self) -> None:
        loop = self.loop
        core = BrokerCore(
            loop,
            self._queue_templates,
            limits=self.limits,
            log=self._record_log,
            clock=loop.clock,
            draw=lambda: 0.5,
            queues_enabled=self._queues,
        )
        self.core = core
        self.broker = core.broker
        self.engine = core.engine
        core.open(self.store, self._report)
        self.commit_loop = core.commit_loop
        loop.settle()

    def _record_log(self, event: str, facts: dict[str, object]) -> None:
        self.log.append((event, facts))

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.alerts += alerts
        self.warnings += warnings

    def set_templates(self, *templates: Template, auto_create: bool = True) -> None:
        """Use other queue templates from now on, as after a reload."""
        self._queue_templates.replace(templates, auto_create)

    def crash(self) -> None:
        """Cut the power and start again: unsynced records and all connections are lost."""
        self._open_on(self.store.crash())

    def kill(self) -> None:
        """`kill -9` and start again: committed records are kept by the system, synced or not."""
        answered = self.store.count_unsynced() - self.store.count_pending()
        self._open_on(self.store.crash(answered))

    def restart(self) -> None:
        """Stop normally and start again."""
        self.loop.settle()
        self.commit_loop.close()
        self._open_on(self.store)

    def _open_on(self, store: MemoryStore) -> None:
        now = self.loop.now
        self.loop = Loop()
        self.loop.now = now
        self.store = store
        self._build()

    # ---- inspection

    def queue(self, name: str) -> Queue:
        return self.engine.queues[name]

    def depth(self, name: str) -> int:
        queue = self.engine.queues.get(name)
        return 0 if queue is None else int(queue.depth)


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

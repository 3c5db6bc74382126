"""A real client on a real listener: paho, over every transport."""

from __future__ import annotations

import itertools
import queue
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.support.broker_process import Broker

SECONDS = 30.0
_NUMBERS = itertools.cycle(range(1, 255))


class MqttProbe:
    """One CONNECT. `reason` is the 5.0 reason code; 3.1.1 has two of them."""

    def __init__(
        self,
        broker: Broker,
        listener: str,
        version: int,
        username: str | None,
        password: str | None,
        client_id: str,
        context: ssl.SSLContext | None,
        source: str,
    ) -> None:
        transport: Any = "websockets" if listener.startswith("w") else "tcp"
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion(version),
            transport=transport,
            reconnect_on_failure=False,
        )
        if listener in ("mqtts", "wss"):
            assert context is not None
            self.client.tls_set_context(context)
        if username is not None or password is not None:
            self.client.username_pw_set(username, password)
        self.answers: queue.Queue[int] = queue.Queue()
        self.lost: queue.Queue[int] = queue.Queue()
        self.acks: queue.Queue[int] = queue.Queue()
        self.client.on_connect = lambda *args: self.answers.put(args[3].value)
        self.client.on_disconnect = lambda *args: self.lost.put(args[3].value)
        self.client.on_subscribe = lambda *args: self.acks.put(args[3][0].value)
        self.client.on_publish = lambda *args: self.acks.put(args[3].value)
        self.client.connect_timeout = SECONDS
        address = broker.address(listener)
        # Each client has an address of its own by default: the broker delays addresses that guess.
        source = source or f"127.{next(_NUMBERS)}.{next(_NUMBERS)}.1"
        self.client.connect(address.host, address.port, bind_address=source)
        self.client.loop_start()
        self.reason = self.answers.get(timeout=SECONDS)

    def subscribe(self, topic_filter: str) -> int:
        self.client.subscribe(topic_filter, 1)
        return self.acks.get(timeout=SECONDS)

    def publish(self, topic: str, payload: bytes = b"x") -> int:
        self.client.publish(topic, payload, 1)
        return self.acks.get(timeout=SECONDS)


@contextmanager
def probe(
    broker: Broker,
    listener: str = "mqtt",
    version: int = 5,
    username: str | None = None,
    password: str | None = None,
    client_id: str = "",
    context: ssl.SSLContext | None = None,
    source: str = "",
) -> Iterator[MqttProbe]:
    mqtt_probe = MqttProbe(
        broker, listener, version, username, password, client_id, context, source
    )
    try:
        yield mqtt_probe
    finally:
        mqtt_probe.client.disconnect()
        mqtt_probe.client.loop_stop()
        mqtt_probe.client._reset_sockets()  # a refused client keeps them

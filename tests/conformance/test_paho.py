"""paho-mqtt, the most common Python client, over every listener and in both versions."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.conformance.conftest import Certificates
from tests.support.broker_process import Broker

SECONDS = 10.0


class Client:
    """A paho client in its own thread, with its events in queues."""

    def __init__(
        self,
        listening_broker: Broker,
        certificates: Certificates,
        listener: str,
        client_id: str,
        version: int,
        clean: bool = True,
        will: tuple[str, bytes] | None = None,
        client_certificate: bool = False,
    ) -> None:
        transport: Any = "websockets" if listener in ("ws", "wss") else "tcp"
        options = {"clean_session": clean} if version == 4 else {}
        self.paho = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion(version),
            transport=transport,
            reconnect_on_failure=False,
            **options,
        )
        self.connected: queue.Queue[tuple[bool, ReasonCode]] = queue.Queue()
        self.disconnected: queue.Queue[ReasonCode] = queue.Queue()
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.answers: queue.Queue[list[int]] = queue.Queue()
        self.paho.on_connect = lambda _, __, flags, reason, ___: self.connected.put(
            (flags.session_present, reason)
        )
        self.paho.on_disconnect = lambda _, __, ___, reason, ____: self.disconnected.put(reason)
        self.paho.on_message = lambda _, __, message: self.messages.put(message)
        self.paho.on_subscribe = lambda _, __, ___, reasons, ____: self.answers.put(
            [reason.value for reason in reasons]
        )
        if listener in ("mqtts", "wss"):
            context = certificates.client_context()
            if client_certificate:
                context.load_cert_chain(certificates.client_cert, certificates.client_key)
            self.paho.tls_set_context(context)
        if will is not None:
            self.paho.will_set(*will, qos=1)
        self.address = listening_broker.address(listener)
        self.version, self.clean = version, clean

    def connect(self) -> bool:
        """Connect, and return whether the session existed before."""
        if self.version == 5:
            properties = Properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = 0 if self.clean else 300
            self.paho.connect(
                self.address.host, self.address.port, clean_start=self.clean, properties=properties
            )
        else:
            self.paho.connect(self.address.host, self.address.port)
        self.paho.loop_start()
        present, reason = self.connected.get(timeout=SECONDS)
        assert not reason.is_failure, reason
        return present

    def subscribe(self, topic: str, qos: int = 2) -> list[int]:
        self.paho.subscribe(topic, qos)
        return self.answers.get(timeout=SECONDS)

    def publish(self, topic: str, payload: bytes, qos: int, **options: Any) -> None:
        self.paho.publish(topic, payload, qos, **options).wait_for_publish(SECONDS)

    def message(self) -> paho.MQTTMessage:
        return self.messages.get(timeout=SECONDS)

    def disconnect(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()

    def abort_connection(self) -> None:
        """Break the connection without a DISCONNECT."""
        connection: Any = self.paho.socket()
        getattr(connection, "_socket", connection).shutdown(socket.SHUT_RDWR)


MakeClient = Callable[..., Client]


@pytest.fixture
def make(
    listening_broker: Broker, certificates: Certificates, listener: str, version: int
) -> Iterator[MakeClient]:
    made: list[Client] = []

    def build(client_id: str, **options: Any) -> Client:
        client = Client(listening_broker, certificates, listener, client_id, version, **options)
        made.append(client)
        return client

    yield build
    for client in made:
        client.disconnect()
        client.paho._reset_sockets()


def test_messages_are_exchanged_at_each_qos(make: MakeClient, name: str) -> None:
    client = make(name)
    assert not client.connect()
    assert client.subscribe(f"{name}/#") == [2]
    for qos in range(3):
        client.publish(f"{name}/{qos}", b"x" * (1000**qos // 10), qos)
    got = [client.message() for _ in range(3)]
    assert [(one.topic, one.qos, len(one.payload)) for one in got] == [
        (f"{name}/{qos}", qos, 1000**qos // 10) for qos in range(3)
    ]


def test_retained_messages(make: MakeClient, name: str) -> None:
    writer = make(f"{name}-w")
    writer.connect()
    writer.publish(name, b"kept", 1, retain=True)
    reader = make(f"{name}-r")
    reader.connect()
    reader.subscribe(name)
    message = reader.message()
    assert (message.payload, message.retain) == (b"kept", True)
    writer.publish(name, b"", 1, retain=True)
    assert reader.message().payload == b""


def test_will(make: MakeClient, name: str) -> None:
    subscriber, client = make(f"{name}-h"), make(name, will=(f"{name}/will", b"gone"))
    subscriber.connect()
    subscriber.subscribe(f"{name}/will")
    client.connect()
    client.abort_connection()
    assert subscriber.message().payload == b"gone"


def test_session_is_resumed(make: MakeClient, name: str) -> None:
    client = make(name, clean=False)
    assert not client.connect()
    client.subscribe(name)
    client.disconnect()
    writer = make(f"{name}-w")
    writer.connect()
    for qos in (1, 2):
        writer.publish(name, b"%d" % qos, qos)
    again = make(name, clean=False)
    assert again.connect()
    assert [again.message().payload for _ in range(2)] == [b"1", b"2"]


def test_takeover(make: MakeClient, name: str, version: int) -> None:
    first, second = make(name), make(name)
    first.connect()
    second.connect()
    reason = first.disconnected.get(timeout=SECONDS)
    if version == 5:
        assert reason.value == 0x8E


def test_unsubscribe(make: MakeClient, name: str) -> None:
    client = make(name)
    client.connect()
    client.subscribe(name)
    done: queue.Queue[bool] = queue.Queue()
    client.paho.on_unsubscribe = lambda *_: done.put(True)
    client.paho.unsubscribe(name)
    assert done.get(timeout=SECONDS)
    client.publish(name, b"unheard", 1)
    client.subscribe(f"{name}/end")
    client.publish(f"{name}/end", b"end", 1)
    assert client.message().payload == b"end"


@pytest.mark.parametrize("listener", ["mqtt"], indirect=True)
@pytest.mark.parametrize("version", [5], indirect=True, ids=["5.0"])
@pytest.mark.parametrize("qos", [1, 2])
def test_message_too_large_for_its_queue_is_refused_once(
    make: MakeClient, name: str, qos: int
) -> None:
    """paho cannot read a PUBACK with 0x95: it would reconnect and resend the message for ever."""
    client = make(name, clean=False)
    client.connect()
    answered: queue.Queue[int] = queue.Queue()
    client.paho.on_publish = lambda _, __, ___, reason, ____: answered.put(reason.value)
    client.paho.publish(f"$queue/{name}", b"x" * 1_200_000, qos)
    # After a PUBREC with an error paho sends PUBREL, which the broker does not expect.
    assert answered.get(timeout=SECONDS) == (0x97 if qos == 1 else 0x92)
    client.publish(f"$queue/{name}", b"fits", qos)
    assert answered.get(timeout=SECONDS) == 0
    assert client.disconnected.empty()
    client.abort_connection()
    client.disconnected.get(timeout=SECONDS)
    client.paho.loop_stop()
    client.paho._reset_sockets()
    assert client.connect()
    client.publish(f"$queue/{name}", b"next", qos)
    assert answered.get(timeout=SECONDS) == 0
    assert answered.empty()


@pytest.mark.parametrize("listener", ["mqtt"], indirect=True)
@pytest.mark.parametrize("version", [4], indirect=True, ids=["3.1.1"])
def test_jobs_are_settled_by_topic_although_paho_sends_pubacks(make: MakeClient, name: str) -> None:
    client = make(name)
    client.connect()
    assert client.subscribe(f"$queue/{name}/$group/g/$explicit", 1) == [1]
    client.publish(f"$queue/{name}", b"job", 1)

    def settle(verb: str) -> None:
        job = client.message()
        assert job.payload == b"job"
        queue_topic, _, message_id = job.topic.partition("/$msg/")
        client.publish(f"{queue_topic}/${verb}/{message_id}", b"", 1)

    settle("release")
    settle("reject")  # of the second delivery
    assert client.subscribe(f"$queue/dlq/{name}/$group/g/$explicit", 1) == [1]
    settle("release")
    settle("ack")


@pytest.mark.parametrize("version", [5], indirect=True, ids=["5.0"])
def test_properties(make: MakeClient, name: str) -> None:
    client = make(name)
    client.connect()
    asked = Properties(PacketTypes.SUBSCRIBE)
    asked.SubscriptionIdentifier = 77
    client.paho.subscribe(name, options=SubscribeOptions(qos=1), properties=asked)
    assert client.answers.get(timeout=SECONDS) == [1]
    sent = Properties(PacketTypes.PUBLISH)
    sent.UserProperty = [("a", "1"), ("a", "2")]
    sent.ContentType = "text/plain"
    sent.ResponseTopic = "answers"
    sent.CorrelationData = b"\x00\x01"
    sent.MessageExpiryInterval = 100
    client.publish(name, b"x", 1, properties=sent)
    got: Any = client.message().properties
    assert got.UserProperty == [("a", "1"), ("a", "2")]
    assert (got.ContentType, got.ResponseTopic, got.CorrelationData) == (
        "text/plain",
        "answers",
        b"\x00\x01",
    )
    assert got.SubscriptionIdentifier == [77]
    assert got.MessageExpiryInterval == 100

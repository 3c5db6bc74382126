"""The client with a real server: the operations of an application, in both versions of MQTT."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sluice.client import (
    Client,
    ClientClosed,
    ConnectFailed,
    Message,
    Properties,
    TooManyUnconfirmed,
    Unsupported,
    Will,
)
from tests.client.conftest import StartMosquitto
from tests.client.servers import Server, free_port

Connect = Callable[..., Awaitable[Client]]


async def receive(client: Client, count: int = 1) -> list[Message]:
    """Return the next `count` messages."""
    found: list[Message] = []
    async with asyncio.timeout(10):
        async for message in client.messages():
            found.append(message)
            if len(found) == count:
                break
    return found


async def nothing_arrives(client: Client, marker: str) -> None:
    """Check that nothing arrives before the marker, which is published last."""
    await client.subscribe(marker)
    await client.publish(marker, b"marker")
    (message,) = await receive(client)
    assert message.topic == marker


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_arrives_as_it_was_published(
    server: Server, version: int, qos: int, connect: Connect
) -> None:
    client = await connect(server, version=version)
    assert await client.subscribe("greetings/+", qos=qos) == [qos]
    result = await client.publish("greetings/world", "hällo", qos=qos)
    (message,) = await receive(client)
    assert result.reason == 0
    assert (message.topic, message.payload, message.qos) == (
        "greetings/world",
        "hällo".encode(),
        qos,
    )
    assert not message.retain
    assert client.unconfirmed == 0


async def test_properties_arrive_with_the_message(server: Server, connect: Connect) -> None:
    client = await connect(server)
    await client.subscribe("orders", qos=1, identifier=12)
    properties = Properties()
    properties.payload_format = 1
    await client.publish(
        "orders",
        b"{}",
        qos=1,
        properties=properties,
        user={"trace": "abc"},
        content_type="application/json",
        response_topic="replies",
        correlation_data=b"\x00\x01",
        expiry_seconds=100,
    )
    (message,) = await receive(client)
    got = message.properties
    assert (got.payload_format, got.content_type, got.response_topic) == (
        1,
        "application/json",
        "replies",
    )
    assert (got.correlation_data, got.user) == (b"\x00\x01", [("trace", "abc")])
    assert got.message_expiry is not None
    assert got.message_expiry <= 100
    assert message.subscription_ids == [12]
    assert properties.user == []  # the caller's object is not changed


async def test_properties_on_3_1_1_are_refused_with_a_remedy(
    server: Server, connect: Connect
) -> None:
    client = await connect(server, version=4)
    with pytest.raises(Unsupported, match="Connect with version=5"):
        await client.publish("t", b"", user={"a": "b"})
    with pytest.raises(Unsupported, match="Connect with version=5"):
        await client.subscribe("t", no_local=True)


@pytest.mark.parametrize("topic", ["", "a/+", "#", "nul\0", "x" * 70_000])
async def test_invalid_topic_is_refused(server: Server, connect: Connect, topic: str) -> None:
    client = await connect(server)
    with pytest.raises(Unsupported, match="is not a topic to publish to"):
        await client.publish(topic)


async def test_thousands_of_publishes_in_flight_are_all_confirmed(
    server: Server, version: int, connect: Connect
) -> None:
    client = await connect(server, version=version)
    confirms = [client.publish_nowait("t", b"%d" % nth, qos=1 + nth % 2) for nth in range(5_000)]
    assert client.unconfirmed == 5_000
    results = await asyncio.gather(*confirms[-2:])
    await client.drain()
    assert all(confirm.done for confirm in confirms)
    assert {result.reason for result in results} <= {0, 0x10}


async def test_messages_of_one_publisher_arrive_in_order(
    server: Server, version: int, connect: Connect
) -> None:
    client = await connect(server, version=version, max_buffered=100)
    await client.subscribe("t", qos=1)
    for nth in range(2_000):
        client.publish_nowait("t", b"%d" % nth, qos=1)
    messages = await receive(client, 2_000)
    assert [int(message.payload) for message in messages] == list(range(2_000))


async def test_retained_message_is_sent_to_a_new_subscriber(
    server: Server, version: int, connect: Connect
) -> None:
    publisher = await connect(server, version=version)
    await publisher.publish("status", b"up", qos=1, retain=True)
    reader = await connect(server, version=version)
    await reader.subscribe("status", qos=1)
    (message,) = await receive(reader)
    assert (message.payload, message.retain) == (b"up", True)


async def test_retain_handling_and_no_local_are_applied(server: Server, connect: Connect) -> None:
    client = await connect(server)
    await client.publish("status", b"up", qos=1, retain=True)
    await client.subscribe("status", retain_handling=2, no_local=True)
    await client.publish("status", b"down", qos=1)
    await nothing_arrives(client, "marker")


async def test_retain_as_published_keeps_the_flag(server: Server, connect: Connect) -> None:
    client = await connect(server)
    await client.subscribe("status", retain_as_published=True)
    await client.publish("status", b"up", retain=True)
    (message,) = await receive(client)
    assert message.retain


async def test_several_filters_are_granted_and_unsubscribed_individually(
    server: Server, version: int, connect: Connect
) -> None:
    client = await connect(server, version=version)
    assert await client.subscribe(["a/#", "b"], qos=2) == [2, 2]
    assert await client.unsubscribe(["a/#", "b"]) == [0, 0]
    await client.publish("a/1", b"", qos=1)
    await nothing_arrives(client, "marker")


async def test_will_is_published_when_the_client_vanishes(
    server: Server, version: int, connect: Connect
) -> None:
    watcher = await connect(server, version=version)
    await watcher.subscribe("wills/#", qos=1)
    will = Will("wills/one", b"gone", qos=1)
    if version == 5:
        will.properties = Properties()
        will.properties.user = [("cause", "unknown")]
    doomed = await connect(server, version=version, will=will, reconnect=False)
    assert doomed._reconnector.connection is not None
    doomed._reconnector.connection.abort()
    (message,) = await receive(watcher)
    assert (message.topic, message.payload) == ("wills/one", b"gone")
    if version == 5:
        assert message.properties.user == [("cause", "unknown")]


async def test_normal_disconnect_discards_the_will(
    server: Server, version: int, connect: Connect
) -> None:
    watcher = await connect(server, version=version)
    await watcher.subscribe("wills/#", qos=1)
    leaving = await connect(server, version=version, will=Will("wills/one", b"gone"))
    await leaving.subscribe("flood")
    for _ in range(500):
        await leaving.publish("flood", b"x" * 1_000)  # unread bytes at closing time
    await leaving.close()
    await watcher.publish("wills/end", b"")
    (message,) = await receive(watcher)
    assert message.topic == "wills/end"


async def test_disconnect_with_will_publishes_it(server: Server, connect: Connect) -> None:
    watcher = await connect(server)
    await watcher.subscribe("wills/#")
    leaving = await connect(server, will=Will("wills/one", b"gone"))
    await leaving.close(reason=0x04)
    (message,) = await receive(watcher)
    assert message.topic == "wills/one"


async def test_session_queues_messages_while_its_client_is_offline(
    server: Server, version: int, connect: Connect
) -> None:
    first = await connect(
        server, version=version, client_id="subscriber", clean_start=False, session_expiry=100
    )
    assert not first.session_present
    await first.subscribe("orders", qos=1)
    await first.close()
    publisher = await connect(server, version=version)
    await publisher.publish("orders", b"kept", qos=1)
    second = await connect(
        server, version=version, client_id="subscriber", clean_start=False, session_expiry=100
    )
    assert second.session_present
    (message,) = await receive(second)
    assert message.payload == b"kept"


@pytest.mark.parametrize("qos", [1, 2])
async def test_message_without_manual_acknowledgement_is_resent_to_the_next_client(
    server: Server, version: int, qos: int, connect: Connect
) -> None:
    options = {
        "client_id": "subscriber",
        "clean_start": False,
        "session_expiry": 100,
        "manual_ack": True,
    }
    first = await connect(server, version=version, **options)
    await first.subscribe("work", qos=qos)
    await first.publish("work", b"one", qos=1)
    await first.publish("work", b"two", qos=1)
    one, two = await receive(first, 2)
    assert await one.ack()
    assert not await one.ack()
    # Its PUBACK shows that the server has read the acknowledgement before it.
    await first.publish("fence", b"", qos=1)
    await first.close()
    second = await connect(server, version=version, **options)
    (again,) = await receive(second)
    assert again.payload == two.payload
    assert await again.ack()
    await nothing_arrives(second, "marker")


async def test_message_read_by_the_iterator_is_acknowledged_automatically(
    server: Server, version: int, connect: Connect
) -> None:
    options = {"client_id": "subscriber", "clean_start": False, "session_expiry": 100}
    first = await connect(server, version=version, **options)
    await first.subscribe("work", qos=1)
    await first.publish("work", b"one", qos=1)
    await receive(first)
    await first.publish("fence", b"", qos=1)
    await first.close()
    second = await connect(server, version=version, **options)
    assert second.session_present
    await nothing_arrives(second, "marker")


async def test_the_server_assigns_a_client_id(server: Server, connect: Connect) -> None:
    client = await connect(server)
    assert client.client_id


async def test_publishes_respect_the_servers_receive_maximum(
    start_mosquitto: StartMosquitto, connect: Connect
) -> None:
    client = await connect(start_mosquitto("max_inflight_messages 3"))
    assert client.server.receive_maximum == 3
    for nth in range(200):
        client.publish_nowait("t", b"", qos=1 + nth % 2)
        assert len(client._protocol.outbound.inflight) <= 3
    async with asyncio.timeout(10):
        await client.drain()


async def test_message_above_the_servers_limits_is_refused_by_the_client(
    start_mosquitto: StartMosquitto, connect: Connect
) -> None:
    client = await connect(
        start_mosquitto("max_qos 1\nretain_available false\nmax_packet_size 1000")
    )
    with pytest.raises(Unsupported, match="Publish with qos=1"):
        await client.publish("t", b"", qos=2)
    with pytest.raises(Unsupported, match="retain=False"):
        await client.publish("t", b"", retain=True)
    with pytest.raises(Unsupported, match="Send a smaller payload"):
        client.publish_nowait("t", b"x" * 1_000)
    assert (await client.publish("t", b"x" * 900, qos=1)).reason in (0, 0x10)


async def test_too_many_unconfirmed_publishes_are_refused_and_capacity_can_be_awaited(
    server: Server, connect: Connect
) -> None:
    client = await connect(server, max_unconfirmed=10)
    for _ in range(10):
        client.publish_nowait("t", b"", qos=1)
    with pytest.raises(TooManyUnconfirmed, match="wait_for_capacity"):
        client.publish_nowait("t", b"", qos=1)
    async with asyncio.timeout(10):
        await client.wait_for_capacity()
        client.publish_nowait("t", b"", qos=1)
        await asyncio.gather(*(client.publish("t", b"", qos=1) for _ in range(100)))


async def test_slow_application_pauses_reading_and_loses_nothing(
    server: Server, version: int, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await connect(server, version=version, max_buffered=50)
    await reader.subscribe("flood")
    connection = reader._reconnector.connection
    assert connection is not None
    paused = asyncio.Event()
    pause = connection.pause_reading

    def pause_and_notify() -> None:
        pause()
        paused.set()

    monkeypatch.setattr(connection, "pause_reading", pause_and_notify)
    publisher = await connect(server, version=version)
    for nth in range(3_000):
        await publisher.publish("flood", b"%-1000d" % nth)
    await publisher.publish("fence", b"", qos=1)
    async with asyncio.timeout(10):
        await paused.wait()
    assert not connection.is_reading
    assert 50 <= len(reader._buffer) < 600  # the limit and at most one read beyond it
    messages = await receive(reader, 3_000)
    assert [int(message.payload) for message in messages] == list(range(3_000))
    assert reader.dropped == 0


async def test_publishing_while_reading_a_flood_does_not_deadlock(
    server: Server, version: int, connect: Connect
) -> None:
    client = await connect(server, version=version, max_buffered=10)
    await client.subscribe("flood", qos=1)
    publisher = await connect(server, version=version)
    for nth in range(500):
        publisher.publish_nowait("flood", b"%d" % nth, qos=1)
    count = 0
    async with asyncio.timeout(20):
        async for _ in client.messages():
            await client.publish("echo", b"", qos=1)
            count += 1
            if count == 500:
                break


async def test_cancelling_a_receiver_loses_no_message(server: Server, connect: Connect) -> None:
    client = await connect(server)
    await client.subscribe("t", qos=1)
    waiting = asyncio.create_task(receive(client))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.publish("t", b"one", qos=1)
    assert [message.payload for message in await receive(client)] == [b"one"]


async def test_two_receivers_share_the_messages(server: Server, connect: Connect) -> None:
    client = await connect(server)
    await client.subscribe("t", qos=1)
    both = [asyncio.create_task(receive(client)) for _ in range(2)]
    await client.publish("t", b"1", qos=1)
    await client.publish("t", b"2", qos=1)
    async with asyncio.timeout(10):
        found = await asyncio.gather(*both)
    assert sorted(messages[0].payload for messages in found) == [b"1", b"2"]


async def test_close_ends_the_iteration_and_every_task(server: Server, version: int) -> None:
    before = asyncio.all_tasks()
    async with Client(server.host, server.port, version=version) as client:
        reading = asyncio.create_task(_count(client))
        await asyncio.sleep(0)
        confirm = client.publish_nowait("t", b"", qos=1)
    async with asyncio.timeout(5):
        assert await reading == 0
    assert confirm.done
    assert confirm.error is None  # leaving the block waited for it
    assert asyncio.all_tasks() == before
    with pytest.raises(ClientClosed):
        await client.publish("t")
    with pytest.raises(ClientClosed):
        await client.connect()
    await client.close()


async def _count(client: Client) -> int:
    count = 0
    async for _ in client.messages():
        count += 1
    return count


async def test_client_that_never_connected_raises() -> None:
    client = Client()
    with pytest.raises(ClientClosed, match="async with"):
        await client.publish("t")
    await client.close()


async def test_closed_port_is_reported_at_once() -> None:
    with pytest.raises(ConnectFailed, match="Check that a server runs there"):
        await Client("127.0.0.1", free_port()).connect()


async def test_url_names_the_server(server: Server) -> None:
    async with Client.from_url(f"mqtt://{server.host}:{server.port}", client_id="by-url") as client:
        assert client.is_connected
    assert Client.from_url("mqtts://u:p%40ss@example.test").options.port == 8883
    assert Client.from_url("mqtts://u:p%40ss@example.test").options.password == "p@ss"
    with pytest.raises(Unsupported, match="mqtt://"):
        Client.from_url("http://example.test")

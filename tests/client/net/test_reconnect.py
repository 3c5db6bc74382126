"""Broken connections and servers that fall silent or refuse: how the client reacts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sluice.client import (
    Backoff,
    Client,
    ClientClosed,
    Connected,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
    Message,
    PublishRefused,
    ServerDisconnected,
    SubscribeRefused,
)
from sluice.wire.packets import (
    Ack,
    Connack,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
)
from sluice.wire.properties import PUBACK
from tests.client.protocol_kit import make_properties
from tests.client.servers import Proxy, ScriptedServer, Server, ServerConnection

Connect = Callable[..., Awaitable[Client]]

QUICK = Backoff(initial_seconds=0.01, max_seconds=0.05)


class Reconnects:
    """Counts connections, so that a test can wait for the next one."""

    def __init__(self) -> None:
        self.events: list[Connected] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Connected) -> None:
        self.events.append(event)
        self._changed.set()

    async def reach(self, count: int) -> Connected:
        async with asyncio.timeout(10):
            while len(self.events) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.events[count - 1]


async def collect(client: Client, found: list[Message], enough: int) -> None:
    async with asyncio.timeout(20):
        async for message in client.messages():
            found.append(message)
            if len({one.payload for one in found}) >= enough:
                return


async def read_to_the_end(client: Client) -> list[bytes]:
    """Return all messages until the client ends; raise the error that ended it."""
    found: list[bytes] = []
    async with asyncio.timeout(10):
        async for message in client.messages():
            found.append(message.payload)
    return found


async def test_broken_connection_is_reestablished_and_the_session_resumed(
    server: Server, proxy: Proxy, version: int, connect: Connect
) -> None:
    count = Reconnects()
    client = await connect(
        proxy,
        version=version,
        client_id="one",
        clean_start=False,
        session_expiry=100,
        on_connect=count,
    )
    await client.subscribe("t", qos=1)
    proxy.disconnect()
    publisher = await connect(server, version=version)
    await publisher.publish("t", b"while away", qos=1)
    assert (await count.reach(2)).session_present
    found: list[Message] = []
    await collect(client, found, 1)
    assert found[0].payload == b"while away"
    assert isinstance(client.last_loss, ConnectionLost)


async def test_lost_session_is_resubscribed(
    server: Server, proxy: Proxy, version: int, connect: Connect
) -> None:
    count = Reconnects()
    client = await connect(proxy, version=version, on_connect=count)
    await client.subscribe(["t", "u"], qos=1)
    proxy.disconnect()
    assert not (await count.reach(2)).session_present
    await client.publish("t", b"again", qos=1)
    found: list[Message] = []
    await collect(client, found, 1)
    assert found[0].payload == b"again"


@pytest.mark.parametrize("session_kept", [True, False], ids=["session-kept", "session-lost"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_no_publish_is_lost_however_often_the_connection_breaks(
    server: Server, proxy: Proxy, version: int, qos: int, session_kept: bool, connect: Connect
) -> None:
    count = Reconnects()
    watcher = await connect(server, version=version, max_buffered=10_000)
    await watcher.subscribe("t", qos=2)
    options = {"clean_start": not session_kept, "session_expiry": 100 if session_kept else 0}
    publisher = await connect(
        proxy, version=version, client_id="publisher", on_connect=count, **options
    )
    confirms = []
    for round_ in range(5):
        confirms += [
            publisher.publish_nowait("t", b"%d-%d" % (round_, nth), qos=qos) for nth in range(100)
        ]
        async with asyncio.timeout(10):
            await confirms[-50]
        proxy.disconnect()
        await count.reach(round_ + 2)
    async with asyncio.timeout(20):
        await publisher.drain()
    assert all(confirm.done and confirm.error is None for confirm in confirms)
    found: list[Message] = []
    await collect(watcher, found, 500)
    if qos == 2 and session_kept:
        assert len(found) == 500  # exactly once


@pytest.mark.parametrize("qos", [1, 2])
async def test_no_message_is_missed_however_often_the_connection_breaks(
    server: Server, proxy: Proxy, version: int, qos: int, connect: Connect
) -> None:
    count = Reconnects()
    options = {"clean_start": False, "session_expiry": 100, "max_buffered": 50}
    reader = await connect(proxy, version=version, client_id="reader", on_connect=count, **options)
    await reader.subscribe("t", qos=qos)
    publisher = await connect(server, version=version)
    found: list[Message] = []
    for round_ in range(5):
        for nth in range(100):
            publisher.publish_nowait("t", b"%d" % (round_ * 100 + nth), qos=qos)
        await publisher.drain()
        await collect(reader, found, round_ * 100 + 30)
        proxy.disconnect()  # noticed when the full buffer is read from again
    await collect(reader, found, 500)
    assert len(count.events) > 2
    assert all(event.session_present for event in count.events[1:])
    if qos == 2:
        assert [int(message.payload) for message in found] == list(range(500))


async def test_publish_waits_for_the_reconnect(
    server: Server, proxy: Proxy, version: int, connect: Connect
) -> None:
    lost = asyncio.Event()
    client = await connect(proxy, version=version, on_disconnect=lambda _: lost.set())
    proxy.refusing = True
    proxy.disconnect()
    async with asyncio.timeout(10):
        await lost.wait()
    waiting = [asyncio.create_task(client.publish("t", b"", qos=qos)) for qos in (0, 1, 2)]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    waiting[1].cancel()
    proxy.refusing = False
    async with asyncio.timeout(10):
        await asyncio.gather(waiting[0], waiting[2])
        await client.wait_connected()
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]


async def test_without_reconnect_a_broken_connection_ends_the_client(
    server: Server, proxy: Proxy, connect: Connect
) -> None:
    client = await connect(proxy, reconnect=False)
    proxy.disconnect()
    with pytest.raises(ConnectionLost):
        await read_to_the_end(client)
    with pytest.raises(ConnectionLost):
        await client.publish("t", b"", qos=1)


async def test_messages_received_before_the_end_are_handed_out_first(
    server: Server, proxy: Proxy, connect: Connect
) -> None:
    client = await connect(proxy, reconnect=False)
    await client.subscribe("t")
    await client.publish("t", b"last words")
    await client.publish("fence", b"", qos=1)
    proxy.disconnect()
    found: list[Message] = []
    await collect(client, found, 1)
    assert found[0].payload == b"last words"
    with pytest.raises(ConnectionLost):
        await read_to_the_end(client)


async def test_half_open_connection_is_detected_by_keep_alive(
    server: Server, proxy: Proxy, connect: Connect
) -> None:
    count = Reconnects()
    losses: list[Exception] = []

    def release(loss: Exception) -> None:
        losses.append(loss)
        proxy.holding = False

    await connect(proxy, keep_alive=1, connect_timeout=0.2, on_connect=count, on_disconnect=release)
    proxy.holding = True
    await count.reach(2)
    assert "silent for 1.5 seconds" in str(losses[0])


async def test_idle_client_sends_pings() -> None:
    pinged = asyncio.Event()

    async def script(connection: ServerConnection) -> None:
        await connection.accept_connect(properties=make_properties(server_keep_alive=1))
        while isinstance(await connection.receive(), Pingreq):
            await connection.send(Pingresp())
            pinged.set()

    async with (
        ScriptedServer(script) as server,
        Client(server.host, server.port, keep_alive=0) as client,
    ):
        async with asyncio.timeout(5):
            await pinged.wait()
        assert client.is_connected
        assert server.connections == 1


async def test_reconnect_delay_grows_with_each_failure_and_is_jittered() -> None:
    draws: list[float] = []

    def draw() -> float:
        draws.append(0.5)
        return 0.5

    async def accept(connection: ServerConnection) -> None:
        await connection.accept_connect()

    async def refuse(connection: ServerConnection) -> None:
        await connection.receive()
        await connection.send(Connack(False, 0x89, make_properties()))

    async def stay(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.wait_closed()

    losses: list[Exception] = []
    count = Reconnects()
    async with ScriptedServer(accept, refuse, refuse, stay) as server:
        client = Client(
            server.host,
            server.port,
            backoff=QUICK,
            draw=draw,
            on_connect=count,
            on_disconnect=losses.append,
        )
        async with client:
            await count.reach(2)
    assert len(draws) == 3
    assert [type(loss) for loss in losses] == [ConnectionLost, ConnectRefused, ConnectRefused]


@pytest.mark.parametrize("reason", [0x87, 0x86, 0x9D])
async def test_permanent_refusal_ends_the_client(reason: int) -> None:
    async def accept(connection: ServerConnection) -> None:
        await connection.accept_connect()

    async def refuse(connection: ServerConnection) -> None:
        await connection.receive()
        await connection.send(Connack(False, reason, make_properties()))

    async with ScriptedServer(accept, refuse) as server:
        async with Client(server.host, server.port, backoff=QUICK) as client:
            with pytest.raises(ConnectRefused) as caught:
                await read_to_the_end(client)
            assert caught.value.reason == reason
        assert server.connections == 2


async def test_refused_first_connection_raises() -> None:
    async def refuse(connection: ServerConnection) -> None:
        await connection.receive()
        await connection.send(Connack(False, 0x89, make_properties(reason_string="too busy")))

    async with ScriptedServer(refuse) as server:
        with pytest.raises(ConnectRefused, match="too busy"):
            await Client(server.host, server.port).connect()


async def test_connect_to_a_silent_server_times_out() -> None:
    async with ScriptedServer(ServerConnection.wait_closed) as server:
        client = Client(server.host, server.port, connect_timeout=0.1)
        with pytest.raises(ConnectFailed, match=r"did not answer within 0\.1 s\b"):
            await client.connect()
        await client.close()


async def test_non_mqtt_server_is_reported() -> None:
    async def greet(connection: ServerConnection) -> None:
        connection._writer.write(b"220 mail.example.test ESMTP\r\n")
        await connection.wait_closed()

    async with ScriptedServer(greet) as server:
        with pytest.raises(ConnectFailed, match="Check that an MQTT server listens"):
            await Client(server.host, server.port).connect()


async def test_refused_publish_raises_and_the_connection_continues() -> None:
    async def script(connection: ServerConnection) -> None:
        await connection.accept_connect()
        while True:
            packet = await connection.receive()
            if isinstance(packet, Publish):
                refused = packet.topic == b"full"
                properties = make_properties(reason_string="add consumers") if refused else None
                await connection.send(
                    Ack(PUBACK, packet.packet_id, 0x97 if refused else 0, properties)
                )

    async with ScriptedServer(script) as server, Client(server.host, server.port) as client:
        with pytest.raises(PublishRefused, match="add consumers") as caught:
            await client.publish("full", b"", qos=1)
        assert caught.value.reason == 0x97
        assert (await client.publish("free", b"", qos=1)).reason == 0
        confirm = client.publish_nowait("full", b"", qos=1)
        for _ in range(2):  # a confirm can be awaited again
            with pytest.raises(PublishRefused):
                await confirm


async def test_refused_subscribe_raises_unless_disabled() -> None:
    async def script(connection: ServerConnection) -> None:
        await connection.accept_connect()
        while True:
            packet = await connection.receive()
            if isinstance(packet, Subscribe):
                await connection.send(Suback(packet.packet_id, [0x87] * len(packet.requests)))

    async with ScriptedServer(script) as server, Client(server.host, server.port) as client:
        with pytest.raises(SubscribeRefused, match="not authorized"):
            await client.subscribe("secret")
        assert await client.subscribe(["a", "b"], check=False) == [0x87, 0x87]


async def test_refused_resubscription_ends_the_client() -> None:
    async def grant(connection: ServerConnection) -> None:
        await connection.accept_connect()
        packet = await connection.receive()
        assert isinstance(packet, Subscribe)
        await connection.send(Suback(packet.packet_id, [1]))

    async def deny(connection: ServerConnection) -> None:
        await connection.accept_connect()
        packet = await connection.receive()
        assert isinstance(packet, Subscribe)
        await connection.send(Suback(packet.packet_id, [0x87]))
        await connection.wait_closed()

    async with (
        ScriptedServer(grant, deny) as server,
        Client(server.host, server.port, backoff=QUICK) as client,
    ):
        await client.subscribe("t", qos=1)
        with pytest.raises(SubscribeRefused):
            await read_to_the_end(client)


async def test_disconnect_of_the_server_is_reported_and_followed_by_reconnect() -> None:
    async def leave(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.send(Disconnect(0x8B, make_properties(reason_string="maintenance")))
        await connection.wait_closed()

    async def stay(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.wait_closed()

    count = Reconnects()
    async with ScriptedServer(leave, stay) as server:
        client = Client(server.host, server.port, backoff=QUICK, on_connect=count)
        await client.connect()
        await count.reach(2)
        loss = client.last_loss
        await client.close()
    assert isinstance(loss, ServerDisconnected)
    assert (loss.reason, loss.reason_string) == (0x8B, "maintenance")


async def test_client_does_not_reconnect_after_a_takeover() -> None:
    async def take_over(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.send(Disconnect(0x8E))
        await connection.wait_closed()

    losses: list[Exception] = []
    async with ScriptedServer(take_over) as server:
        async with Client(
            server.host, server.port, backoff=QUICK, on_disconnect=losses.append
        ) as client:
            with pytest.raises(ServerDisconnected, match="give each client its own") as caught:
                await read_to_the_end(client)
            with pytest.raises(ServerDisconnected):
                await client.publish("t")
        assert server.connections == 1
    assert losses == [caught.value]


async def test_close_while_reconnecting_ends_at_once_and_fails_waiters() -> None:
    async def leave(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.receive()

    before = asyncio.all_tasks()
    lost = asyncio.Event()
    async with ScriptedServer(leave) as server:
        client = Client(
            server.host,
            server.port,
            backoff=Backoff(initial_seconds=100, max_seconds=100),
            on_disconnect=lambda _: lost.set(),
        )
        await client.connect()
        confirm = client.publish_nowait("t", b"", qos=1)
        async with asyncio.timeout(5):
            await lost.wait()
            subscribing = asyncio.create_task(client.subscribe("t"))
            await asyncio.sleep(0)
            await client.close(drain_seconds=0)
            with pytest.raises(ClientClosed):
                await confirm
            with pytest.raises(ClientClosed):
                await subscribing
    assert asyncio.all_tasks() == before


async def test_cancelled_close_still_ends_every_task() -> None:
    async def never_answer(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.wait_closed()

    before = asyncio.all_tasks()
    async with ScriptedServer(never_answer) as server:
        client = Client(server.host, server.port)
        await client.connect()
        client.publish_nowait("t", b"", qos=1)
        closing = asyncio.create_task(client.close(drain_seconds=60))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await closing
        assert not client.is_connected
    assert asyncio.all_tasks() == before


async def test_cancelled_connect_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    arrived = asyncio.Event()

    async def receive_connect(connection: ServerConnection) -> None:
        await connection.receive()
        arrived.set()
        await connection.wait_closed()

    async with ScriptedServer(receive_connect) as server:
        connecting = asyncio.create_task(Client(server.host, server.port).connect())
        await arrived.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    assert asyncio.all_tasks() == before


async def test_one_read_of_many_packets_makes_no_task_and_one_write() -> None:
    answers = asyncio.Event()
    received: list[bytes] = []

    async def script(connection: ServerConnection) -> None:
        await connection.accept_connect()
        await connection.send(
            *(Publish(b"t", b"%d" % nth, 1, packet_id=nth) for nth in range(1, 65))
        )
        received.append(await connection._reader.read(65_536))
        answers.set()
        await connection.wait_closed()

    async with ScriptedServer(script) as server, Client(server.host, server.port) as client:
        tasks = len(asyncio.all_tasks())
        found = 0
        async for _ in client.messages():
            assert len(asyncio.all_tasks()) <= tasks
            found += 1
            if found == 64:
                break
        async with asyncio.timeout(5):
            await answers.wait()
    assert len(received[0]) == 64 * 4

"""A running `sluice serve` under hostile conditions: signals, many clients, garbage, silence."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import signal
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from websockets.asyncio.client import connect as connect_websocket
from websockets.typing import Subprotocol

from sluice.units import Address
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    SubscriptionRequest,
)
from sluice.wire.properties import PUBACK
from tests.conformance.conftest import Certificates, tls_config
from tests.conformance.raw_connection import SECONDS, RawConnection, connect_raw
from tests.support.broker_process import Broker, StartBroker

MEGABYTE = 1024 * 1024


def resident_bytes(broker: Broker) -> int:
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match
    return int(match[1]) * 1024


async def until_exit(broker: Broker) -> int:
    return await asyncio.wait_for(asyncio.to_thread(broker.process.wait), SECONDS)


# ---- shutdown


async def test_sigterm_disconnects_every_client_and_exits_cleanly(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = start_broker(tls_config(certificates))
    context = certificates.client_context()
    async with AsyncExitStack() as stack:
        connections: list[RawConnection] = []
        for nth in range(20):
            connection = await stack.enter_async_context(connect_raw(broker.mqtt))
            await connection.connect(f"c{nth}")
            connections.append(connection)
        secure = await stack.enter_async_context(connect_raw(broker.mqtts, context))
        await secure.connect("secure")
        connections.append(secure)
        silent = await stack.enter_async_context(connect_raw(broker.mqtt))
        web = await stack.enter_async_context(
            connect_websocket(
                f"wss://{broker.wss}/mqtt",
                subprotocols=[Subprotocol("mqtt")],
                ssl=context,
                proxy=None,
            )
        )
        await web.send(encode(Connect("web", V5, True, 0), V5))
        assert await asyncio.wait_for(web.recv(), SECONDS)
        broker.process.send_signal(signal.SIGTERM)
        for connection in connections:
            assert (await connection.expect(Disconnect)).reason == 0x8B
            connection.writer.close()
        last = await asyncio.wait_for(web.recv(), SECONDS)
        assert isinstance(last, bytes) and last[0] == 0xE0 and last[2] == 0x8B
        await web.close()
        assert await silent.next() is None
        assert await until_exit(broker) == 0
    assert "Traceback" not in broker.log_text()


async def test_clients_that_do_not_leave_cannot_delay_the_exit(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with connect_raw(broker.mqtt) as slow_reader, connect_raw(broker.mqtt) as flooder:
        await slow_reader.connect("slow_reader")
        await slow_reader.subscribe("t")
        await flooder.connect("flooder")
        for _ in range(100):
            await flooder.publish("t", b"x" * MEGABYTE)
        broker.process.send_signal(signal.SIGTERM)
        assert await until_exit(broker) == 0


# ---- many connections


async def test_two_thousand_idle_connections_are_held(start_broker: StartBroker) -> None:
    broker = start_broker()
    count = 2000
    async with AsyncExitStack() as stack:
        before = resident_bytes(broker)
        connections: list[RawConnection] = []
        for first in range(0, count, 200):
            batch = [await stack.enter_async_context(connect_raw(broker.mqtt)) for _ in range(200)]
            await asyncio.gather(
                *(connection.connect(f"c{first + nth}") for nth, connection in enumerate(batch))
            )
            connections += batch
        assert (resident_bytes(broker) - before) / count < 16_384
        for connection in connections:
            await connection.send(Pingreq())
        for connection in connections:
            await connection.expect(Pingresp)


# ---- silence


async def test_half_open_connections_are_closed_in_time_on_every_listener(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = start_broker("[mqtt]\nconnect_timeout = '300ms'\n" + tls_config(certificates))
    context = certificates.client_context()
    upgrade = (
        b"GET /mqtt HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n" % base64.b64encode(b"k" * 16)
    )
    kinds: list[tuple[str, ssl.SSLContext | None, bytes]] = [
        ("mqtt", None, b""),
        ("mqtt", None, b"\x10\x0e\x00\x04MQ"),  # half a CONNECT
        ("mqtts", None, b""),  # no TLS handshake
        ("mqtts", context, b""),
        ("ws", None, b""),
        ("ws", None, b"GET /mqtt HTTP/1.1\r\n"),
        ("ws", None, upgrade),
        ("wss", None, b""),
        ("wss", context, b""),
        ("wss", context, upgrade),
    ]

    async def wait_for_the_end(listener: str, tls: ssl.SSLContext | None, data: bytes) -> str:
        async with connect_raw(broker.address(listener), tls) as connection:
            await connection.send(data)
            try:
                await asyncio.wait_for(connection.reader.read(), 5.0)
            except ConnectionError:
                pass
            return ""

    await asyncio.gather(*(wait_for_the_end(*kind) for kind in kinds))
    async with connect_raw(broker.mqtt) as connection:
        assert (await connection.connect("in time")).reason == 0


async def test_silent_client_gets_a_disconnect_and_is_dropped(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with connect_raw(broker.mqtt) as connection:
        await connection.connect("silent", keep_alive=1)
        assert (await connection.expect(Disconnect)).reason == 0x8D


# ---- garbage


def garbage(chance: random.Random) -> bytes:
    """Return a stream with an error in it, or only noise."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(1, 500))
    talk = (
        bytearray(encode(Connect(f"g{chance.random()}", V5, True, 10), V5))
        if chance.random() < 0.8
        else bytearray()
    )
    start = len(talk) if chance.random() < 0.7 else 0
    for _ in range(chance.randrange(1, 10)):
        packet = chance.choice(
            [
                Publish(b"storm/t", chance.randbytes(20), 1, packet_id=7),
                Publish(b"storm/t", chance.randbytes(20), 2, packet_id=8),
                Subscribe(9, [SubscriptionRequest(b"storm/#", 2)]),
                Pingreq(),
                Ack(PUBACK, 3),
                Disconnect(),
            ]
        )
        talk += encode(packet, V5)
    for _ in range(chance.randrange(1, 6)):
        talk[chance.randrange(start, len(talk)) if start < len(talk) else -1] = chance.randrange(
            256
        )
    return bytes(talk)


async def test_flood_of_garbage_does_not_affect_a_good_client(start_broker: StartBroker) -> None:
    broker = start_broker()
    chance = random.Random(1883)
    storm_over = asyncio.Event()

    async def bad_peer(address_of: str, data: bytes) -> None:
        try:
            async with connect_raw(broker.address(address_of)) as connection:
                connection.writer.write(data)
                try:
                    async with asyncio.timeout(0.5):
                        await connection.reader.read()
                except TimeoutError:
                    pass
        except ConnectionError:
            pass

    async def storm() -> None:
        for _ in range(6):
            peers = [
                bad_peer("ws" if nth % 10 == 0 else "mqtt", garbage(chance)) for nth in range(50)
            ]
            await asyncio.gather(*peers)
        storm_over.set()

    async with connect_raw(broker.mqtt) as good:
        await good.connect("good")
        await good.subscribe("good", 1)
        task = asyncio.create_task(storm())
        rounds = 0
        while not storm_over.is_set():
            packet = Publish(b"good", b"%d" % rounds, 1, packet_id=rounds % 65_535 + 1)
            await good.send(packet)
            answers = [await good.next(), await good.next()]
            [message] = [one for one in answers if isinstance(one, Publish)]
            assert message.payload == b"%d" % rounds
            assert len([one for one in answers if isinstance(one, Ack)]) == 1
            await good.send(Ack(PUBACK, message.packet_id))
            rounds += 1
        await task
        assert rounds > 100
    assert "Traceback" not in broker.log_text()


async def test_oversized_packet_is_refused_on_its_header(listening_broker: Broker) -> None:
    async with connect_raw(listening_broker.mqtt) as connection:
        await connection.connect("large")
        await connection.send(b"\x30\xff\xff\xff\x7f")
        assert (await connection.expect(Disconnect)).reason == 0x95


async def test_last_packets_reach_a_peer_that_keeps_sending(listening_broker: Broker) -> None:
    for _ in range(20):
        async with connect_raw(listening_broker.mqtt) as connection:
            await connection.connect("talker")
            connection.writer.write(b"\x00\x00" + b"x" * 8 * MEGABYTE)
            assert (await connection.expect(Disconnect)).reason == 0x81


async def test_refusal_reaches_a_peer_that_keeps_sending(listening_broker: Broker) -> None:
    for _ in range(20):
        async with connect_raw(listening_broker.mqtt) as connection:
            bad = b"\x10\x0e\x00\x04MQTT\x05\x03\x00\x00\x00\x00\x01a"
            connection.writer.write(bad + b"x" * 8 * MEGABYTE)
            assert (await connection.expect(Connack)).reason == 0x81


async def test_small_packets_may_share_a_large_websocket_frame(start_broker: StartBroker) -> None:
    broker = start_broker("[mqtt]\nmax_packet_size = 100\n")
    async with connect_websocket(
        f"ws://{broker.ws}/mqtt", subprotocols=[Subprotocol("mqtt")], proxy=None
    ) as web:
        await web.send(encode(Connect("web", V5, True, 0), V5) + b"\xc0\x00" * 200)
        got = b""
        async with asyncio.timeout(SECONDS):
            while len(got) < 400:
                data = await web.recv()
                assert isinstance(data, bytes)
                got += data
        assert got.endswith(b"\xd0\x00" * 200)


# ---- peers that do not read


@pytest.mark.parametrize("qos", [0, 1])
async def test_subscriber_that_does_not_read_costs_bounded_memory(
    start_broker: StartBroker, qos: int
) -> None:
    broker = start_broker("[mqtt]\nmax_queued_bytes = 16000000\n")
    async with (
        connect_raw(broker.mqtt) as slow_reader,
        connect_raw(broker.mqtt) as reader,
        connect_raw(broker.mqtt) as writer,
    ):
        for connection, name in (
            (slow_reader, "slow_reader"),
            (reader, "reader"),
            (writer, "writer"),
        ):
            await connection.connect(name)
        await slow_reader.subscribe("flood", qos)
        await reader.subscribe("flood/end")
        before = resident_bytes(broker)
        worst = 0
        for nth in range(200):
            if qos == 0:
                await writer.publish("flood", b"x" * MEGABYTE)
            else:
                await writer.send(Publish(b"flood", b"x" * MEGABYTE, 1, packet_id=nth + 1))
                await writer.expect(Ack)
            worst = max(worst, resident_bytes(broker))
        await writer.publish("flood/end", b"end")
        assert (await reader.expect(Publish)).payload == b"end"
        assert worst - before < 64 * MEGABYTE
        # A client that begins to read is served again.
        await writer.publish("flood", b"after")


async def test_client_that_sends_requests_and_does_not_read_costs_bounded_memory(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    async with connect_raw(broker.mqtt) as flooder:
        await flooder.connect("flooder")
        before = resident_bytes(broker)
        pings = b"\xc0\x00" * 500_000
        sent = 0
        try:
            async with asyncio.timeout(3):
                while sent < 60:
                    flooder.writer.write(pings)
                    await flooder.writer.drain()
                    sent += 1
        except TimeoutError:
            pass  # the broker no longer reads it, as intended
        assert resident_bytes(broker) - before < 24 * MEGABYTE
        async with connect_raw(broker.mqtt) as other:
            assert (await other.connect("other")).reason == 0


# ---- client certificates


async def test_client_without_certificate_is_refused_where_one_is_required(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = start_broker(tls_config(certificates, client_ca=True))
    for listener in (broker.mqtts, broker.wss):
        await see_refusal(listener, certificates.client_context())
    context = certificates.client_context()
    context.load_cert_chain(certificates.client_cert, certificates.client_key)
    async with connect_raw(broker.mqtts, context) as connection:
        assert (await connection.connect("device")).reason == 0


async def see_refusal(listener: Address, context: ssl.SSLContext) -> None:
    """Check that the server refuses; in TLS 1.3 a client is notified only on its first read."""
    try:
        async with connect_raw(listener, context) as connection:
            await connection.send(Connect("unknown", V5, True, 0))
            assert await asyncio.wait_for(connection.reader.read(1), SECONDS) == b""
    except (ssl.SSLError, ConnectionError):
        pass

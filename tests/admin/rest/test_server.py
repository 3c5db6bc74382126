"""The life of the admin thread: opening, refusing, stopping."""

from __future__ import annotations

import asyncio
import socket
import threading

import grpc
import httpx
import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.server import AdminDoors, AdminThread
from sluice.broker.net.listener import ListenerError
from sluice.units import Address, parse_address
from tests.admin.live_broker import living, publish
from tests.admin.rest.conftest import ANY_PORT, Door, OpenDoor, until
from tests.support.broker_process import StartBroker


def admin_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "sluice-admin"]


async def test_both_doors_open_on_free_ports_and_close(door: Door) -> None:
    thread = AdminThread(door.house.desk, door.house.keyring, AdminDoors(ANY_PORT, ANY_PORT))
    opened = {one.name: parse_address(one.address) for one in await thread.start()}
    assert list(opened) == ["http", "grpc"]
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.get(f"http://{opened['http']}/healthz")).status_code == 200
    await thread.stop()
    for address in opened.values():
        assert not is_open(address)
    assert len(admin_threads()) == 1  # that of the fixture


@pytest.mark.parametrize("name", ["http", "grpc"])
async def test_a_port_that_is_taken_is_refused_and_nothing_stays_open(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = Address("127.0.0.1", taken.getsockname()[1])
        doors = AdminDoors(busy, None) if name == "http" else AdminDoors(ANY_PORT, busy)
        async with living() as house:
            thread = AdminThread(house.desk, house.keyring, doors)
            with pytest.raises(Exception, match=f"the {name} listener cannot use {busy}") as refusal:
                await thread.start()
            assert f"--{name}" in str(refusal.value)
            if name == "http":
                assert isinstance(refusal.value, ListenerError)
            await thread.stop()
    await until(lambda: not admin_threads())


async def test_stop_waits_for_a_thread_whose_loop_closes_on_its_own(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    running, thread = door.thread._loop, door.thread
    assert running is not None
    monkeypatch.setattr(thread, "_loop", closed)
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    assert thread._told is not None
    running.call_soon_threadsafe(thread._told.set)
    await stopping


async def test_an_answer_under_way_is_given_before_the_door_closes(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held = asyncio.Event(), asyncio.Event()

    async def slow() -> list[str]:
        begun.set()
        await held.wait()
        return ["late"]

    monkeypatch.setattr(door.house.service, "verify", slow)
    asking = asyncio.create_task(door.api.get("/verify"))
    await begun.wait()
    stopping = asyncio.create_task(door.thread.stop())
    await until(lambda: not is_open(door.address))
    assert not stopping.done()
    held.set()
    assert (await asking).json() == ["late"]
    await stopping


def is_open(address: Address) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0


async def test_a_stop_does_not_wait_for_ever(open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.server.GRACE_SECONDS", 1)
    door = await open_door()
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    monkeypatch.setattr(door.house.service, "verify", stuck)
    asking = asyncio.create_task(door.api.get("/verify"))
    await begun.wait()
    async with asyncio.timeout(30):
        await door.thread.stop()
        await cancelled.wait()  # the question is taken back as well
    asking.cancel()


async def test_stopping_twice_or_never_started_is_no_fault(door: Door) -> None:
    await AdminThread(door.house.desk, door.house.keyring, AdminDoors(None, None)).stop()
    await door.thread.stop()
    await door.thread.stop()


async def test_a_question_is_taken_back_when_its_asker_has_gone(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    monkeypatch.setattr(door.house.service, "verify", stuck)
    monkeypatch.setattr("sluice.admin.rest.routes.node_routes.VERIFY_SECONDS", 0.5)
    told = await door.no(503, "GET", "/verify")
    assert told["error"] == "busy"
    async with asyncio.timeout(30):
        await cancelled.wait()


async def test_a_door_that_fails_is_seen_and_the_broker_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with living() as house:
        thread = AdminThread(house.desk, house.keyring, AdminDoors(ANY_PORT, None))
        await thread.start()

        async def fail(server: object, counter: int) -> bool:
            raise OSError("the roof has come down")

        monkeypatch.setattr("uvicorn.Server.on_tick", fail)
        await until(lambda: thread.failure is not None)
        assert "the roof has come down" in str(thread.failure)
        assert "the http door has failed" in caplog.text
        async with house.client("c-1") as client:
            await publish(client, "tasks")
        await thread.stop()


def test_the_ready_line_names_the_doors_and_they_answer(start_broker: StartBroker) -> None:
    broker = start_broker()
    answer = httpx.get(f"http://{broker.address('http')}/api/v1/node", timeout=30)
    assert answer.json()["store"] == "embedded"
    assert broker.address("grpc").port > 0
    broker.stop()
    assert "Traceback" not in broker.log_text()


def test_doors_that_are_off_are_not_there(start_broker: StartBroker) -> None:
    broker = start_broker(flags=["--http", "off", "--grpc", "off"])
    assert "http" not in broker.facts
    assert "grpc" not in broker.facts


def test_the_server_does_without_queues(start_broker: StartBroker) -> None:
    broker = start_broker("[queues]\nenabled = false")
    root = f"http://{broker.address('http')}"
    assert httpx.get(f"{root}/readyz", timeout=30).status_code == 200
    assert httpx.get(f"{root}/api/v1/queues", timeout=30).json()["error"] == "queues_disabled"
    with grpc.insecure_channel(str(broker.address("grpc"))) as channel:
        admin = QueueAdminStub(channel)
        with pytest.raises(grpc.RpcError, match="queues are switched off"):
            admin.CreateQueue(pb.CreateQueueRequest(config_json='{"name": "tasks"}'), timeout=30)
        assert admin.GetNode(pb.GetNodeRequest(), timeout=30).queues == 0


# ---- those who take their time


async def told(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
async def test_who_does_not_come_to_the_end_of_a_request_is_not_waited_for(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("sluice.admin.rest.http_protocol.HEAD_SECONDS", 0.5)
    door = await open_door()
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(sent)
    assert await told(reader) == b""
    writer.close()
    async with door.api.stream("GET", "/live") as answer:  # an answer under way has all the time it needs
        lines = answer.aiter_lines()
        for _ in range(8):
            await anext(lines)


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(("behind", "at_once"), [(b"GET /", True), (b"GET /", False), (b"\r\n", False)])
async def test_bytes_behind_an_answer_do_not_keep_a_connection(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, behind: bytes, at_once: bool
) -> None:
    door = await open_door()
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(HEALTH)
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    monkeypatch.setattr(
        "sluice.admin.rest.http_protocol.HEAD_SECONDS", 0.1
    )  # the first head may take its time to come
    writer.write(HEALTH + behind if at_once else behind)
    answers = await told(reader)  # up to the end of the connection
    assert answers.count(b"HTTP/1.1 200 ") == int(at_once)
    writer.close()


async def test_a_connection_may_rest_between_two_requests(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await open_door()
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    for _ in range(3):
        writer.write(HEALTH)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr("sluice.admin.rest.http_protocol.HEAD_SECONDS", 0.1)
        await asyncio.sleep(0.3)  # longer than a head may take
    assert not reader.at_eof()
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /api/v1/queues HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
    ids=["head", "trailers"],
)
@pytest.mark.parametrize("line", [b"X-More: and more\r\n", b"x"], ids=["lines", "one line"])
async def test_a_request_whose_head_never_ends_costs_no_memory(door: Door, head: bytes, line: bytes) -> None:
    _, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(head + (b"X-Long: " if line == b"x" else b""))
    sent = 0
    try:
        while sent < 64 << 20:
            writer.write(line * (16_384 // len(line)))
            sent += 16_384
            await writer.drain()
    except ConnectionError:
        pass
    assert sent < 32 << 20
    writer.close()
    await door.ok("GET", "/whoami")


async def test_a_large_body_is_no_large_head(door: Door) -> None:
    published = await door.ok("POST", "/queues/tasks/messages", {"payload": "x" * 500_000})
    assert published["queue"] == "tasks"


def test_a_broker_whose_http_port_is_taken_says_so_and_does_not_start(start_broker: StartBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"the http listener cannot use 127.0.0.1:{port}") as refusal:
            start_broker(flags=["--http", f"127.0.0.1:{port}"])
    assert "choose another one with --http HOST:PORT" in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


def test_a_broker_stops_in_time_with_streams_and_requests_open(start_broker: StartBroker) -> None:
    broker = start_broker()
    with httpx.stream("GET", f"http://{broker.address('http')}/api/v1/live", timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        broker.stop()
        for _ in lines:
            pass
    assert "Traceback" not in broker.log_text()
    assert " error " not in broker.log_text()

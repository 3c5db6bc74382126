"""The admin thread: start, failed start, stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import grpc
import httpx
import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.server import AdminServer, AdminServerConfig
from sluice.broker.net.listener import ListenerError
from sluice.units import Address, parse_address
from tests.admin.live_broker import live_broker, publish
from tests.admin.rest.conftest import ANY_PORT, OpenRestApi, RestApi, until
from tests.support.broker_process import StartBroker


def admin_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "sluice-admin"]


async def test_both_servers_open_on_free_ports_and_close(rest_api: RestApi) -> None:
    thread = AdminServer(
        rest_api.harness.loop_bridge,
        rest_api.harness.keyring,
        AdminServerConfig(ANY_PORT, ANY_PORT),
    )
    opened = {one.name: parse_address(one.address) for one in await thread.start()}
    assert list(opened) == ["http", "grpc"]
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.get(f"http://{opened['http']}/healthz")).status_code == 200
    await thread.stop()
    for address in opened.values():
        assert not is_open(address)
    assert len(admin_threads()) == 1  # the fixture's


@pytest.mark.parametrize("name", ["http", "grpc"])
async def test_occupied_port_is_refused_and_nothing_stays_open(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = Address("127.0.0.1", taken.getsockname()[1])
        config = (
            AdminServerConfig(busy, None) if name == "http" else AdminServerConfig(ANY_PORT, busy)
        )
        async with live_broker() as harness:
            thread = AdminServer(harness.loop_bridge, harness.keyring, config)
            with pytest.raises(
                Exception, match=f"the {name} listener cannot use {busy}"
            ) as refusal:
                await thread.start()
            assert f"--{name}" in str(refusal.value)
            if name == "http":
                assert isinstance(refusal.value, ListenerError)
            await thread.stop()
    await until(lambda: not admin_threads())


async def test_stop_waits_for_a_thread_whose_loop_closes_by_itself(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    running, thread = rest_api.thread._loop, rest_api.thread
    assert running is not None
    monkeypatch.setattr(thread, "_loop", closed)
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    assert thread._stop_requested is not None
    running.call_soon_threadsafe(thread._stop_requested.set)
    await stopping


async def test_running_request_is_answered_before_the_server_closes(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held = asyncio.Event(), asyncio.Event()

    async def slow() -> list[str]:
        begun.set()
        await held.wait()
        return ["late"]

    monkeypatch.setattr(rest_api.harness.service, "verify", slow)
    asking = asyncio.create_task(rest_api.api.get("/verify"))
    await begun.wait()
    stopping = asyncio.create_task(rest_api.thread.stop())
    await until(lambda: not is_open(rest_api.address))
    assert not stopping.done()
    held.set()
    assert (await asking).json() == ["late"]
    await stopping


def is_open(address: Address) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0


async def test_stop_has_a_timeout(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.server.GRACE_SECONDS", 1)
    rest_api = await open_rest_api()
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    monkeypatch.setattr(rest_api.harness.service, "verify", stuck)
    asking = asyncio.create_task(rest_api.api.get("/verify"))
    await begun.wait()
    async with asyncio.timeout(30):
        await rest_api.thread.stop()
        await cancelled.wait()  # the operation is cancelled as well
    asking.cancel()


async def test_stop_is_idempotent_and_allowed_before_start(rest_api: RestApi) -> None:
    await AdminServer(
        rest_api.harness.loop_bridge, rest_api.harness.keyring, AdminServerConfig(None, None)
    ).stop()
    await rest_api.thread.stop()
    await rest_api.thread.stop()


async def test_request_is_cancelled_when_its_caller_disconnects(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    monkeypatch.setattr(rest_api.harness.service, "verify", stuck)
    monkeypatch.setattr("sluice.admin.rest.routes.node_routes.VERIFY_TIMEOUT_SECONDS", 0.5)
    reported = await rest_api.refused(503, "GET", "/verify")
    assert reported["error"] == "busy"
    async with asyncio.timeout(30):
        await cancelled.wait()


@pytest.mark.parametrize("is_started", [True, False])
async def test_failed_server_is_reported_and_broker_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_started: bool
) -> None:
    async with live_broker() as harness:
        thread = AdminServer(
            harness.loop_bridge, harness.keyring, AdminServerConfig(ANY_PORT, None)
        )
        [listener] = await thread.start()
        if is_started:
            async with httpx.AsyncClient(timeout=30) as web:
                await web.get(f"http://{listener.address}/healthz")

        async def fail(server: object, counter: int) -> bool:
            raise OSError("the roof has come down")

        monkeypatch.setattr("uvicorn.Server.on_tick", fail)
        if not is_started:
            assert is_open(parse_address(listener.address))  # the first connection starts it
        await until(lambda: thread.failure is not None)
        assert "the roof has come down" in str(thread.failure)
        assert "http listener failed" in caplog.text
        async with harness.client("c-1") as client:
            await publish(client, "tasks")
        await thread.stop()


def test_ready_line_names_the_servers_and_they_answer(start_broker: StartBroker) -> None:
    broker = start_broker()
    answer = httpx.get(f"http://{broker.address('http')}/api/v1/node", timeout=30)
    assert answer.json()["store"] == "embedded"
    assert broker.address("grpc").port > 0
    broker.stop()
    assert "Traceback" not in broker.log_text()


def test_disabled_servers_are_not_opened(start_broker: StartBroker) -> None:
    broker = start_broker(flags=["--http", "off", "--grpc", "off"])
    assert "http" not in broker.facts
    assert "grpc" not in broker.facts


def test_server_runs_with_queues_disabled(start_broker: StartBroker) -> None:
    broker = start_broker("[queues]\nenabled = false")
    root = f"http://{broker.address('http')}"
    assert httpx.get(f"{root}/readyz", timeout=30).status_code == 200
    assert httpx.get(f"{root}/api/v1/queues", timeout=30).json()["error"] == "queues_disabled"
    with grpc.insecure_channel(str(broker.address("grpc"))) as channel:
        admin = QueueAdminStub(channel)
        with pytest.raises(grpc.RpcError, match="queues are disabled"):
            admin.CreateQueue(pb.CreateQueueRequest(config_json='{"name": "tasks"}'), timeout=30)
        assert admin.GetNode(pb.GetNodeRequest(), timeout=30).queues == 0


def test_broker_loads_the_library_of_an_api_with_its_first_connection(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()

    def loaded() -> set[str]:
        maps = Path(f"/proc/{broker.process.pid}/maps").read_text()
        return {name for name in ("cygrpc", "httptools") if name in maps}

    assert loaded() == set()
    assert httpx.get(f"http://{broker.address('http')}/readyz", timeout=30).status_code == 200
    assert loaded() == {"httptools"}
    with grpc.insecure_channel(str(broker.address("grpc"))) as channel:
        assert QueueAdminStub(channel).GetNode(pb.GetNodeRequest(), timeout=30).name
    assert loaded() == {"cygrpc", "httptools"}


# ---- slow clients


async def read_response(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
async def test_stop_does_not_wait_for_an_unfinished_request(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("sluice.admin.rest.http_protocol.HEADER_TIMEOUT_SECONDS", 0.5)
    rest_api = await open_rest_api()
    reader, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    writer.write(sent)
    assert await read_response(reader) == b""
    writer.close()
    # a response in progress has no time limit
    async with rest_api.api.stream("GET", "/live") as answer:
        lines = answer.aiter_lines()
        for _ in range(8):
            await anext(lines)


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("behind", "at_once"), [(b"GET /", True), (b"GET /", False), (b"\r\n", False)]
)
async def test_bytes_after_a_request_do_not_keep_the_connection_open(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch, behind: bytes, at_once: bool
) -> None:
    rest_api = await open_rest_api()
    reader, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    writer.write(HEALTH)
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    # the first headers may take long
    monkeypatch.setattr("sluice.admin.rest.http_protocol.HEADER_TIMEOUT_SECONDS", 0.1)
    writer.write(HEALTH + behind if at_once else behind)
    answers = await read_response(reader)  # until the end of the connection
    assert answers.count(b"HTTP/1.1 200 ") == int(at_once)
    writer.close()


async def test_connection_may_idle_between_two_requests(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest_api = await open_rest_api()
    reader, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    for _ in range(3):
        writer.write(HEALTH)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr("sluice.admin.rest.http_protocol.HEADER_TIMEOUT_SECONDS", 0.1)
        await asyncio.sleep(0.3)  # longer than the header timeout
    assert not reader.at_eof()
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /api/v1/queues HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n",
    ],
    ids=["head", "trailers"],
)
@pytest.mark.parametrize("line", [b"X-More: and more\r\n", b"x"], ids=["lines", "one line"])
async def test_endless_request_head_costs_no_memory(
    rest_api: RestApi, head: bytes, line: bytes
) -> None:
    _, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
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
    await rest_api.ok("GET", "/whoami")


async def test_large_body_is_not_taken_for_a_large_head(rest_api: RestApi) -> None:
    published = await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x" * 500_000})
    assert published["queue"] == "tasks"


def test_broker_with_occupied_http_port_says_so_and_does_not_start(
    start_broker: StartBroker,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AssertionError, match=f"the http listener cannot use 127.0.0.1:{port}"
        ) as refusal:
            start_broker(flags=["--http", f"127.0.0.1:{port}"])
    assert "choose another one with --http HOST:PORT" in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


def test_broker_stops_in_time_with_open_streams_and_requests(start_broker: StartBroker) -> None:
    broker = start_broker()
    with httpx.stream("GET", f"http://{broker.address('http')}/api/v1/live", timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        broker.stop()
        for _ in lines:
            pass
    assert "Traceback" not in broker.log_text()
    assert " error " not in broker.log_text()

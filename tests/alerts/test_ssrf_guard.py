"""Webhooks reach public addresses, and private ones only if they are allowed."""

from __future__ import annotations

import asyncio
import gzip
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trustme

from sluice.alerts import AlertSender, SsrfGuard
from sluice.backoff import Backoff
from sluice.queues.model.effects import Alert
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import put

INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255",
    "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.255", "192.0.0.192",
    "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "192.0.2.1", "203.0.113.9",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1", "2001:0:1::1",
    "64:ff9b:1::7f00:1", "::ffff:0:127.0.0.1", "fec0::1", "100::1", "3fff::1", "5f00::1", "4000::1",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_private_addresses_are_refused(address: str) -> None:
    assert "webhooks.allow" in SsrfGuard().fault_of_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert SsrfGuard().fault_of_address(address) == ""


def test_operator_can_allow_networks_addresses_and_names() -> None:
    guard = SsrfGuard(["10.0.0.0/8", "192.168.1.7", "fd00::/8", "Hooks.Example.com"])
    assert [
        guard.fault_of_address(one)
        for one in ("10.9.9.9", "192.168.1.7", "fd00::5", "::ffff:10.0.0.1")
    ] == [""] * 4
    assert guard.fault_of_address("192.168.1.8") and guard.fault_of_address("127.0.0.1")
    assert guard.fault_of_url("http://hooks.example.com./x") == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x", "http://[::1]:80/", "http://localhost/", "http://a.localhost:8080/",
        "http://2130706433/", "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:10.0.0.1]/", "http:///nothing",
        "http://xn--/", "http://example.org:99999/", "http://example.org:0/",
    ],
)  # fmt: skip
def test_queue_cannot_be_configured_with_a_forbidden_webhook_address(url: str) -> None:
    # Another spelling of an address counts as a name: it is checked by what it resolves to.
    if url == "http://2130706433/":
        assert SsrfGuard().fault_of_url(url) == "" or "webhooks.allow" in SsrfGuard().fault_of_url(
            url
        )
        return
    harness = BrokerHarness()
    harness.core.queue_handler.service._webhook_error = SsrfGuard().fault_of_url
    client = harness.connect("c")
    reason, why = put(
        client,
        "$admin/queue/create",
        f'{{"name": "a", "dlq_config": {{"alert_webhook": "{url}"}}}}'.encode(),
    )
    assert (reason, "alert_webhook" in why) == (0x99, True)
    reason, _ = put(
        client,
        "$admin/queue/create",
        b'{"name": "a", "dlq_config": {"alert_webhook": "https://example.org/"}}',
    )
    assert reason == 0


def alert(url: str) -> Alert:
    return Alert(url, "jobs", "dlq/jobs", "1-1", "worker", "max_retries", {"attempts": "3"})


class Server:
    def __init__(self) -> None:
        self.requests: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.names: list[str | None] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.put_nowait(head.decode())
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def server(context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    one = Server()
    served = await asyncio.start_server(one.talk, "127.0.0.1", 0, ssl=context)
    one.port = served.sockets[0].getsockname()[1]
    yield one
    served.close()
    await served.wait_closed()


async def refusal(sender: AlertSender, url: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.ERROR)
    sender.send(alert(url))
    await asyncio.gather(*sender._tasks)
    (record,) = [one for one in caplog.records if one.message == "alert not delivered"]
    return str(vars(record)["why"])


async def test_name_that_resolves_to_private_address_is_refused_with_a_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with server() as web:
        sender = AlertSender(retries=1, backoff=Backoff(9.0), resolve=resolve)
        why = await asyncio.wait_for(
            refusal(sender, f"http://hooks.example.com:{web.port}/x", caplog), 30
        )
        assert "webhooks.allow" in why
        assert web.requests.empty()
        await sender.close()


async def test_name_is_resolved_once_and_that_address_is_used() -> None:
    """A name server that returns another address the second time gains nothing."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.9"]

    async with server() as web:
        sender = AlertSender(retries=0, allowed=["127.0.0.1"], resolve=resolve)
        sender.send(alert(f"http://user:pass@hooks.example.com:{web.port}/x"))
        head = await asyncio.wait_for(web.requests.get(), 30)
        assert asked == ["hooks.example.com"]
        assert f"host: hooks.example.com:{web.port}" in head.lower()
        assert "authorization: Basic" in head or "Authorization: Basic" in head
        await sender.close()


async def test_redirects_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as inside, server() as web:
        target = f"http://127.0.0.1:{inside.port}/"
        web.answer = f"HTTP/1.1 307 x\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode()
        sender = AlertSender(retries=0, allowed=["127.0.0.1"])
        why = await refusal(sender, f"http://127.0.0.1:{web.port}/x", caplog)
        assert "307" in why and inside.requests.empty()
        await sender.close()


async def test_tls_verifies_the_configured_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("hooks.example.com").configure_cert(context)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with authority.cert_pem.tempfile() as trusted:
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        async with server(context) as web:
            sender = AlertSender(retries=0, allowed=["127.0.0.1"], resolve=resolve)
            sender.send(alert(f"https://hooks.example.com:{web.port}/x"))
            assert "POST /x" in await asyncio.wait_for(web.requests.get(), 30)
            await sender.close()


async def test_log_does_not_contain_webhook_secrets(caplog: pytest.LogCaptureFixture) -> None:
    sender = AlertSender(retries=0)
    await refusal(sender, "http://user:hunter2@127.0.0.1/services/T0SECRET?key=K3Y", caplog)
    assert secrets_in(caplog) == []
    await sender.close()


def secrets_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    logged = repr([(vars(one), one.getMessage()) for one in caplog.records])
    return [word for word in ("hunter2", "T0SECRET", "K3Y") if word in logged]


@pytest.mark.parametrize("status", [200, 302, 500])
async def test_libraries_do_not_log_the_webhook_address(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("httpx", "httpcore")):
            logging.getLogger(name).setLevel(logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    async with server() as web:
        web.answer = (
            f"HTTP/1.1 {status} x\r\nlocation: /T0SECRET\r\ncontent-length: 0\r\n\r\n".encode()
        )
        sender = AlertSender(retries=1, backoff=Backoff(0.001), allowed=["127.0.0.1"])
        sender.send(alert(f"http://user:hunter2@127.0.0.1:{web.port}/services/T0SECRET?key=K3Y"))
        await asyncio.gather(*sender._tasks)
        assert not web.requests.empty()
        await sender.close()
    assert "message dead-lettered" in [one.getMessage() for one in caplog.records]
    assert secrets_in(caplog) == []


class SlowServer(Server):
    """A server that sends a status and an endless body, as fast as it is read or slowly."""

    def __init__(self, head: bytes, piece: bytes, pause: float) -> None:
        super().__init__()
        self.head = head
        self.piece = piece
        self.pause = pause
        self.sent = 0
        self.is_cut = asyncio.Event()
        self.open = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.is_cut.clear()
        self.requests.put_nowait((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.head)
        with suppress(ConnectionError):
            while not (reader.at_eof() or writer.is_closing()):
                writer.write(self.piece)
                await writer.drain()
                self.sent += len(self.piece)
                await asyncio.sleep(self.pause)
        writer.close()
        self.open -= 1
        if not self.open:
            self.is_cut.set()


@asynccontextmanager
async def slow_server(head: bytes, piece: bytes, pause: float = 0.0) -> AsyncIterator[SlowServer]:
    one = SlowServer(head, piece, pause)
    served = await asyncio.start_server(one.talk, "127.0.0.1", 0)
    one.port = served.sockets[0].getsockname()[1]
    yield one
    served.close()
    await asyncio.wait_for(one.is_cut.wait(), 30)
    await served.wait_closed()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "piece", "pause"),
    [
        (OK + b"content-length: 1000000000000\r\n\r\n", bytes(65_536), 0.0),
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(65_536) + b"\r\n", 0.0),
        (
            OK + b"content-encoding: gzip\r\nconnection: close\r\n\r\n",
            gzip.compress(bytes(1 << 20)),
            0.0,
        ),
        (OK + b"content-length: 100\r\n\r\n", b"x", 0.05),
    ],
    ids=["endless", "endless chunks", "compressed", "slow"],
)
async def test_response_body_is_not_read(
    head: bytes, piece: bytes, pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    """All four are successes, by their status alone; the next alert is not delayed."""
    caplog.set_level(logging.ERROR)
    async with slow_server(head, piece, pause) as web:
        sender = AlertSender(retries=0, timeout=60, allowed=["127.0.0.1"])
        sender.send(alert(f"http://127.0.0.1:{web.port}/x"))
        sender.send(alert(f"http://127.0.0.1:{web.port}/x"))
        await asyncio.wait_for(asyncio.gather(*sender._tasks), 30)
        await asyncio.wait_for(web.is_cut.wait(), 30)
        assert web.requests.qsize() == 2
        assert "accept-encoding: identity" in web.requests.get_nowait().lower()
        assert web.sent < 16 << 20  # what fits into the buffers of two connections
        await sender.close()
    assert caplog.records == []


async def test_status_line_sent_byte_by_byte_times_out(caplog: pytest.LogCaptureFixture) -> None:
    async with slow_server(b"", b"H", 0.01) as web:
        sender = AlertSender(retries=0, timeout=0.5, allowed=["127.0.0.1"])
        why = await asyncio.wait_for(refusal(sender, f"http://127.0.0.1:{web.port}/x", caplog), 30)
        assert "did not answer within" in why
        await asyncio.wait_for(web.is_cut.wait(), 30)
        await sender.close()


async def test_endless_headers_are_aborted(caplog: pytest.LogCaptureFixture) -> None:
    async with slow_server(OK, b"x-more: y\r\n", 0.001) as web:
        sender = AlertSender(retries=0, timeout=0.5, allowed=["127.0.0.1"])
        await asyncio.wait_for(refusal(sender, f"http://127.0.0.1:{web.port}/x", caplog), 30)
        await asyncio.wait_for(web.is_cut.wait(), 30)
        await sender.close()

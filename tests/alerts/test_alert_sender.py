"""Tests of webhooks for dead letters, with a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import EntryPoint

import pytest

from sluice.alerts.alert_sender import HANDLER_GROUP, AlertSender, load_alert_handlers
from sluice.backoff import Backoff
from sluice.client import Client
from sluice.errors import ConfigError
from sluice.queues.model.effects import Alert
from tests.support.broker_process import StartBroker

ALERT_JSON = {
    "attempts": "3",
    "dead-at": "2030-01-31T12:00:00.000Z",
    "first-attempt-at": "2030-01-31T11:00:00.000Z",
    "last-attempt-at": "2030-01-31T11:59:00.000Z",
    "dead-description": "disk full",
    "original-topic": "$queue/jobs",
}


class WebhookServer:
    """A web server that records requests.

    `answers` are status codes, one for each request, the last one for all that follow; 0 sends no
    response.
    """

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers
        self.posted: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.url = ""
        self._open: set[asyncio.StreamWriter] = set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                assert head.startswith("post /hook ") and "application/json" in head
                self.posted.put_nowait(json.loads(await reader.readexactly(length)))
                status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if status:
                    writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()
        self._open.discard(writer)

    def close(self) -> None:
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def webhook_server(*answers: int) -> AsyncIterator[WebhookServer]:
    served = WebhookServer(list(answers))
    server = await asyncio.start_server(served.talk, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    try:
        yield served
    finally:
        served.close()
        server.close()
        await server.wait_closed()


@pytest.fixture
async def sender() -> AsyncIterator[AlertSender]:
    one = AlertSender(retries=2, backoff=Backoff(0.001), timeout=0.2, allowed=["127.0.0.0/8"])
    yield one
    await one.close()


def alert(url: str, name: str = "1-1") -> Alert:
    return Alert(url, "jobs", "dlq/jobs", name, "worker", "max_retries", ALERT_JSON)


@contextmanager
def logged(event: str) -> Iterator[asyncio.Event]:
    """Yield an event that is set when `event` is logged."""
    seen = asyncio.Event()

    class Watcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == event:
                seen.set()

    handler = Watcher()
    log = logging.getLogger("sluice.alerts.alert_sender")
    log.addHandler(handler)
    yield seen
    log.removeHandler(handler)


async def test_webhook_gets_the_alert_as_json(sender: AlertSender) -> None:
    async with webhook_server(200) as served:
        sender.send(alert(served.url))
        assert await served.posted.get() == {
            "queue": "$queue/jobs",
            "dead_letter_queue": "$queue/dlq/jobs",
            "message_id": "1-1",
            "group": "worker",
            "failure_reason": "max_retries",
            "description": "disk full",
            "retry_count": 2,
            "attempts": 3,
            "first_attempt_at": "2030-01-31T11:00:00.000Z",
            "last_attempt_at": "2030-01-31T11:59:00.000Z",
            "moved_at": "2030-01-31T12:00:00.000Z",
            "original_topic": "$queue/jobs",
        }


async def test_failed_webhook_is_retried(sender: AlertSender) -> None:
    async with webhook_server(500, 204) as served:
        sender.send(alert(served.url, "first"))
        sender.send(alert(served.url, "second"))
        got = [(await served.posted.get())["message_id"] for _ in range(3)]
        assert got == ["first", "first", "second"]


async def test_webhook_that_times_out_is_retried(sender: AlertSender) -> None:
    async with webhook_server(0, 200) as served:
        sender.send(alert(served.url))
        await served.posted.get()
        await served.posted.get()


@pytest.mark.parametrize(
    "broken", [lambda url: "http://127.0.0.1:1/hook", lambda url: "http://[", lambda url: url]
)
async def test_webhook_that_never_works_is_given_up_and_logged(
    sender: AlertSender, caplog: pytest.LogCaptureFixture, broken: Callable[[str], str]
) -> None:
    async with webhook_server(500) as served:
        with logged("alert not delivered") as gave_up:
            sender.send(alert(broken(served.url)))
            await gave_up.wait()
        assert [record.message for record in caplog.records] == [
            "message dead-lettered",
            "alert not delivered",
        ]


async def test_hanging_webhook_does_not_block_another_one() -> None:
    sender = AlertSender(retries=0, timeout=50, allowed=["127.0.0.0/8"])
    async with webhook_server(0) as stuck, webhook_server(200) as well:
        sender.send(alert(stuck.url))
        await stuck.posted.get()
        sender.send(alert(well.url))
        await well.posted.get()
        await sender.close()


async def test_alerts_waiting_for_one_webhook_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    sender = AlertSender(retries=0, timeout=50, allowed=["127.0.0.0/8"])
    async with webhook_server(0) as stuck:
        for nth in range(1001):
            sender.send(alert(stuck.url, str(nth)))
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
            "alert dropped"
        ]
        await sender.close()


async def test_dead_letter_without_webhook_is_only_logged(
    sender: AlertSender, caplog: pytest.LogCaptureFixture
) -> None:
    sender.send(alert(""))
    assert [record.message for record in caplog.records] == ["message dead-lettered"]


async def test_server_posts_to_the_webhook_and_delivers_while_it_hangs(
    start_broker: StartBroker,
) -> None:
    async with webhook_server(0) as served:
        broker = start_broker(
            '[webhooks]\nallow = ["127.0.0.1"]\n'
            '[[queues.templates]]\nmatch = "jobs"\n[queues.templates.config.dlq_config]\n'
            f'alert_webhook = "{served.url}"\n'
        )
        async with Client(broker.mqtt.host, broker.mqtt.port, client_id="worker-1") as client:
            await client.subscribe("$queue/jobs", qos=1)
            for nth in range(3):
                await client.publish("$queue/jobs", b"%d" % nth, qos=1)
            messages = client.messages()
            message = await anext(messages)
            properties = dict(message.properties.user)
            await client.publish(f"$queue/jobs/$reject/{properties['message-id']}", b"", qos=1)
            posted = await served.posted.get()
            assert posted["queue"] == "$queue/jobs"
            assert posted["message_id"] == properties["message-id"]
            assert posted["failure_reason"] == "rejected"
            for _ in range(2):
                message = await anext(messages)
                properties = dict(message.properties.user)
                await client.publish(f"$queue/jobs/$ack/{properties['message-id']}", b"", qos=1)


class FlakyHandler:
    """Fails for the first alert once."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.got: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def handle(self, alert: dict[str, object]) -> None:
        self.seen.append(alert["message_id"])
        if len(self.seen) == 1:
            raise OSError("the pager is busy")
        self.got.put_nowait(alert)


async def test_handler_of_a_plug_in_gets_every_alert_and_is_retried() -> None:
    handler = FlakyHandler()
    sender = AlertSender(retries=2, backoff=Backoff(0.001), handlers={"pager": handler})
    sender.send(alert(""))  # without a webhook
    found = await asyncio.wait_for(handler.got.get(), 5.0)
    assert (found["queue"], found["retry_count"]) == ("$queue/jobs", 2)
    assert handler.seen == ["1-1", "1-1"]
    await sender.close()


async def test_handler_that_always_fails_is_reported() -> None:
    class Broken:
        async def handle(self, alert: dict[str, object]) -> None:
            raise ValueError("no")

    sender = AlertSender(retries=1, backoff=Backoff(0.001), handlers={"pager": Broken()})
    with logged("alert not delivered") as seen:
        sender.send(alert(""))
        await asyncio.wait_for(seen.wait(), 5.0)
    await sender.close()


def test_alert_handlers_are_found_by_their_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("pager", "tests.alerts.test_alert_sender:FlakyHandler", HANDLER_GROUP)
    broken = EntryPoint("gone", "tests.alerts.test_alert_sender:Missing", HANDLER_GROUP)
    monkeypatch.setattr("sluice.alerts.alert_sender.entry_points", lambda group: [point])
    assert list(load_alert_handlers()) == ["pager"]
    monkeypatch.setattr("sluice.alerts.alert_sender.entry_points", lambda group: [broken])
    with pytest.raises(ConfigError, match="gone cannot be loaded"):
        load_alert_handlers()

"""Tests of clients when a real server is killed and restarted on the same data."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.client import Backoff, Client, Message, OutgoingMessage, PublishRefused
from tests.support.broker_process import Broker, StartBroker


class Server:
    """Runs one server after the other on the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = ""
        self.broker: Broker | None = None

    def start(self, *flags: str) -> None:
        self.broker = Broker(self.folder, self.config, flags, {})

    def kill(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker = None

    def client(self, client_id: str, lasting: bool = False, **options: Any) -> Client:
        assert self.broker is not None
        if lasting:
            options |= {"clean_start": False, "session_expiry": 3600}
        address = self.broker.mqtt
        return Client(
            address.host, address.port, **{"client_id": client_id, "reconnect": False, **options}
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    one.start()
    yield one
    if one.broker is not None:
        one.broker.stop()


async def take(client: Client, count: int) -> list[Message]:
    messages = client.messages()
    return [await anext(messages) for _ in range(count)]


async def test_queued_messages_survive_a_kill_and_acked_ones_do_not_return(server: Server) -> None:
    async with server.client("worker-1") as client:
        for nth in range(50):
            await client.publish("$queue/jobs", b"%d" % nth, qos=1 + nth % 2)
        await client.subscribe("$queue/jobs", qos=1)
        for message in await take(client, 50):
            if int(message.payload) % 2 == 0:
                name = dict(message.properties.user)["message-id"]
                await client.publish(f"$queue/jobs/$ack/{name}", qos=1)
        server.kill()
    server.start()
    async with server.client("worker-1") as client:
        await client.subscribe("$queue/jobs", qos=1)
        got = sorted(int(message.payload) for message in await take(client, 25))
        assert got == list(range(1, 50, 2))


@pytest.mark.parametrize("lasting", [False, True])
async def test_jobs_acked_while_the_broker_was_down_are_not_done_again(
    server: Server, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The acks are ids in one packet; the restarted server has delivered nothing yet."""
    async with (
        server.client("w-1", lasting, reconnect=True) as worker,
        worker.consumer("jobs") as jobs,
    ):
        await worker.publisher("jobs").send_many(
            OutgoingMessage(str(n), id=f"job {n}") for n in range(20)
        )
        given = [await anext(jobs) for _ in range(20)]
        assert server.broker is not None
        port = server.broker.mqtt.port
        server.kill()
        for job in given:
            await job.ack()
        server.start("--mqtt", f"127.0.0.1:{port}")
        async with asyncio.timeout(30):
            await worker.wait_connected()
            await worker.publisher("jobs").send("new")
            new = await anext(jobs)
            assert new.text == "new"
            await new.ack(confirm=True)
            await worker.drain()
        assert jobs.buffered == 0
    async with server.client("w-2") as other, other.consumer("jobs", group="w") as jobs:
        await other.publisher("jobs").send("last")
        assert (await anext(jobs)).text == "last"
    assert "refused" not in caplog.text


async def test_retained_messages_survive_a_kill(server: Server) -> None:
    async with server.client("maker") as client:
        for nth in range(3):
            await client.publish("a/kept", b"%d" % nth, qos=1, retain=True)
            await client.publish("a/cleared", b"%d" % nth, qos=1, retain=True)
        await client.publish("a/cleared", b"", qos=1, retain=True)
        server.kill()
    server.start()
    async with server.client("looker") as client:
        await client.subscribe("a/#", qos=1)
        await client.publish("a/end", b"end", qos=1)
        got = [(message.topic, message.payload) for message in await take(client, 2)]
        assert got == [("a/kept", b"2"), ("a/end", b"end")]


async def test_persistent_session_and_its_pending_messages_survive_a_kill(server: Server) -> None:
    async with server.client("sleeper", lasting=True) as client:
        await client.subscribe("news/#", qos=2, identifier=7)
        await client.close(session_expiry=3600)
    async with server.client("maker") as client:
        for nth in range(10):
            await client.publish(f"news/{nth}", b"%d" % nth, qos=1 + nth % 2)
        server.kill()
    server.start()
    async with server.client("sleeper", lasting=True) as client:
        assert client.session_present
        messages = await take(client, 10)
        numbers = [int(message.payload) for message in messages]
        for qos in (1, 2):  # order is guaranteed within a QoS
            assert [one for one in numbers if 1 + one % 2 == qos] == list(range(qos - 1, 10, 2))
        assert messages[0].properties.subscription_ids == [7]
        # stored, so earlier messages are stored as well
        await client.publish("$queue/other", qos=1)
        server.kill()
    server.start()
    async with server.client("sleeper", lasting=True) as client:
        await client.publish("news/end", b"end", qos=1)
        assert [message.payload for message in await take(client, 1)] == [b"end"]


async def test_persistent_consumer_continues_after_a_kill(server: Server) -> None:
    async with server.client("worker-1", lasting=True) as client:
        await client.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "g")])
        server.kill()
    server.start()
    async with server.client("maker") as client:
        await client.publish("$queue/jobs", b"x", qos=1)
    async with server.client("worker-1", lasting=True) as client:
        (message,) = await take(client, 1)
        assert dict(message.properties.user)["consumer-group"] == "g"


async def test_configurations_and_bindings_survive_a_kill(server: Server) -> None:
    async with server.client("admin") as client:
        config = {"name": "temps", "partitions": 3, "bindings": ["sensors/+/temp"]}
        await client.publish("$admin/queue/create", json.dumps(config), qos=1)
        await client.publish(
            "$admin/queue/temps/config", json.dumps({"limits": {"max_queue_depth": 1}}), qos=1
        )
        server.kill()
    server.start()
    async with server.client("device") as client:
        await client.publish("sensors/1/temp", b"20", qos=1)
        with pytest.raises(PublishRefused, match="full at 1"):
            await client.publish("sensors/1/temp", b"21", qos=1)


async def test_cleanly_stopped_broker_loses_nothing_either(server: Server) -> None:
    async with server.client("maker") as client:
        for nth in range(20):
            await client.publish("$queue/jobs", b"%d" % nth, qos=0)
        await client.publish("$queue/jobs", b"20", qos=1)
    assert server.broker is not None
    server.broker.stop()
    server.start()
    async with server.client("worker-1") as client:
        await client.subscribe("$queue/jobs", qos=1)
        assert sorted(int(message.payload) for message in await take(client, 21)) == list(range(21))


async def test_templates_come_from_the_configuration_file(start_broker: StartBroker) -> None:
    broker = start_broker(
        '[[queues.templates]]\nmatch = "small/#"\n'
        "[queues.templates.config.limits]\nmax_queue_depth = 1\n"
    )
    async with Client(broker.mqtt.host, broker.mqtt.port, client_id="maker") as client:
        await client.publish("$queue/small/a", b"x", qos=1)
        with pytest.raises(PublishRefused, match="full at 1"):
            await client.publish("$queue/small/a", b"x", qos=1)
        for _ in range(2):
            await client.publish("$queue/other", b"x", qos=1)


async def wait_for_log(broker: Broker, text: str) -> None:
    async with asyncio.timeout(10.0):
        while text not in broker.log_text():  # noqa: ASYNC110 - the log is a file
            await asyncio.sleep(0.02)


async def test_templates_are_reloaded_on_sighup(start_broker: StartBroker) -> None:
    broker = start_broker('[[queues.templates]]\nmatch = "#"\nconfig = { partitions = 2 }\n')
    file = broker.folder / "sluice.toml"
    async with httpx.AsyncClient(base_url=f"http://{broker.address('http')}/api/v1") as api:

        async def create(name: str) -> int:
            reply = await api.post("/queues", json={"name": name})
            return int(reply.json()["stats"]["partitions"])

        assert await create("before") == 2
        file.write_text('[[queues.templates]]\nmatch = "#"\nconfig = { partitions = 3 }\n')
        broker.process.send_signal(signal.SIGHUP)
        await wait_for_log(broker, "queue templates reloaded")
        assert await create("after") == 3
        file.write_text('[[queues.templates]]\nmatch = "#"\nconfig = { partitions = 0 }\n')
        broker.process.send_signal(signal.SIGHUP)
        await wait_for_log(broker, "queue templates not reloaded")
        assert "partitions must be from 1 to 4096" in broker.log_text()
        assert await create("later") == 3


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            'match = "a"\n[queues.templates.config]\npartitions = 0',
            "partitions must be from 1 to 4096",
        ),
        ('match = "a"\n[queues.templates.config]\nnonsense = 1', "nonsense"),
        ('match = "a"\n[queues.templates.config.schema]\ntype = 7', "schema"),
    ],
)
async def test_invalid_template_is_reported_at_start(
    start_broker: StartBroker, template: str, words: str
) -> None:
    with pytest.raises(AssertionError, match="before it was ready") as failure:
        start_broker(f"[[queues.templates]]\n{template}\n")
    assert words in str(failure.value)


async def test_queues_can_be_disabled(start_broker: StartBroker) -> None:
    broker = start_broker("[queues]\nenabled = false\n")
    async with Client(broker.mqtt.host, broker.mqtt.port, client_id="one") as client:
        await client.subscribe("$queue/jobs", qos=1)
        await client.publish("$queue/jobs", b"x", qos=1)
        (message,) = await take(client, 1)
        assert message.properties.user == []


async def test_3_1_1_client_is_disconnected_when_its_message_was_not_stored(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    reader, writer = await asyncio.open_connection(broker.mqtt.host, broker.mqtt.port)
    writer.write(b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x00\x00\x03old")
    assert await reader.readexactly(4) == b"\x20\x02\x00\x00"
    topic = b"$queue/a//b"
    writer.write(
        b"\x32" + bytes([2 + len(topic) + 2]) + len(topic).to_bytes(2, "big") + topic + b"\x00\x01"
    )
    assert await reader.read() == b""
    writer.close()


async def test_settlements_sent_while_the_broker_is_down_count_when_it_is_back(
    server: Server,
) -> None:
    assert server.broker is not None
    port = server.broker.mqtt.port
    options: dict[str, Any] = {
        "reconnect": True,
        "backoff": Backoff(0.05, 0.2),
        "clean_start": True,
    }
    async with asyncio.timeout(60), server.client("worker-1", **options) as client:
        names = ["done", "failed", "bad", "unused", "long", "longer"]
        await client.publisher("jobs").send_many(OutgoingMessage(name, id=name) for name in names)
        async with client.consumer("jobs") as jobs:
            job = {one.text: one for one in [await anext(jobs) for _ in names]}
            server.kill()
            while client.is_connected:  # noqa: ASYNC110 (polls another process or thread)
                await asyncio.sleep(0.01)
            saying = [
                asyncio.create_task(word)
                for word in (
                    job["done"].ack(confirm=True),
                    job["failed"].nack(delay="1h", confirm=True),
                    job["bad"].reject(description="no good", confirm=True),
                    job["unused"].release(confirm=True),
                    job["long"].extend(),
                )
            ]
            jobs.extend([job["longer"]])
            server.start("--mqtt", f"127.0.0.1:{port}")
            await asyncio.gather(*saying)
            again = await anext(jobs)
            assert (again.text, again.attempt) == ("unused", 1)
            for one in (again, job["long"], job["longer"]):
                await one.ack(confirm=True)
            async with client.consumer("dlq/jobs") as dead_letters:
                assert (await anext(dead_letters)).text == "bad"
            async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
                address = server.broker.address("http")
                groups = (await http.get(f"http://{address}/api/v1/queues/jobs/groups")).json()
            ledger = groups[0]["ledger"]
            assert (ledger["acked"], ledger["retrying"], ledger["dead"]) == (4, 1, 1)

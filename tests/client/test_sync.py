"""The client for programs without an event loop: the same library, call by call."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import sluice.client as library
from sluice.client import ClientClosed, ConnectFailed, sync
from sluice.client.message import Message
from tests.client.servers import free_port
from tests.support.broker_process import Broker

# What only the library's own parts use, or what only makes sense with a loop.
INNER = {
    library.Client: {"acknowledge", "forget_subscription", "lend", "submit", "switch", "withdraw"},
    library.Consumer: {"end", "extend", "flush", "give_back", "leave", "receive", "reply"}
    | {"line_is_new", "session_lost", "settle"}
    | {"first_waiting", "set_prefetch", "settler", "take_waiting"},
    library.Delivery: {"done", "has_twin", "line", "message", "place", "taken"},
    library.Publisher: set(),
    library.TopicConsumer: {"client"},
    Message: {"answer", "replier"},
}


@pytest.mark.parametrize("original", INNER, ids=lambda original: original.__name__)
def test_sync_client_offers_the_whole_library(original: type) -> None:
    facade = getattr(sync, original.__name__)
    offered = {name for name in dir(original) if not name.startswith("_")}
    assert {name for name in offered if name not in dir(facade)} - INNER[original] == set()


def test_blocking_method_has_the_parameters_and_docstring_of_the_original() -> None:
    assert inspect.signature(sync.Client.publish) == inspect.signature(library.Client.publish)
    assert sync.Publisher.send.__doc__ == library.Publisher.send.__doc__


def test_jobs_are_sent_received_and_settled(broker: Broker) -> None:
    with sync.Client.from_url(f"mqtt://{broker.mqtt}", client_id="sync-1") as client:
        assert client.is_connected and client.client_id == "sync-1"
        publisher = client.publisher("sync/jobs")
        names = publisher.send_many([{"n": 1}, {"n": 2}])
        publisher.send_nowait({"n": 3}, key="k")
        client.drain()
        with client.consumer("sync/jobs", group="sync") as jobs:
            taken = [job for _, job in zip(range(3), jobs, strict=False)]
            assert sorted(job.json()["n"] for job in taken) == [1, 2, 3]
            assert {job.id for job in taken} > set(names)
            for job in taken:
                assert job.attempt == 1 and job.ack(confirm=True)
            with pytest.raises(TimeoutError):
                jobs.take(timeout=0.01)


def test_request_is_answered(broker: Broker) -> None:
    def answer() -> None:
        with sync.Client(broker.mqtt.host, broker.mqtt.port) as responder:
            responder.subscribe("sync/time", qos=1)
            ready.set()
            next(responder.messages()).reply("noon")

    ready = threading.Event()
    with ThreadPoolExecutor(1) as thread, sync.Client(broker.mqtt.host, broker.mqtt.port) as client:
        answering = thread.submit(answer)
        assert ready.wait(30)
        assert client.request("sync/time", timeout=30).payload == b"noon"
        answering.result()


def test_closed_client_raises_and_its_thread_has_ended(broker: Broker) -> None:
    client = sync.Client(broker.mqtt.host, broker.mqtt.port)
    with client:
        assert any(thread.name == "sluice-client" for thread in threading.enumerate())
    assert not any(thread.name == "sluice-client" for thread in threading.enumerate())
    with pytest.raises(ClientClosed, match="Make a new Client"):
        client.publish("a", "b")
    assert client.options.port == broker.mqtt.port  # what needs no loop can still be read


def test_failed_connection_leaves_no_thread_behind() -> None:
    with pytest.raises(ConnectFailed), sync.Client("127.0.0.1", free_port()):
        pass
    assert not any(thread.name == "sluice-client" for thread in threading.enumerate())

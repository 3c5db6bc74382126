"""The blocking client: the same library, call by call."""

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

# Names for internal use, or names that need an event loop.
INNER = {
    library.Client: {"acknowledge", "attach_replier", "dispatcher", "forget_subscription"}
    | {"requeue", "submit", "withdraw"},
    library.Consumer: {"end", "extend", "flush", "leave", "receive", "release_all", "reply"}
    | {"ack_and_publish", "on_reconnected", "on_session_lost", "settle"}
    | {"first_waiting", "set_prefetch", "settler", "take_waiting"},
    library.Delivery: {"connection_number", "has_duplicate", "is_acked", "is_taken", "message"}
    | {"position"},
    library.Publisher: {"make_packet"},
    library.TopicConsumer: {"client", "receive_next"},
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
    assert client.options.port == broker.mqtt.port  # attributes that need no loop stay readable


def test_failed_connection_leaves_no_thread_behind() -> None:
    with pytest.raises(ConnectFailed), sync.Client("127.0.0.1", free_port()):
        pass
    assert not any(thread.name == "sluice-client" for thread in threading.enumerate())

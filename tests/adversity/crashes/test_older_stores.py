"""Opens stores that earlier versions of Sluice wrote.

Each directory in `stores/` was written by a broker with that version of the queues' state
(docs/upgrading.md), with a snapshot after each kilobyte. It contains

* a persistent session `sleeper` on `plain/#` with a pending QoS 2 message, and a retained message,
* `$queue/jobs` with a group `workers`: one job is done, one has failed, one was in flight,
* an exclusive queue of `car-1`, and a compacted queue `last`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sluice.client import Client, Message
from sluice.queues.recovery import snapshot
from tests.support.broker_process import Broker

STORES = Path(__file__).with_name("stores")
# The versions that a release wrote.
VERSIONS = sorted(int(path.name.split("-")[1].split(".")[0]) for path in STORES.iterdir())
CONFIG = '[ecq]\nretention = "0s"\n'  # the values are old


def test_there_is_a_store_of_the_oldest_version() -> None:
    assert VERSIONS[0] == snapshot.OLDEST_VERSION


@pytest.mark.parametrize("version", VERSIONS)
async def test_store_of_an_earlier_version_is_opened_with_all_its_contents(
    version: int, tmp_path: Path
) -> None:
    with tarfile.open(STORES / f"version-{version}.tar.xz") as store:
        store.extractall(tmp_path, filter="data")
    broker = Broker(tmp_path, CONFIG, (), {})
    try:
        async with at(broker, "sleeper", clean_start=False, session_expiry=60) as sleeper:
            assert [one.payload for one in await take(sleeper, 1)] == [b"mail"]
        async with at(broker, "reader") as reader:
            await reader.subscribe("kept/#", qos=1)
            assert [one.payload for one in await take(reader, 1)] == [b"still here"]
        async with at(broker, "worker-1") as worker:
            await worker.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "workers")])
            jobs = {one.payload: dict(one.properties.user) for one in await take(worker, 2)}
            assert {name: user["attempt"] for name, user in jobs.items()} == {
                b"failed": "2",
                b"out": "2",
            }
        async with at(broker, "car-1") as car:
            await car.subscribe("$ECQ/car-1/#", qos=1)
            assert {one.payload for one in await take(car, 2)} == {b"sun", b"dry"}
        async with at(broker, "late") as late:
            await late.subscribe("$queue/last", qos=1, user=[("consumer-group", "late")])
            assert [one.payload for one in await take(late, 1)] == [b"new"]
    finally:
        broker.stop()


def at(broker: Broker, name: str, clean_start: bool = True, session_expiry: int = 0) -> Client:
    return Client(
        broker.mqtt.host,
        broker.mqtt.port,
        client_id=name,
        reconnect=False,
        clean_start=clean_start,
        session_expiry=session_expiry,
    )


async def take(client: Client, count: int) -> list[Message]:
    taken: list[Message] = []
    async for message in client.messages():
        taken.append(message)
        if len(taken) == count:
            break
    return taken

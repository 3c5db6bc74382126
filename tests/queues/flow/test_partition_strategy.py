"""Partition strategies of plug-ins: they choose the partition of a key."""

from __future__ import annotations

import pathlib
from importlib.metadata import EntryPoint

import pytest

from sluice.client import QueueConfigRefused, sync
from sluice.queues.service import partition_strategies
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest
from tests.support.broker_process import Broker, StartBroker, same_build

PLUGIN = '''
class ByRegion:
    """Keys such as north/7: each region has a partition of its own."""

    def choose_partition(self, key, partitions):
        regions = [b"north", b"south", b"east", b"west"]
        return regions.index(key.split(b"/")[0]) % partitions
'''


class LastByte:
    def choose_partition(self, key: bytes, partitions: int) -> int:
        return key[-1] % partitions


class Broken:
    def choose_partition(self, key: bytes, partitions: int) -> int:
        if key == b"raises":
            raise KeyError("no such region")
        return partitions


@pytest.fixture(autouse=True)
def strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, f"{__name__}:{kind.__name__}", partition_strategies.STRATEGY_GROUP)
        for name, kind in (("last-byte", LastByte), ("broken", Broken))
    ]
    monkeypatch.setattr(partition_strategies, "entry_points", lambda group: points)
    monkeypatch.setattr(partition_strategies, "_loaded", {})


def _partitions_of(engine: EngineUnderTest) -> list[int]:
    return [
        int(partition.number)
        for partition in engine.queue().partitions
        for _ in range(int(partition.live_count))
    ]


def test_strategy_chooses_the_partition_of_a_key_before_and_after_a_restart(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=4, partition_strategy="last-byte")
    for number in range(8):
        engine.publish(b"m", key=b"key-%d" % number)
    before = [0, 0, 1, 1, 2, 2, 3, 3]
    assert _partitions_of(engine) == before
    engine.crash_and_restart()
    for number in range(8):
        engine.publish(b"m", key=b"key-%d" % number)
    assert _partitions_of(engine) == sorted(before + before)


def test_messages_without_a_key_do_not_reach_the_strategy(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4, partition_strategy="last-byte")
    for _ in range(8):
        engine.publish(b"m")
    assert _partitions_of(engine) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_raised_partitions_keep_the_order_of_a_key_that_a_strategy_moves(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2, partition_strategy="last-byte")
    engine.publish(b"older", key=b"5")
    engine.reconfigure(partitions=8)
    engine.publish(b"newer", key=b"5")
    assert _partitions_of(engine) == [1, 5]
    worker = engine.worker()
    held = worker.lease()
    assert held.payload == b"older" and worker.lease_or_none() is None
    worker.ack(held)
    assert worker.ack_all() == [b"newer"]


@pytest.mark.parametrize(
    ("key", "fault"), [(b"raises", "KeyError: 'no such region'"), (b"far", "returned 4 for 4")]
)
def test_hash_decides_when_the_strategy_fails_and_the_log_says_so_once_a_minute(
    make_engine: MakeEngine, key: bytes, fault: str
) -> None:
    engine = make_engine(partitions=4, partition_strategy="broken")
    for _ in range(3):
        engine.publish(b"m", key=key)
    assert len(set(_partitions_of(engine))) == 1
    assert [fault in text for text in engine.warnings] == [True]
    engine.advance(minutes=2)
    engine.publish(b"m", key=key)
    assert len(engine.warnings) == 2


def test_strategy_of_an_installed_package_is_used_and_refused_by_name_when_it_is_gone(
    start_broker: StartBroker, tmp_path: pathlib.Path
) -> None:
    site = tmp_path / "site"
    info = site / "regions-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "regions.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: regions\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sluice.partition_strategies]\nby-region = regions:ByRegion\n"
    )
    environ = {"PYTHONPATH": f"{same_build()['PYTHONPATH']}:{site}"}
    broker = start_broker(environ=environ)
    with sync.Client.from_url(f"mqtt://{broker.mqtt}", client_id="planner") as client:
        client.declare_queue("plan", partitions=4, partition_strategy="by-region")
        for key in ("north/7", "south/7", "east/7", "west/7", "south/8"):
            client.publisher("plan").send(b"x", key=key)
        with pytest.raises(QueueConfigRefused, match="is 'by-zone', which is not installed"):
            client.declare_queue("other", partition_strategy="by-zone")
        with pytest.raises(QueueConfigRefused, match="partition_strategy cannot change"):
            client.declare_queue("plan", partition_strategy="hash")
        with client.consumer("plan", group="g") as consumer:
            deliveries = [consumer.take(10) for _ in range(5)]
    assert sorted((one.key, one.partition) for one in deliveries if one) == [
        ("east/7", 2),
        ("north/7", 0),
        ("south/7", 1),
        ("south/8", 1),
        ("west/7", 3),
    ]
    broker.stop()
    with pytest.raises(AssertionError, match="before it was ready") as refused:
        Broker(broker.folder, "", ("--salvage",), {})
    assert "queue 'plan' cannot be opened: partition_strategy is 'by-region'" in str(refused.value)
    again = Broker(broker.folder, "", (), environ)
    try:
        with (
            sync.Client.from_url(f"mqtt://{again.mqtt}") as client,
            client.consumer("plan", group="g") as consumer,
        ):
            assert sum(consumer.take(10) is not None for _ in range(5)) == 5
    finally:
        again.stop()

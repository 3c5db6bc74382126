"""How a stream plans and what it sends to the broker, as called by Spark's planner. No Java."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiomqtt
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from sluice.spark.errors import DataLost, InvalidOption
from sluice.spark.source.columns import schema_of
from sluice.spark.source.stream_reader import StreamReader
from tests.admin.live_broker import Worker
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import Broker, StartBroker


class Planner:
    """Spark's side: it keeps the last offset, and passes it back."""

    def __init__(self, reader: StreamReader, start: dict[str, Any] | None = None) -> None:
        self.reader = reader
        self.start = start if start is not None else self._through_json(reader.initialOffset())

    @staticmethod
    def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(json.dumps(offset))
        return reported

    def batch(self, limit: ReadLimit | None = None) -> list[str]:
        """Run one micro-batch and return its values. Its commit comes with the next one."""
        limit = limit or self.reader.getDefaultReadLimit()
        end = self._through_json(self.reader.latestOffset(self.start, limit))
        found = self.values(self.start, end)
        self.start = end
        return found

    def values(self, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
        return [
            value.decode()
            for part in self.reader.partitions(start, end)
            for batch in self.reader.read(part)
            for value in batch.column("value").to_pylist()
        ]


@contextmanager
def planning(
    harness: SparkHarness, start: dict[str, Any] | None = None, /, **options: str
) -> Iterator[Planner]:
    reader = harness.source(**options).streamReader(schema_of(["value"]))
    try:
        yield Planner(reader, start)
    finally:
        reader.stop()


def numbers(first: int, behind: int) -> list[str]:
    return [f"{nth:04d}" for nth in range(first, behind)]


def test_group_follows_what_spark_has_finished_and_messages_are_deleted(
    harness: SparkHarness,
) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness, group="g", maxOffsetsPerTrigger="4") as planner:
        assert harness.lag("g") == 10
        assert planner.batch() == numbers(0, 4)
        assert harness.lag("g") == 10  # Spark has not finished the batch
        assert planner.batch() == numbers(4, 8)
        assert (harness.lag("g"), harness.depth()) == (6, 6)
        planner.reader.commit(planner.start)
        assert (harness.lag("g"), harness.depth()) == (2, 2)
        last = planner.start
    with planning(
        harness, last, group="g", startingOffsets="earliest"
    ) as planner:  # the checkpoint decides
        assert planner.batch() == numbers(8, 10)
        assert planner.batch() == []
        assert (harness.lag("g"), harness.depth()) == (0, 0)


def test_planned_batch_has_the_same_rows_after_a_restart(harness: SparkHarness) -> None:
    harness.make(partitions=3)
    harness.fill(numbers(0, 100))
    with planning(harness, group="g", maxOffsetsPerTrigger="50", minPartitions="7") as planner:
        start = planner.start
        rows = planner.batch()
        end = planner.start
    harness.fill(numbers(100, 200))
    with planning(harness, start, group="g", minPartitions="7") as planner:
        assert planner.values(start, end) == rows


def test_offsets_do_not_change_while_nothing_arrives(harness: SparkHarness) -> None:
    harness.make(partitions=12)
    harness.fill(numbers(0, 30))
    with planning(harness, group="g") as planner:
        planner.batch()
        texts = {
            json.dumps(planner.reader.latestOffset(planner.start, ReadAllAvailable()))
            for _ in range(2)
        }
    assert texts == {json.dumps(planner.start)}


def test_waiting_stream_sees_a_message_at_once(harness: SparkHarness) -> None:
    harness.make()
    with planning(harness) as planner:
        later = threading.Timer(0.2, harness.fill, [["news"]])
        later.start()
        found: list[str] = []
        while not found:
            found = planner.batch()
        later.join()
        assert found == ["news"]
        latest = planner.reader.reportLatestOffset()
        assert latest is not None and latest["queues"] == planner.start["queues"]


def test_progress_says_how_far_the_stream_is_behind(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness, maxOffsetsPerTrigger="6") as planner:
        for expected in (4, 0):
            planner.batch()
            progress = planner.reader.reportLatestOffset()
            assert progress is not None
            assert progress["queues"] == {harness.queue: {"0": 10}}
            assert progress["behind"] == {harness.queue: {"0": expected}}
            assert progress["rowsBehind"] == expected


def test_available_now_ends_at_the_initial_end_and_the_last_batch_is_settled(
    harness: SparkHarness,
) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(
        harness, group="g", maxOffsetsPerTrigger="6", minOffsetsPerTrigger="5"
    ) as planner:
        planner.reader.prepareForTriggerAvailableNow()
        harness.fill(numbers(10, 20))
        assert planner.batch() == numbers(0, 6)
        assert planner.batch() == numbers(6, 10)  # fewer than the minimum, and still read
        assert planner.batch() == []
        assert harness.lag("g") == 10


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, "0000"),
        ({"group": "old"}, "0003"),  # an existing group continues where it was
        ({"group": "new"}, "0000"),
        ({"group": "new2", "startingOffsets": "latest"}, "0010"),
        ({"startingOffsets": "latest"}, "0010"),
        ({"startingOffsets": '{"%s": {"0": 7}}'}, "0007"),
        ({"startingTimestamp": "2100-01-01"}, "0010"),
        ({"startingTimestamp": "1000", "group": "new3"}, "0000"),
    ],
)
def test_starting_position_of_a_stream(
    options: dict[str, str], first: str, harness: SparkHarness
) -> None:
    harness.make()
    harness.bulk_client.advance(harness.queue, "keeps-all", {}, create=True)
    harness.fill(numbers(0, 10))
    harness.bulk_client.advance(harness.queue, "old", {0: 3}, create=True)
    given = {name: value.replace("%s", harness.queue) for name, value in options.items()}
    with planning(harness, None, **given) as planner:
        planner.reader.initialOffset()
        harness.fill(numbers(10, 11))
        assert planner.batch()[0] == first


def test_batch_is_limited_by_approximate_bytes(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(["x" * 10_000 for _ in range(100)], key="k")
    with planning(harness, maxBytesPerTrigger="100k") as planner:
        assert 5 <= len(planner.batch()) <= 15
        assert len(planner.batch(ReadAllAvailable())) >= 50  # Trigger.Once


def test_too_few_messages_wait_for_more_or_for_the_delay(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 3))
    with planning(harness, minOffsetsPerTrigger="5") as planner:
        assert planner.batch() == []
        harness.fill(numbers(3, 5))
        assert planner.batch() == numbers(0, 5)
    with planning(harness, minOffsetsPerTrigger="9", maxTriggerDelay="0") as planner:
        assert planner.batch() == numbers(0, 5)


def test_new_queue_is_read_from_its_start(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    harness.fill(["a"], one)
    with planning(harness, subscribePattern=f"{harness.queue}/.*", group="g") as planner:
        assert planner.batch() == ["a"]
        harness.fill(["b"], two)
        assert planner.batch() == ["b"]
        assert planner.batch() == []
        assert harness.lag("g", two) == 0


def test_unsubscribed_queue_is_not_changed(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    harness.fill(["a"], one)
    harness.fill(["b"], two)
    with planning(harness, subscribe=f"{one},{two}", group="g") as planner:
        assert planner.batch() == ["a", "b"]
        end = planner.start
    harness.fill(["c"], one)
    harness.fill(["d"], two)
    with planning(harness, end, subscribe=one, group="g") as planner:
        assert planner.batch() == ["c"]
        assert planner.batch() == []
    assert (harness.lag("g", one), harness.lag("g", two)) == (0, 2)
    with planning(harness, planner.start, subscribe=f"{one},{two}", group="g") as planner:
        assert planner.batch() == ["d"]  # where it was


def test_deleted_messages_fail_the_stream_or_are_skipped(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness) as planner:  # without a group nothing is stored for it
        start = planner.start
        harness.bulk_client.advance(harness.queue, "other", {0: 4}, create=True)
        with pytest.raises(
            DataLost, match=r"kept from 4 on, and Spark has read up to 0.*option group"
        ):
            planner.batch()
    with planning(harness, start, failOnDataLoss="false") as planner:
        assert planner.batch() == numbers(4, 10)


def test_messages_redriven_for_another_group_are_not_read_and_no_loss(
    harness: SparkHarness,
) -> None:
    harness.make()
    with planning(harness, group="g") as planner:
        asyncio.run(harness.reject(b"bad"))
        assert planner.batch() == ["bad"]
        assert planner.batch() == []
        retried = harness.api.post(f"/queues/{harness.queue}/dlq/retry", json={})
        assert retried.json()["retried"] == 1
        assert harness.depth() == 1
        assert planner.batch() == []
        assert harness.api.post(f"/queues/{harness.queue}/purge").is_success
        harness.fill(["next"])
        assert planner.batch() == ["next"]


def test_deleted_group_is_reported_if_messages_are_gone(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 4))
    with planning(harness, group="g", maxOffsetsPerTrigger="2") as planner:
        assert planner.batch() == numbers(0, 2)
        assert planner.batch() == numbers(2, 4)
        end = planner.start
    assert harness.api.delete(f"/queues/{harness.queue}/groups/g").is_success
    harness.bulk_client.advance(harness.queue, "other", {}, create=True, start="latest")
    harness.fill(numbers(4, 6))
    with planning(harness, end, group="g") as planner:
        assert planner.batch() == numbers(4, 6), "what is there is kept for it from now on"
    assert harness.api.delete(f"/queues/{harness.queue}/groups/g").is_success
    harness.fill(numbers(6, 8))
    harness.bulk_client.advance(
        harness.queue, "other", harness.bulk_client.offsets(harness.queue).latest()
    )
    with (
        planning(harness, end, group="g") as planner,
        pytest.raises(DataLost, match="Spark has read up to 4"),
    ):
        planner.batch()


def test_recreated_queue_fails_the_stream_or_is_read_from_its_start(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness) as planner:
        planner.batch()
        end = planner.start
    assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success
    with planning(harness, end) as planner, pytest.raises(DataLost, match="not there any more"):
        planner.batch()
    harness.make()
    harness.fill(numbers(50, 53))
    with planning(harness, end) as planner, pytest.raises(DataLost, match="deleted and made again"):
        planner.batch()
    with planning(harness, end, failOnDataLoss="false", group="g") as planner:
        assert planner.batch() == numbers(50, 53)


def recreate_queue(harness: SparkHarness, values: list[str]) -> None:
    assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success
    harness.make()
    harness.fill(values)


@pytest.mark.parametrize("group", [{}, {"group": "g"}], ids=["alone", "group"])
@pytest.mark.parametrize("length", [10, 15])
def test_recreated_queue_of_the_same_length_is_recognized(
    length: int, group: dict[str, str], harness: SparkHarness
) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness, **group) as planner:
        assert planner.batch() == numbers(0, 10)
        end = planner.start
        recreate_queue(harness, numbers(50, 50 + length))
        with pytest.raises(DataLost, match=r"deleted and made again.*new checkpointLocation"):
            planner.batch()
    assert harness.depth() == length, "nothing of the new one is settled unread"
    with planning(
        harness, end, **group, failOnDataLoss="false", maxOffsetsPerTrigger="8"
    ) as planner:
        assert planner.batch() == numbers(50, 58)
        assert planner.batch() == numbers(58, 50 + length)
        assert planner.batch() == []
        if group:
            assert harness.lag("g") == 0


def test_batch_planned_for_a_queue_is_not_read_from_a_recreated_one(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness, group="g") as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    recreate_queue(harness, numbers(50, 70))
    with (
        planning(harness, start, group="g") as planner,
        pytest.raises(DataLost, match="made again"),
    ):
        planner.values(start, end)
    with planning(harness, start, failOnDataLoss="false") as planner:
        assert planner.values(start, end) == []
        planner.start = end
        assert planner.batch() == numbers(50, 70)


def test_checkpoint_without_incarnation_continues_and_records_it(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 10))
    old = {"v": 1, "queues": {harness.queue: {"0": 4}}}
    with planning(harness, old, group="g") as planner:
        assert planner.batch() == numbers(4, 10)
        assert planner.start["incarnations"] == {
            harness.queue: harness.bulk_client.offsets(harness.queue).incarnation
        }
        recreate_queue(harness, numbers(50, 70))
        with pytest.raises(DataLost, match="made again"):
            planner.batch()


def test_new_queue_is_retained_for_the_group_from_its_start(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    harness.fill(["a"], one)
    later = {"group": "g", "startingOffsets": "latest", "maxOffsetsPerTrigger": "1"}
    with planning(harness, subscribePattern=f"{harness.queue}/.*", **later) as planner:
        harness.fill(["b", "c"], two, key="k")
        assert planner.batch() == ["b"]
        assert harness.lag("g", two) == 2
        assert planner.batch() == ["c"]


async def test_group_with_mqtt_consumers_is_refused(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(["a"])
    mqtt = harness.broker.mqtt
    async with aiomqtt.Client(
        mqtt.host,
        mqtt.port,
        identifier=f"live-{harness.queue}",
        protocol=aiomqtt.ProtocolVersion.V5,
    ) as client:
        await Worker(client, harness.queue).join(consumer_group="busy")
        with (
            pytest.raises(
                InvalidOption,
                match=r"option group is 'busy'.*consumers over MQTT.*group of its own",
            ),
            planning(harness, group="busy"),
        ):
            pass


def test_killed_broker_is_waited_for(start_broker: StartBroker) -> None:
    broker = start_broker()
    harness = SparkHarness(broker, "q")
    harness.make()
    harness.fill(numbers(0, 10))
    with planning(harness, group="g", retrySeconds="60", maxOffsetsPerTrigger="5") as planner:
        assert planner.batch() == numbers(0, 5)
        port = broker.address("http").port
        broker.kill()
        risen: list[Broker] = []
        rise = threading.Timer(
            0.5,
            lambda: risen.append(Broker(broker.folder, "", ["--http", f"127.0.0.1:{port}"], {})),
        )
        rise.start()
        assert planner.batch() == numbers(5, 10)
        rise.join()
        assert harness.lag("g") == 5
    harness.close()
    risen[0].stop()

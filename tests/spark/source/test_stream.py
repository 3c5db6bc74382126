"""How a stream plans and what it tells the broker, call by call as Spark's planner makes them. No Java here."""

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

from sluice.spark.source.columns import named
from sluice.spark.errors import DataLost, InvalidOption
from sluice.spark.source.stream_reader import StreamReader
from tests.admin.live_broker import Worker
from tests.support.broker_process import Broker, StartBroker
from tests.spark.conftest import House


class Planner:
    """Spark's side: it keeps the last offset, and hands back what it was given."""

    def __init__(self, reader: StreamReader, start: dict[str, Any] | None = None) -> None:
        self.reader = reader
        self.start = start if start is not None else self._through_json(reader.initialOffset())

    @staticmethod
    def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(json.dumps(offset))
        return told

    def batch(self, limit: ReadLimit | None = None) -> list[str]:
        """One micro-batch: its values. The commit comes with the next one."""
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
def planning(house: House, start: dict[str, Any] | None = None, /, **options: str) -> Iterator[Planner]:
    reader = house.source(**options).streamReader(named(["value"]))
    try:
        yield Planner(reader, start)
    finally:
        reader.stop()


def numbers(first: int, behind: int) -> list[str]:
    return [f"{nth:04d}" for nth in range(first, behind)]


def test_a_group_follows_what_spark_has_finished_and_messages_are_let_go(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house, group="g", maxOffsetsPerTrigger="4") as planner:
        assert house.lag("g") == 10
        assert planner.batch() == numbers(0, 4)
        assert house.lag("g") == 10  # Spark has not said that it is finished
        assert planner.batch() == numbers(4, 8)
        assert (house.lag("g"), house.depth()) == (6, 6)
        planner.reader.commit(planner.start)
        assert (house.lag("g"), house.depth()) == (2, 2)
        last = planner.start
    with planning(house, last, group="g", startingOffsets="earliest") as planner:  # the checkpoint decides
        assert planner.batch() == numbers(8, 10)
        assert planner.batch() == []
        assert (house.lag("g"), house.depth()) == (0, 0)


def test_a_planned_batch_gives_the_same_rows_after_a_restart(house: House) -> None:
    house.make(partitions=3)
    house.fill(numbers(0, 100))
    with planning(house, group="g", maxOffsetsPerTrigger="50", minPartitions="7") as planner:
        start = planner.start
        rows = planner.batch()
        end = planner.start
    house.fill(numbers(100, 200))
    with planning(house, start, group="g", minPartitions="7") as planner:
        assert planner.values(start, end) == rows


def test_offsets_do_not_change_while_nothing_arrives(house: House) -> None:
    house.make(partitions=12)
    house.fill(numbers(0, 30))
    with planning(house, group="g") as planner:
        planner.batch()
        texts = {json.dumps(planner.reader.latestOffset(planner.start, ReadAllAvailable())) for _ in range(2)}
    assert texts == {json.dumps(planner.start)}


def test_a_stream_that_waits_hears_of_a_message_at_once(house: House) -> None:
    house.make()
    with planning(house) as planner:
        later = threading.Timer(0.2, house.fill, [["news"]])
        later.start()
        found: list[str] = []
        while not found:
            found = planner.batch()
        later.join()
        assert found == ["news"]
        latest = planner.reader.reportLatestOffset()
        assert latest is not None and latest["queues"] == planner.start["queues"]


def test_available_now_ends_at_what_was_there_and_the_last_batch_is_settled(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house, group="g", maxOffsetsPerTrigger="6", minOffsetsPerTrigger="5") as planner:
        planner.reader.prepareForTriggerAvailableNow()
        house.fill(numbers(10, 20))
        assert planner.batch() == numbers(0, 6)
        assert planner.batch() == numbers(6, 10)  # fewer than the least, and still read
        assert planner.batch() == []
        assert house.lag("g") == 10


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, "0000"),
        ({"group": "old"}, "0003"),  # a group that is there goes on where it was
        ({"group": "new"}, "0000"),
        ({"group": "new2", "startingOffsets": "latest"}, "0010"),
        ({"startingOffsets": "latest"}, "0010"),
        ({"startingOffsets": '{"%s": {"0": 7}}'}, "0007"),
        ({"startingTimestamp": "2100-01-01"}, "0010"),
        ({"startingTimestamp": "1000", "group": "new3"}, "0000"),
    ],
)
def test_where_a_stream_begins(options: dict[str, str], first: str, house: House) -> None:
    house.make()
    house.door.advance(house.queue, "keeps-all", {}, create=True)
    house.fill(numbers(0, 10))
    house.door.advance(house.queue, "old", {0: 3}, create=True)
    given = {name: value.replace("%s", house.queue) for name, value in options.items()}
    with planning(house, None, **given) as planner:
        planner.reader.initialOffset()
        house.fill(numbers(10, 11))
        assert planner.batch()[0] == first


def test_bytes_limit_a_batch_about(house: House) -> None:
    house.make()
    house.fill(["x" * 10_000 for _ in range(100)], key="k")
    with planning(house, maxBytesPerTrigger="100k") as planner:
        assert 5 <= len(planner.batch()) <= 15
        assert len(planner.batch(ReadAllAvailable())) >= 50  # Trigger.Once


def test_too_few_messages_wait_for_more_or_for_the_delay(house: House) -> None:
    house.make()
    house.fill(numbers(0, 3))
    with planning(house, minOffsetsPerTrigger="5") as planner:
        assert planner.batch() == []
        house.fill(numbers(3, 5))
        assert planner.batch() == numbers(0, 5)
    with planning(house, minOffsetsPerTrigger="9", maxTriggerDelay="0") as planner:
        assert planner.batch() == numbers(0, 5)


def test_a_queue_that_appears_is_read_from_its_beginning(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    house.fill(["a"], one)
    with planning(house, subscribePattern=f"{house.queue}/.*", group="g") as planner:
        assert planner.batch() == ["a"]
        house.fill(["b"], two)
        assert planner.batch() == ["b"]
        assert planner.batch() == []
        assert house.lag("g", two) == 0


def test_a_queue_that_is_not_subscribed_to_any_more_is_left_alone(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    house.fill(["a"], one)
    house.fill(["b"], two)
    with planning(house, subscribe=f"{one},{two}", group="g") as planner:
        assert planner.batch() == ["a", "b"]
        end = planner.start
    house.fill(["c"], one)
    house.fill(["d"], two)
    with planning(house, end, subscribe=one, group="g") as planner:
        assert planner.batch() == ["c"]
        assert planner.batch() == []
    assert (house.lag("g", one), house.lag("g", two)) == (0, 2)
    with planning(house, planner.start, subscribe=f"{one},{two}", group="g") as planner:
        assert planner.batch() == ["d"]  # where it was


def test_messages_that_are_gone_are_told_or_passed_over(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house) as planner:  # without a group nobody keeps anything for it
        start = planner.start
        house.door.advance(house.queue, "other", {0: 4}, create=True)
        with pytest.raises(DataLost, match=r"kept from 4 on, and Spark has read up to 0.*option group"):
            planner.batch()
    with planning(house, start, failOnDataLoss="false") as planner:
        assert planner.batch() == numbers(4, 10)


def test_what_is_put_back_for_another_group_is_not_read_and_its_end_is_no_loss(house: House) -> None:
    house.make()
    with planning(house, group="g") as planner:
        asyncio.run(house.reject(b"bad"))
        assert planner.batch() == ["bad"]
        assert planner.batch() == []
        retried = house.api.post(f"/queues/{house.queue}/dlq/retry", json={})
        assert retried.json()["retried"] == 1
        assert house.depth() == 1
        assert planner.batch() == []
        assert house.api.post(f"/queues/{house.queue}/purge").is_success
        house.fill(["next"])
        assert planner.batch() == ["next"]


def test_a_group_that_was_deleted_is_told_if_something_is_gone(house: House) -> None:
    house.make()
    house.fill(numbers(0, 4))
    with planning(house, group="g", maxOffsetsPerTrigger="2") as planner:
        assert planner.batch() == numbers(0, 2)
        assert planner.batch() == numbers(2, 4)
        end = planner.start
    assert house.api.delete(f"/queues/{house.queue}/groups/g").is_success
    house.door.advance(house.queue, "other", {}, create=True, start="latest")
    house.fill(numbers(4, 6))
    with planning(house, end, group="g") as planner:
        assert planner.batch() == numbers(4, 6), "what is there is kept for it from now on"
    assert house.api.delete(f"/queues/{house.queue}/groups/g").is_success
    house.fill(numbers(6, 8))
    house.door.advance(house.queue, "other", house.door.offsets(house.queue).latest())
    with planning(house, end, group="g") as planner, pytest.raises(DataLost, match="Spark has read up to 4"):
        planner.batch()


def test_a_queue_that_was_made_again_is_told_or_read_anew(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house) as planner:
        planner.batch()
        end = planner.start
    assert house.api.delete(f"/queues/{house.queue}?force=true").is_success
    with planning(house, end) as planner, pytest.raises(DataLost, match="not there any more"):
        planner.batch()
    house.make()
    house.fill(numbers(50, 53))
    with planning(house, end) as planner, pytest.raises(DataLost, match="deleted and made again"):
        planner.batch()
    with planning(house, end, failOnDataLoss="false", group="g") as planner:
        assert planner.batch() == numbers(50, 53)


def make_again(house: House, values: list[str]) -> None:
    assert house.api.delete(f"/queues/{house.queue}?force=true").is_success
    house.make()
    house.fill(values)


@pytest.mark.parametrize("group", [{}, {"group": "g"}], ids=["alone", "group"])
@pytest.mark.parametrize("length", [10, 15])
def test_a_queue_that_was_made_again_and_is_as_long_is_known_for_another(
    length: int, group: dict[str, str], house: House
) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house, **group) as planner:
        assert planner.batch() == numbers(0, 10)
        end = planner.start
        make_again(house, numbers(50, 50 + length))
        with pytest.raises(DataLost, match=r"deleted and made again.*new checkpointLocation"):
            planner.batch()
    assert house.depth() == length, "nothing of the new one is settled unread"
    with planning(house, end, **group, failOnDataLoss="false", maxOffsetsPerTrigger="8") as planner:
        assert planner.batch() == numbers(50, 58)
        assert planner.batch() == numbers(58, 50 + length)
        assert planner.batch() == []
        if group:
            assert house.lag("g") == 0


def test_a_batch_that_was_planned_of_a_queue_is_not_read_of_another_of_its_name(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    with planning(house, group="g") as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    make_again(house, numbers(50, 70))
    with planning(house, start, group="g") as planner, pytest.raises(DataLost, match="made again"):
        planner.values(start, end)
    with planning(house, start, failOnDataLoss="false") as planner:
        assert planner.values(start, end) == []
        planner.start = end
        assert planner.batch() == numbers(50, 70)


def test_a_checkpoint_that_does_not_know_which_queue_it_is_of_goes_on_and_learns_it(house: House) -> None:
    house.make()
    house.fill(numbers(0, 10))
    old = {"v": 1, "queues": {house.queue: {"0": 4}}}
    with planning(house, old, group="g") as planner:
        assert planner.batch() == numbers(4, 10)
        assert planner.start["incarnations"] == {house.queue: house.door.offsets(house.queue).incarnation}
        make_again(house, numbers(50, 70))
        with pytest.raises(DataLost, match="made again"):
            planner.batch()


def test_a_queue_that_appears_is_kept_for_the_group_from_its_beginning(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    house.fill(["a"], one)
    later = {"group": "g", "startingOffsets": "latest", "maxOffsetsPerTrigger": "1"}
    with planning(house, subscribePattern=f"{house.queue}/.*", **later) as planner:
        house.fill(["b", "c"], two, key="k")
        assert planner.batch() == ["b"]
        assert house.lag("g", two) == 2
        assert planner.batch() == ["c"]


async def test_a_group_with_consumers_over_mqtt_is_refused(house: House) -> None:
    house.make()
    house.fill(["a"])
    mqtt = house.broker.mqtt
    async with aiomqtt.Client(
        mqtt.host, mqtt.port, identifier=f"live-{house.queue}", protocol=aiomqtt.ProtocolVersion.V5
    ) as client:
        await Worker(client, house.queue).join(consumer_group="busy")
        with (
            pytest.raises(
                InvalidOption, match=r"option group is 'busy'.*consumers over MQTT.*group of its own"
            ),
            planning(house, group="busy"),
        ):
            pass


def test_a_broker_that_was_killed_is_waited_for(start_broker: StartBroker) -> None:
    broker = start_broker()
    house = House(broker, "q")
    house.make()
    house.fill(numbers(0, 10))
    with planning(house, group="g", retrySeconds="60", maxOffsetsPerTrigger="5") as planner:
        assert planner.batch() == numbers(0, 5)
        port = broker.address("http").port
        broker.kill()
        risen: list[Broker] = []
        rise = threading.Timer(
            0.5, lambda: risen.append(Broker(broker.folder, "", ["--http", f"127.0.0.1:{port}"], {}))
        )
        rise.start()
        assert planner.batch() == numbers(5, 10)
        rise.join()
        assert house.lag("g") == 5
    house.close()
    risen[0].stop()

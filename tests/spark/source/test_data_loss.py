"""What becomes of a stream when messages are taken away from under it: it tells, or goes on; and what was never its own
is no loss. No Java here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import aiomqtt
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluice.spark.source import planner as planning_
from sluice.spark.source.columns import named
from sluice.spark.http.bulk_client import Door, QueueOffsets
from sluice.spark.errors import DataLost
from sluice.spark.source.source_options import ReadOptions
from tests.admin.live_broker import Worker
from tests.spark.conftest import House
from tests.spark.source.test_stream import Planner, numbers, planning

ALL = ReadAllAvailable()
FOUR = {"group": "g", "maxOffsetsPerTrigger": "4"}


def consuming(house: House, group: str, which: Callable[[int], bool], count: int) -> None:
    """A worker of a group takes so many messages and acknowledges some."""

    async def work() -> None:
        mqtt = house.broker.mqtt
        name, version = f"{group}-{house.queue}", aiomqtt.ProtocolVersion.V5
        async with aiomqtt.Client(mqtt.host, mqtt.port, identifier=name, protocol=version) as client:
            worker = Worker(client, house.queue)
            await worker.join(consumer_group=group)
            for nth in range(count):
                message = await worker.next()
                if which(nth):
                    await worker.settle("ack", message)

    asyncio.run(work())


def purge(house: House) -> None:
    assert house.api.post(f"/queues/{house.queue}/purge").is_success


def seek(house: House) -> None:
    assert house.api.post(f"/queues/{house.queue}/groups/g/seek", json={"to": "latest"}).is_success


def push_out(house: House) -> None:
    house.fill(numbers(100, 104))


def consume(house: House) -> None:
    consuming(house, "g", lambda nth: True, 4)


def consume_one(house: House) -> None:
    consuming(house, "g", lambda nth: nth == 1, 4)


def read_as_well(house: House) -> None:
    """Another query in the same group, with a checkpoint of its own."""
    with planning(house, None, **FOUR) as other:
        while other.batch():
            pass


@pytest.mark.parametrize(
    ("harm", "first", "left"),
    [
        (purge, 4, []),
        (seek, 4, []),
        (push_out, 4, [*numbers(100, 104)]),
        (consume, 4, []),
        (consume_one, 5, ["0004", "0006", "0007"]),
        (read_as_well, 4, []),
    ],
)
def test_messages_that_a_group_loses_are_told_or_passed_over(
    harm: Callable[[House], None], first: int, left: list[str], house: House
) -> None:
    house.make(limits={"max_queue_depth": 4, "overflow": "drop-oldest"})
    with planning(house, None, **FOUR) as planner:
        house.fill(numbers(0, 4))
        assert planner.batch() == numbers(0, 4)
        planner.reader.commit(planner.start)
        start = planner.start
        house.fill(numbers(4, 8))
        end = planner._through_json(planner.reader.latestOffset(start, planner.reader.getDefaultReadLimit()))
    harm(house)
    house.fill([])
    told = rf"has lost {first} before .*'g'.*group of its own.*failOnDataLoss=false"
    with planning(house, start, **FOUR) as planner:
        with pytest.raises(DataLost, match=told):
            planner.reader.latestOffset(start, planner.reader.getDefaultReadLimit())
        with pytest.raises(DataLost, match=told):  # of a batch that was written down before
            planner.values(start, end)
    with planning(house, start, group="g", failOnDataLoss="false") as planner:
        assert planner.batch() == left
        house.fill(["more"])
        assert planner.batch()[-1:] == ["more"]
        last = planner.start
    with planning(house, last, **FOUR) as planner:
        house.fill(["again"])
        assert planner.batch() == ["again"], "it is told once"


FIRST = [  # ways to begin behind four messages, or before them, and the first message that is read
    ({"group": "g"}, 4),
    ({"group": "g", "startingOffsets": "earliest"}, 4),
    ({"group": "g", "startingOffsets": "latest"}, 8),
    ({"group": "g", "startingOffsets": '{"%s": {"0": -1}}'}, 8),
    ({"group": "g", "startingTimestamp": "1000"}, 4),
    ({"group": "g", "startingTimestamp": "2100-01-01"}, 8),
    ({"startingOffsets": "earliest"}, 4),
    ({"startingOffsets": "latest"}, 8),
]


def behind_four(house: House, options: dict[str, str]) -> dict[str, str]:
    """A queue of eight messages of which the first four are gone; the options, for this queue."""
    house.make()
    house.door.advance(house.queue, "keeps", {}, create=True)
    house.fill(numbers(0, 8))
    house.door.advance(house.queue, "keeps", {0: 4})
    return {name: value.replace("%s", house.queue) for name, value in options.items()}


@pytest.mark.parametrize(("options", "first"), FIRST)
def test_a_first_batch_that_was_not_finished_has_the_same_rows_after_a_restart(
    options: dict[str, str], first: int, house: House
) -> None:
    """Spark asks anew where the stream begins, for it has written down no beginning."""
    given = behind_four(house, options)
    with planning(house, None, **given) as planner:
        house.fill(numbers(8, 12))
        assert planner.batch() == numbers(first, 12)
        end = planner.start
    for more in ([], ["0012", "0013"]):
        house.fill(more)
        with planning(house, None, **given) as planner:
            assert planner.values(planner.start, end) == numbers(first, 12)
    with planning(house, None, **given) as planner:
        planner.start = end
        assert planner.batch() == numbers(12, 14)
        assert planner.batch() == []
        assert json.dumps(planner.start) == json.dumps(planner.reader.latestOffset(planner.start, ALL))
    if "group" in given:
        assert house.lag("g") == 0


@pytest.mark.parametrize(("options", "first"), FIRST)
def test_a_first_batch_that_was_not_finished_tells_what_it_lost(
    options: dict[str, str], first: int, house: House
) -> None:
    given = behind_four(house, options)
    with planning(house, None, **given) as planner:
        house.fill(numbers(8, 12))
        end = planner._through_json(planner.reader.latestOffset(planner.start, ALL))
    purge(house)
    house.fill(["new"])
    told = f"has lost {first} before" if "group" in given else f"{first} is before that"
    with pytest.raises(DataLost, match=told), planning(house, None, **given) as planner:
        planner.values(planner.start, end)
    with planning(house, None, **given, failOnDataLoss="false") as planner:
        assert planner.values(planner.start, end) == []
        planner.start = end
        assert planner.batch() == ["new"]


def test_a_first_batch_without_its_beginning_is_told_and_never_read_from_before_it(house: House) -> None:
    """As an older Sluice has written it down."""
    house.make()
    house.door.advance(house.queue, "keeps", {}, create=True)
    house.fill(numbers(0, 4))
    end = {name: part for name, part in offset_of(house).items() if name != "began"}
    house.fill(numbers(4, 8))
    latest = {"group": "g", "startingOffsets": "latest"}
    with (
        planning(house, None, **latest) as planner,
        pytest.raises(DataLost, match=r"from 8 on .* up to 4.*new checkpointLocation"),
    ):
        planner.values(planner.start, end)
    with planning(house, None, **latest, failOnDataLoss="false") as planner:
        assert planner.values(planner.start, end) == []


def offset_of(house: House) -> dict[str, Any]:
    """Where a stream has got to that has read everything."""
    with planning(house, None) as planner:
        planner.batch()
        return planner.start


def lose_what_is_planned(house: House, queue: str, planner: Planner) -> None:
    """A batch is planned and written down, and what is in it purged: a task tells, and so does the next plan."""
    end = planner._through_json(planner.reader.latestOffset(planner.start, ALL))
    assert sorted(planner.values(planner.start, end)) == ["a", "b"]
    assert house.api.post(f"/queues/{quote(queue, safe='')}/purge").is_success
    with pytest.raises(DataLost, match="has lost 0 before group 'g'"):
        planner.values(planner.start, end)
    with pytest.raises(DataLost, match="has lost 0 before Spark has read it in group 'g'"):
        planner.reader.latestOffset(planner.start, ALL)


def test_a_partition_that_is_added_is_watched_before_its_first_batch(house: House) -> None:
    house.make(f"{house.queue}/like", partitions=2)
    key = next(key for key in numbers(0, 99) if goes_to_the_second(house, f"{house.queue}/like", key))
    house.make()
    house.fill(["first"])
    with planning(house, None, group="g") as planner:
        assert planner.batch() == ["first"]
        assert planner.batch() == []
        assert house.api.put(f"/queues/{house.queue}/config", json={"partitions": 2}).is_success
        house.fill(["a", "b"], key=key)
        lose_what_is_planned(house, house.queue, planner)
        start = planner.start
    with planning(house, start, group="g") as planner, pytest.raises(DataLost, match="has lost 0 before"):
        planner.batch()
    with planning(house, start, group="g", failOnDataLoss="false") as planner:
        house.fill(["next"], key=key)
        assert planner.batch() == ["next"]
        assert planner.batch() == []


def goes_to_the_second(house: House, queue: str, key: str) -> bool:
    house.fill([key], queue)
    return house.door.offsets(queue).latest()[1] > 0


def test_a_queue_that_appears_is_watched_before_its_first_batch(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    house.fill(["first"], one)
    wanted = {"subscribePattern": f"{house.queue}/.*", "group": "g"}
    with planning(house, None, **wanted) as planner:
        assert planner.batch() == ["first"]
        house.make(two)
        house.fill(["a", "b"], two)
        lose_what_is_planned(house, two, planner)
        start = planner.start
    with planning(house, start, **wanted) as planner, pytest.raises(DataLost, match="has lost 0 before"):
        planner.batch()
    with planning(house, start, **wanted, failOnDataLoss="false") as planner:
        house.fill(["next"], two)
        assert planner.batch() == ["next"]
        assert planner.batch() == []


def test_what_went_from_a_queue_before_it_appeared_to_spark_is_no_loss(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    house.fill(["first"], one)
    with planning(house, None, subscribePattern=f"{house.queue}/.*", group="g") as planner:
        assert planner.batch() == ["first"]
        house.make(two)
        house.fill(["a", "b", "c"], two)
        house.door.advance(two, "w", {0: 2}, create=True)
        assert planner.batch() == ["c"]
        assert planner.batch() == []
        assert house.lag("g", two) == 0


def test_a_batch_read_that_begins_where_its_group_stands_tells_what_was_taken_away_before_that(
    house: House,
) -> None:
    house.make()
    house.door.advance(house.queue, "g", {}, create=True)
    house.fill(numbers(0, 8))
    house.door.advance(house.queue, "g", {0: 4})
    purge(house)
    house.fill(numbers(8, 10))
    seen = house.door.offsets(house.queue)
    assert house.door.progress(house.queue, "g") == {0: 8}
    told = r"has lost 4 before .*'g'.*startingOffsets earliest, or failOnDataLoss=false"
    with pytest.raises(DataLost, match=told):
        house.values(group="g", startingOffsets="group")
    with pytest.raises(DataLost, match=told):
        planning_.floors_of(house.door, house.queue, "g", seen)
    assert planning_.floors_of(house.door, house.queue, "g", seen, may_lose=True) == {0: 8}
    for cured in ({"startingOffsets": "earliest"}, {"startingOffsets": "group", "failOnDataLoss": "false"}):
        assert house.values(group="g", **cured) == numbers(8, 10)


def test_gaps_from_before_a_group_are_no_loss(house: House) -> None:
    house.make()
    house.door.advance(house.queue, "w", {}, create=True)
    house.fill(numbers(0, 6))
    consuming(house, "w", lambda nth: nth in (0, 2, 3), 6)
    for options in ({}, {"startingOffsets": "earliest"}, {"startingTimestamp": "1000"}):
        with planning(house, None, group="g", **options) as planner:
            assert planner.batch() == ["0001", "0004", "0005"]
            assert planner.batch() == []


def test_a_stream_that_begins_again_is_kept_what_it_reads_for_the_second_time(house: House) -> None:
    house.make()
    house.door.advance(house.queue, "keeps", {}, create=True)
    house.fill(numbers(0, 8))
    with planning(house, None, group="g") as planner:
        assert planner.batch() == numbers(0, 8)
        assert planner.batch() == []
    with planning(house, None, **FOUR, startingOffsets="earliest") as planner:
        assert house.lag("g") == 0, "where it begins is only asked: a restart in a first batch asks as well"
        assert planner.batch() == numbers(0, 4)
        assert house.lag("g") == 8
        house.door.advance(house.queue, "keeps", {0: 8})
        assert planner.batch() == numbers(4, 8)
        assert planner.batch() == []
        assert house.lag("g") == 0


def test_a_beginning_that_is_not_kept_is_told_with_a_group_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    house.fill(numbers(0, 4))
    looking = planning_.look

    def look(door: Door, options: ReadOptions) -> dict[str, QueueOffsets]:
        """Somebody else is done with two of them just before the group is there."""
        found = looking(door, options)
        house.door.advance(house.queue, "w", {0: 2}, create=True)
        return found

    monkeypatch.setattr(planning_, "look", look)
    given = {"group": "g", "startingOffsets": json.dumps({house.queue: {"0": 1}})}
    with pytest.raises(DataLost, match="kept from 2 on"), planning(house, None, **given) as planner:
        planner.batch()
    with planning(house, None, **given, failOnDataLoss="false") as planner:
        assert planner.batch() == numbers(2, 4)


def test_the_life_of_one_stream_has_no_losses_however_often_it_is_interrupted(house: House) -> None:
    house.make(partitions=2)

    def lives(start: dict[str, Any]) -> Iterator[Planner]:
        for _ in range(2):
            with planning(house, start, **FOUR) as planner:
                yield planner

    with planning(house, None, **FOUR) as planner:
        start = planner.start
    found: list[str] = []
    for turn in range(4):
        asyncio.run(house.reject(b"letter-%d" % turn))
        house.fill([f"{turn}-{nth}" for nth in range(3)])
        retried = house.api.post(f"/queues/{house.queue}/dlq/retry", json={})
        assert retried.json()["retried"] == 1
        rows: list[list[str]] = []
        end: dict[str, Any] = {}
        for planner in lives(start):
            rows.append(planner.values(start, end) if end else planner.batch())
            end = end or planner.start
        assert rows[0] == rows[1]
        for planner in lives(end):
            planner.reader.commit(end)
            planner.reader.commit(end)
        found += rows[0]
        start = end
        if turn % 2:
            consuming(house, "w", lambda nth: True, 2)
    with planning(house, start, **FOUR) as planner:
        while rest := planner.batch():
            found += rest
    fresh = [f"{turn}-{nth}" for turn in range(4) for nth in range(3)]
    assert sorted(found) == sorted([*fresh, *(f"letter-{turn}" for turn in range(4))])


# ---- compacted queues


def test_what_was_replaced_in_a_compacted_queue_is_no_loss(house: House) -> None:
    house.make(type="compacted")
    house.fill(["first"], key="a")
    for options in ({}, {"group": "g"}):
        with planning(house, None, maxOffsetsPerTrigger="1", **options) as planner:
            house.fill(["second", "third"], key="a")
            found = [planner.batch() for _ in range(3)]
            assert [value for values in found for value in values] == ["third"]
    reader = house.source(startingOffsets=json.dumps({house.queue: {"0": 0}})).reader(named(["value"]))
    parts = reader.partitions()
    house.fill(["fourth"], key="a")
    values = [value for part in parts for batch in reader.read(part) for value in batch["value"].to_pylist()]
    assert values == [], "the younger one is behind what was planned"


# ---- queues and groups that go


@pytest.mark.parametrize("group", [{}, {"group": "g"}], ids=["alone", "group"])
def test_a_batch_of_a_queue_that_was_deleted_is_told_or_left_out(group: dict[str, str], house: House) -> None:
    house.make()
    house.fill(numbers(0, 4))
    with planning(house, None, **group) as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    assert house.api.delete(f"/queues/{house.queue}?force=true").is_success
    with planning(house, start, **group) as planner, pytest.raises(DataLost, match=r"new checkpointLocation"):
        planner.values(start, end)
    with planning(house, start, **group, failOnDataLoss="false") as planner:
        assert planner.values(start, end) == []


def test_a_group_that_is_deleted_in_the_middle_of_a_batch_comes_back_with_the_restart(house: House) -> None:
    house.make()
    house.fill(numbers(0, 4))
    with planning(house, None, **FOUR) as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    assert house.api.delete(f"/queues/{house.queue}/groups/g").is_success
    with planning(house, start, **FOUR) as planner:
        assert planner.values(start, end) == numbers(0, 4)
    assert house.lag("g") == 4


def test_a_purge_between_two_runs_is_told_as_such(house: House) -> None:
    house.make(partitions=3)
    house.fill(numbers(0, 30))
    with planning(house, None) as planner:
        start = planner.start
    purge(house)
    with planning(house, start, failOnDataLoss="false") as planner:
        planner.reader.prepareForTriggerAvailableNow()
        assert planner.batch() == []
        assert planner.start != start

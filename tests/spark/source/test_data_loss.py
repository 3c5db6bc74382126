"""Streams whose messages are removed report it or go on; messages of other groups are no loss. No
Java.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import aiomqtt
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluice.spark.errors import DataLost
from sluice.spark.http.bulk_client import BulkClient, QueueOffsets
from sluice.spark.source import planner as planner_module
from sluice.spark.source.columns import schema_of
from sluice.spark.source.source_options import ReadOptions
from tests.admin.live_broker import Worker
from tests.spark.conftest import SparkHarness
from tests.spark.source.test_stream import Planner, numbers, planning

ALL = ReadAllAvailable()
FOUR = {"group": "g", "maxOffsetsPerTrigger": "4"}


def consume_some(
    harness: SparkHarness, group: str, which: Callable[[int], bool], count: int
) -> None:
    """Let a worker of a group take so many messages and acknowledge some."""

    async def work() -> None:
        mqtt = harness.broker.mqtt
        name, version = f"{group}-{harness.queue}", aiomqtt.ProtocolVersion.V5
        async with aiomqtt.Client(
            mqtt.host, mqtt.port, identifier=name, protocol=version
        ) as client:
            worker = Worker(client, harness.queue)
            await worker.join(consumer_group=group)
            for nth in range(count):
                message = await worker.next()
                if which(nth):
                    await worker.settle("ack", message)

    asyncio.run(work())


def purge(harness: SparkHarness) -> None:
    assert harness.api.post(f"/queues/{harness.queue}/purge").is_success


def seek(harness: SparkHarness) -> None:
    assert harness.api.post(
        f"/queues/{harness.queue}/groups/g/seek", json={"to": "latest"}
    ).is_success


def evict(harness: SparkHarness) -> None:
    harness.fill(numbers(100, 104))


def consume(harness: SparkHarness) -> None:
    consume_some(harness, "g", lambda nth: True, 4)


def consume_one(harness: SparkHarness) -> None:
    consume_some(harness, "g", lambda nth: nth == 1, 4)


def read_in_same_group(harness: SparkHarness) -> None:
    """Another query in the same group, with its own checkpoint."""
    with planning(harness, None, **FOUR) as other:
        while other.batch():
            pass


@pytest.mark.parametrize(
    ("harm", "first", "left"),
    [
        (purge, 4, []),
        (seek, 4, []),
        (evict, 4, [*numbers(100, 104)]),
        (consume, 4, []),
        (consume_one, 5, ["0004", "0006", "0007"]),
        (read_in_same_group, 4, []),
    ],
)
def test_messages_lost_by_a_group_fail_the_stream_or_are_skipped(
    harm: Callable[[SparkHarness], None], first: int, left: list[str], harness: SparkHarness
) -> None:
    harness.make(limits={"max_queue_depth": 4, "overflow": "drop-oldest"})
    with planning(harness, None, **FOUR) as planner:
        harness.fill(numbers(0, 4))
        assert planner.batch() == numbers(0, 4)
        planner.reader.commit(planner.start)
        start = planner.start
        harness.fill(numbers(4, 8))
        end = planner._through_json(
            planner.reader.latestOffset(start, planner.reader.getDefaultReadLimit())
        )
    harm(harness)
    harness.fill([])
    reported = rf"has lost {first} before .*'g'.*group of its own.*failOnDataLoss=false"
    with planning(harness, start, **FOUR) as planner:
        with pytest.raises(DataLost, match=reported):
            planner.reader.latestOffset(start, planner.reader.getDefaultReadLimit())
        with pytest.raises(DataLost, match=reported):  # of a batch that was planned before
            planner.values(start, end)
    with planning(harness, start, group="g", failOnDataLoss="false") as planner:
        assert planner.batch() == left
        harness.fill(["more"])
        assert planner.batch()[-1:] == ["more"]
        last = planner.start
    with planning(harness, last, **FOUR) as planner:
        harness.fill(["again"])
        assert planner.batch() == ["again"], "a loss is reported once"


FIRST = [  # ways to begin after four messages, or before them, and the first message read
    ({"group": "g"}, 4),
    ({"group": "g", "startingOffsets": "earliest"}, 4),
    ({"group": "g", "startingOffsets": "latest"}, 8),
    ({"group": "g", "startingOffsets": '{"%s": {"0": -1}}'}, 8),
    ({"group": "g", "startingTimestamp": "1000"}, 4),
    ({"group": "g", "startingTimestamp": "2100-01-01"}, 8),
    ({"startingOffsets": "earliest"}, 4),
    ({"startingOffsets": "latest"}, 8),
]


def after_four(harness: SparkHarness, options: dict[str, str]) -> dict[str, str]:
    """Create a queue of eight messages of which the first four are gone; return the options for
    it.
    """
    harness.make()
    harness.bulk_client.advance(harness.queue, "keeps", {}, create=True)
    harness.fill(numbers(0, 8))
    harness.bulk_client.advance(harness.queue, "keeps", {0: 4})
    return {name: value.replace("%s", harness.queue) for name, value in options.items()}


@pytest.mark.parametrize(("options", "first"), FIRST)
def test_unfinished_first_batch_has_the_same_rows_after_a_restart(
    options: dict[str, str], first: int, harness: SparkHarness
) -> None:
    """Spark asks again where the stream begins, because its checkpoint has no start."""
    given = after_four(harness, options)
    with planning(harness, None, **given) as planner:
        harness.fill(numbers(8, 12))
        assert planner.batch() == numbers(first, 12)
        end = planner.start
    for more in ([], ["0012", "0013"]):
        harness.fill(more)
        with planning(harness, None, **given) as planner:
            assert planner.values(planner.start, end) == numbers(first, 12)
    with planning(harness, None, **given) as planner:
        planner.start = end
        assert planner.batch() == numbers(12, 14)
        assert planner.batch() == []
        assert json.dumps(planner.start) == json.dumps(
            planner.reader.latestOffset(planner.start, ALL)
        )
    if "group" in given:
        assert harness.lag("g") == 0


@pytest.mark.parametrize(("options", "first"), FIRST)
def test_unfinished_first_batch_reports_what_it_lost(
    options: dict[str, str], first: int, harness: SparkHarness
) -> None:
    given = after_four(harness, options)
    with planning(harness, None, **given) as planner:
        harness.fill(numbers(8, 12))
        end = planner._through_json(planner.reader.latestOffset(planner.start, ALL))
    purge(harness)
    harness.fill(["new"])
    reported = f"has lost {first} before" if "group" in given else f"{first} is before that"
    with pytest.raises(DataLost, match=reported), planning(harness, None, **given) as planner:
        planner.values(planner.start, end)
    with planning(harness, None, **given, failOnDataLoss="false") as planner:
        assert planner.values(planner.start, end) == []
        planner.start = end
        assert planner.batch() == ["new"]


def test_first_batch_without_its_start_fails_and_is_never_read_from_before_it(
    harness: SparkHarness,
) -> None:
    """Return an offset as an older Sluice wrote it."""
    harness.make()
    harness.bulk_client.advance(harness.queue, "keeps", {}, create=True)
    harness.fill(numbers(0, 4))
    end = {name: part for name, part in offset_of(harness).items() if name != "began"}
    harness.fill(numbers(4, 8))
    latest = {"group": "g", "startingOffsets": "latest"}
    with (
        planning(harness, None, **latest) as planner,
        pytest.raises(DataLost, match=r"from 8 on .* up to 4.*new checkpointLocation"),
    ):
        planner.values(planner.start, end)
    with planning(harness, None, **latest, failOnDataLoss="false") as planner:
        assert planner.values(planner.start, end) == []


def offset_of(harness: SparkHarness) -> dict[str, Any]:
    """Return the offset of a stream that has read everything."""
    with planning(harness, None) as planner:
        planner.batch()
        return planner.start


def delete_planned_messages(harness: SparkHarness, queue: str, planner: Planner) -> None:
    """A batch is planned, and its messages are purged: a task reports it, and so does the next
    plan.
    """
    end = planner._through_json(planner.reader.latestOffset(planner.start, ALL))
    assert sorted(planner.values(planner.start, end)) == ["a", "b"]
    assert harness.api.post(f"/queues/{quote(queue, safe='')}/purge").is_success
    with pytest.raises(DataLost, match="has lost 0 before group 'g'"):
        planner.values(planner.start, end)
    with pytest.raises(DataLost, match="has lost 0 before Spark has read it in group 'g'"):
        planner.reader.latestOffset(planner.start, ALL)


def test_added_partition_is_tracked_before_its_first_batch(harness: SparkHarness) -> None:
    harness.make(f"{harness.queue}/like", partitions=2)
    key = next(
        key
        for key in numbers(0, 99)
        if is_in_second_partition(harness, f"{harness.queue}/like", key)
    )
    harness.make()
    harness.fill(["first"])
    with planning(harness, None, group="g") as planner:
        assert planner.batch() == ["first"]
        assert planner.batch() == []
        assert harness.api.put(f"/queues/{harness.queue}/config", json={"partitions": 2}).is_success
        harness.fill(["a", "b"], key=key)
        delete_planned_messages(harness, harness.queue, planner)
        start = planner.start
    with (
        planning(harness, start, group="g") as planner,
        pytest.raises(DataLost, match="has lost 0 before"),
    ):
        planner.batch()
    with planning(harness, start, group="g", failOnDataLoss="false") as planner:
        harness.fill(["next"], key=key)
        assert planner.batch() == ["next"]
        assert planner.batch() == []


def is_in_second_partition(harness: SparkHarness, queue: str, key: str) -> bool:
    harness.fill([key], queue)
    return harness.bulk_client.offsets(queue).latest()[1] > 0


def test_new_queue_is_tracked_before_its_first_batch(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    harness.fill(["first"], one)
    wanted = {"subscribePattern": f"{harness.queue}/.*", "group": "g"}
    with planning(harness, None, **wanted) as planner:
        assert planner.batch() == ["first"]
        harness.make(two)
        harness.fill(["a", "b"], two)
        delete_planned_messages(harness, two, planner)
        start = planner.start
    with (
        planning(harness, start, **wanted) as planner,
        pytest.raises(DataLost, match="has lost 0 before"),
    ):
        planner.batch()
    with planning(harness, start, **wanted, failOnDataLoss="false") as planner:
        harness.fill(["next"], two)
        assert planner.batch() == ["next"]
        assert planner.batch() == []


def test_messages_deleted_before_spark_saw_the_queue_are_no_loss(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    harness.fill(["first"], one)
    with planning(harness, None, subscribePattern=f"{harness.queue}/.*", group="g") as planner:
        assert planner.batch() == ["first"]
        harness.make(two)
        harness.fill(["a", "b", "c"], two)
        harness.bulk_client.advance(two, "w", {0: 2}, create=True)
        assert planner.batch() == ["c"]
        assert planner.batch() == []
        assert harness.lag("g", two) == 0


def test_batch_read_from_a_group_position_reports_earlier_deletions(
    harness: SparkHarness,
) -> None:
    harness.make()
    harness.bulk_client.advance(harness.queue, "g", {}, create=True)
    harness.fill(numbers(0, 8))
    harness.bulk_client.advance(harness.queue, "g", {0: 4})
    purge(harness)
    harness.fill(numbers(8, 10))
    seen = harness.bulk_client.offsets(harness.queue)
    assert harness.bulk_client.progress(harness.queue, "g") == {0: 8}
    reported = r"has lost 4 before .*'g'.*startingOffsets earliest, or failOnDataLoss=false"
    with pytest.raises(DataLost, match=reported):
        harness.values(group="g", startingOffsets="group")
    with pytest.raises(DataLost, match=reported):
        planner_module.group_low_watermarks(harness.bulk_client, harness.queue, "g", seen)
    assert planner_module.group_low_watermarks(
        harness.bulk_client, harness.queue, "g", seen, allow_loss=True
    ) == {0: 8}
    for cured in (
        {"startingOffsets": "earliest"},
        {"startingOffsets": "group", "failOnDataLoss": "false"},
    ):
        assert harness.values(group="g", **cured) == numbers(8, 10)


def test_gaps_from_before_a_group_are_no_loss(harness: SparkHarness) -> None:
    harness.make()
    harness.bulk_client.advance(harness.queue, "w", {}, create=True)
    harness.fill(numbers(0, 6))
    consume_some(harness, "w", lambda nth: nth in (0, 2, 3), 6)
    for options in ({}, {"startingOffsets": "earliest"}, {"startingTimestamp": "1000"}):
        with planning(harness, None, group="g", **options) as planner:
            assert planner.batch() == ["0001", "0004", "0005"]
            assert planner.batch() == []


def test_restarted_stream_retains_what_it_reads_again(harness: SparkHarness) -> None:
    harness.make()
    harness.bulk_client.advance(harness.queue, "keeps", {}, create=True)
    harness.fill(numbers(0, 8))
    with planning(harness, None, group="g") as planner:
        assert planner.batch() == numbers(0, 8)
        assert planner.batch() == []
    with planning(harness, None, **FOUR, startingOffsets="earliest") as planner:
        assert harness.lag("g") == 0, (
            "where it begins is only asked: a restart in a first batch asks as well"
        )
        assert planner.batch() == numbers(0, 4)
        assert harness.lag("g") == 8
        harness.bulk_client.advance(harness.queue, "keeps", {0: 8})
        assert planner.batch() == numbers(4, 8)
        assert planner.batch() == []
        assert harness.lag("g") == 0


def test_deleted_start_is_reported_with_a_group_too(
    harness: SparkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    harness.fill(numbers(0, 4))
    real_find_offsets = planner_module.find_offsets

    def look(client: BulkClient, options: ReadOptions) -> dict[str, QueueOffsets]:
        """Another client settles two of them just before the group exists."""
        found = real_find_offsets(client, options)
        harness.bulk_client.advance(harness.queue, "w", {0: 2}, create=True)
        return found

    monkeypatch.setattr(planner_module, "find_offsets", look)
    given = {"group": "g", "startingOffsets": json.dumps({harness.queue: {"0": 1}})}
    with (
        pytest.raises(DataLost, match="kept from 2 on"),
        planning(harness, None, **given) as planner,
    ):
        planner.batch()
    with planning(harness, None, **given, failOnDataLoss="false") as planner:
        assert planner.batch() == numbers(2, 4)


def test_stream_has_no_losses_however_often_it_is_interrupted(harness: SparkHarness) -> None:
    harness.make(partitions=2)

    def restarts(start: dict[str, Any]) -> Iterator[Planner]:
        for _ in range(2):
            with planning(harness, start, **FOUR) as planner:
                yield planner

    with planning(harness, None, **FOUR) as planner:
        start = planner.start
    found: list[str] = []
    for turn in range(4):
        asyncio.run(harness.reject(b"dead-%d" % turn))
        harness.fill([f"{turn}-{nth}" for nth in range(3)])
        retried = harness.api.post(f"/queues/{harness.queue}/dlq/retry", json={})
        assert retried.json()["retried"] == 1
        rows: list[list[str]] = []
        end: dict[str, Any] = {}
        for planner in restarts(start):
            rows.append(planner.values(start, end) if end else planner.batch())
            end = end or planner.start
        assert rows[0] == rows[1]
        for planner in restarts(end):
            planner.reader.commit(end)
            planner.reader.commit(end)
        found += rows[0]
        start = end
        if turn % 2:
            consume_some(harness, "w", lambda nth: True, 2)
    with planning(harness, start, **FOUR) as planner:
        while rest := planner.batch():
            found += rest
    fresh = [f"{turn}-{nth}" for turn in range(4) for nth in range(3)]
    assert sorted(found) == sorted([*fresh, *(f"dead-{turn}" for turn in range(4))])


# ---- compacted queues


def test_replaced_values_of_a_compacted_queue_are_no_loss(harness: SparkHarness) -> None:
    harness.make(type="compacted")
    harness.fill(["first"], key="a")
    for options in ({}, {"group": "g"}):
        with planning(harness, None, maxOffsetsPerTrigger="1", **options) as planner:
            harness.fill(["second", "third"], key="a")
            found = [planner.batch() for _ in range(3)]
            assert [value for values in found for value in values] == ["third"]
    reader = harness.source(startingOffsets=json.dumps({harness.queue: {"0": 0}})).reader(
        schema_of(["value"])
    )
    parts = reader.partitions()
    harness.fill(["fourth"], key="a")
    values = [
        value
        for part in parts
        for batch in reader.read(part)
        for value in batch["value"].to_pylist()
    ]
    assert values == [], "the younger one is behind what was planned"


# ---- queues and groups that are deleted


@pytest.mark.parametrize("group", [{}, {"group": "g"}], ids=["alone", "group"])
def test_batch_of_a_deleted_queue_fails_or_is_left_out(
    group: dict[str, str], harness: SparkHarness
) -> None:
    harness.make()
    harness.fill(numbers(0, 4))
    with planning(harness, None, **group) as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success
    with (
        planning(harness, start, **group) as planner,
        pytest.raises(DataLost, match=r"new checkpointLocation"),
    ):
        planner.values(start, end)
    with planning(harness, start, **group, failOnDataLoss="false") as planner:
        assert planner.values(start, end) == []


def test_group_deleted_during_a_batch_returns_with_the_restart(harness: SparkHarness) -> None:
    harness.make()
    harness.fill(numbers(0, 4))
    with planning(harness, None, **FOUR) as planner:
        start = planner.start
        planner.batch()
        end = planner.start
    assert harness.api.delete(f"/queues/{harness.queue}/groups/g").is_success
    with planning(harness, start, **FOUR) as planner:
        assert planner.values(start, end) == numbers(0, 4)
    assert harness.lag("g") == 4


def test_purge_between_two_runs_is_reported_as_such(harness: SparkHarness) -> None:
    harness.make(partitions=3)
    harness.fill(numbers(0, 30))
    with planning(harness, None) as planner:
        start = planner.start
    purge(harness)
    with planning(harness, start, failOnDataLoss="false") as planner:
        planner.reader.prepareForTriggerAvailableNow()
        assert planner.batch() == []
        assert planner.start != start

"""Progress of a group that reads in bulk: it settles, and what every group has settled is let go."""

from __future__ import annotations

import pyarrow as pa

from tests.admin.live_broker import Worker
from tests.bulk.conftest import BulkHouse


def progress(house: BulkHouse, group: str = "spark") -> str:
    return f"/bulk/queues/{house.queue}/groups/{group}/progress"


def numbers(count: int) -> pa.Table:
    return pa.table(
        {"value": [b"%d" % nth for nth in range(count)], "key": [b"%d" % nth for nth in range(count)]}
    )


async def test_a_group_is_made_at_the_earliest_and_holds_back_what_it_has_not_settled(
    house: BulkHouse,
) -> None:
    await house.make()
    await house.fill(numbers(100))
    made = await house.ok("PUT", progress(house), json={"partitions": {}, "create": True})
    assert made == {"partitions": {"0": 0}}
    assert await house.ok("GET", progress(house)) == made
    [group] = await house.ok("GET", f"/queues/{house.queue}/groups")
    assert (group["name"], group["lag"]) == ("spark", 100)
    moved = await house.ok("PUT", progress(house), json={"partitions": {"0": 60}})
    assert moved == {"partitions": {"0": 60}}
    [group] = await house.ok("GET", f"/queues/{house.queue}/groups")
    assert (group["lag"], group["ledger"]["acked"]) == (40, 60)
    [offsets] = await house.offsets()
    assert (offsets["earliest"], offsets["latest"]) == (60, 100)
    assert (await house.ok("GET", f"/queues/{house.queue}/stats"))["depth"] == 40
    assert await house.ok("GET", "/verify") == []


async def test_progress_never_goes_backwards(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    await house.ok("PUT", progress(house), json={"partitions": {"0": 7}, "create": True})
    told = await house.ok("PUT", progress(house), json={"partitions": {"0": 3}})
    assert told == {"partitions": {"0": 7}, "lost": {"0": 3}}, (
        "whoever comes with 3 finds nothing to read there"
    )
    assert await house.ok("GET", progress(house)) == {"partitions": {"0": 7}}


async def test_what_a_group_has_lost_is_told_and_its_rows_are_refused(own_house: BulkHouse) -> None:
    house = own_house
    await house.make()
    await house.fill(numbers(8))
    await house.ok("PUT", progress(house), json={"partitions": {"0": 2}, "create": True})
    assert (await house.rows(start=2, end=8, group="spark")).num_rows == 6
    assert (await house.api.post(f"/queues/{house.queue}/purge")).is_success
    await house.fill(numbers(2), batch=1)
    house = restarted(house)
    assert await house.ok("GET", progress(house)) == {"partitions": {"0": 8}, "lost": {"0": 2}}
    told = await house.ok("PUT", progress(house), json={"partitions": {"0": 2}})
    assert told == {"partitions": {"0": 8}, "lost": {"0": 2}}
    path = f"/bulk/queues/{house.queue}/partitions/0/rows?group=spark&end=10"
    refusal = await house.no(410, "out_of_range", "GET", f"{path}&start=2")
    assert "has lost 2 before group 'spark' was done with it" in refusal["message"]
    assert (await house.rows(start=2, end=10, group="spark", lenient="true")).num_rows == 2
    assert (await house.rows(start=8, end=10, group="spark")).num_rows == 2
    assert await house.ok("PUT", progress(house), json={"partitions": {"0": 8}}) == {"partitions": {"0": 8}}
    await stopped(house)


async def test_a_reader_that_begins_gets_what_is_kept_and_the_group_goes_back_to_it(house: BulkHouse) -> None:
    await house.make()
    await house.ok("PUT", progress(house, "others"), json={"partitions": {}, "create": True})
    await house.fill(numbers(8))
    await house.ok("PUT", progress(house), json={"partitions": {"0": 8}, "create": True})
    begin = {"partitions": {"0": 3}, "begin": True}
    assert await house.ok("PUT", progress(house), json=begin) == {"partitions": {"0": 3}}
    await house.ok("PUT", progress(house, "others"), json={"partitions": {"0": 8}})
    assert (await house.rows(start=3, end=8, group="spark")).num_rows == 5, "it is kept for the group again"
    assert await house.ok("GET", "/verify") == []


async def test_a_compacted_queue_has_lost_nothing_by_what_was_replaced(house: BulkHouse) -> None:
    await house.make(type="compacted")
    await house.ok("PUT", progress(house), json={"partitions": {}, "create": True})
    await house.fill(pa.table({"value": [b"0", b"1", b"2"], "key": [b"a", b"b", b"a"]}))
    assert (await house.ok("GET", f"/bulk/queues/{house.queue}/offsets"))["compacted"] is True
    for group in ("", "spark"):
        values = (await house.rows(start=0, end=3, group=group))["value"].to_pylist()
        assert values == [b"1", b"2"]
    for group in ("spark", "late"):
        told = await house.ok("PUT", progress(house, group), json={"partitions": {"0": 0}, "create": True})
        assert told == {"partitions": {"0": 1}}


async def test_lag_follows_in_the_metrics(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    await house.ok("PUT", progress(house), json={"partitions": {"0": 7}, "create": True})
    page = (await house.api.get(f"{house.root}/metrics")).text
    lines = [
        line for line in page.splitlines() if line.startswith("mqtt_queue_lag") and f'"{house.queue}"' in line
    ]
    assert [line.rsplit(" ", 1)[1] for line in lines] in (["3.0"], ["3"])


async def test_a_group_can_begin_at_the_end(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    body = {"partitions": {}, "create": True, "start": "latest"}
    assert await house.ok("PUT", progress(house), json=body) == {"partitions": {"0": 10}}


async def test_a_group_with_consumers_over_mqtt_is_left_alone(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    async with house.client(f"live-{house.queue}") as client:
        await Worker(client, house.queue).join(consumer_group="spark")
        told = await house.no(409, "in_use", "PUT", progress(house), json={"partitions": {"0": 5}})
        assert "group of its own" in told["do"]


async def test_refusals_of_progress(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    await house.no(404, "unknown_group", "PUT", progress(house), json={"partitions": {"0": 5}})
    create = {"partitions": {"0": 11}, "create": True}
    await house.no(410, "out_of_range", "PUT", progress(house), json=create)
    await house.no(404, "unknown_group", "GET", progress(house))  # nothing was made
    create = {"partitions": {"7": 1}, "create": True}
    await house.no(404, "unknown_partition", "PUT", progress(house), json=create)
    create = {"partitions": {"zero": 1}, "create": True}
    await house.no(400, "invalid_request", "PUT", progress(house), json=create)
    await house.no(404, "unknown_queue", "PUT", "/bulk/queues/nix/groups/g/progress", json={"partitions": {}})
    bad: dict[str, object] = {"partitions": {}, "start": "yesterday"}
    await house.no(400, "invalid_queue_config", "PUT", progress(house), json=bad)
    bad = {"partitions": {}, "create": True}
    await house.no(400, "invalid_queue_config", "PUT", progress(house, "a%2Fb"), json=bad)


async def test_progress_survives_a_kill(own_house: BulkHouse) -> None:
    house = own_house
    await house.make()
    await house.fill(numbers(1000))
    await house.ok("PUT", progress(house), json={"partitions": {"0": 600}, "create": True})
    again = restarted(house)
    assert await again.ok("GET", progress(again)) == {"partitions": {"0": 600}}
    [offsets] = await again.offsets()
    assert (offsets["earliest"], offsets["latest"]) == (600, 1000)
    assert (await again.rows()).num_rows == 400
    await stopped(again)


def restarted(house: BulkHouse) -> BulkHouse:
    """kill -9, and another broker in the same folder."""
    from tests.support.broker_process import Broker
    from tests.bulk.conftest import CONFIG

    house.broker.kill()
    return BulkHouse(Broker(house.broker.folder, CONFIG, (), {}), house.queue)


async def stopped(house: BulkHouse) -> None:
    await house.api.aclose()
    house.broker.stop()


async def remade(house: BulkHouse, count: int) -> str:
    """Delete the queue and make it again, with so many messages; which one it is then."""
    assert (await house.api.delete(f"/queues/{house.queue}?force=true")).is_success
    await house.make()
    await house.fill(numbers(count), app=f"again-{house.queue}")
    return await incarnation(house)


async def incarnation(house: BulkHouse, queue: str = "") -> str:
    told: str = (await house.ok("GET", f"/bulk/queues/{queue or house.queue}/offsets"))["incarnation"]
    return told


async def test_a_queue_that_was_made_again_takes_no_progress_of_the_old_one(house: BulkHouse) -> None:
    await house.make()
    await house.fill(numbers(10))
    old = await incarnation(house)
    body = {"partitions": {"0": 10}, "create": True, "incarnation": old}
    assert await house.ok("PUT", progress(house), json=body) == {"partitions": {"0": 10}}
    assert await remade(house, 20) != old
    told = await house.no(409, "queue_made_again", "PUT", progress(house), json=body)
    assert "deleted and made again" in told["message"]
    assert "begin anew" in told["do"]
    assert await house.ok("GET", f"/queues/{house.queue}/groups") == []
    assert (await house.ok("GET", f"/queues/{house.queue}/stats"))["depth"] == 20
    # Who does not say which queue is meant is taken at its word, as before.
    body = {"partitions": {"0": 10}, "create": True}
    assert await house.ok("PUT", progress(house), json=body) == {"partitions": {"0": 10}}


async def test_rows_of_a_queue_that_was_made_again_are_not_taken_for_those_of_the_old_one(
    house: BulkHouse,
) -> None:
    await house.make()
    await house.fill(numbers(10))
    old = await incarnation(house)
    assert (await house.rows(incarnation=old)).num_rows == 10
    assert (await house.ranges({"0": [0, 10]}, incarnation=old)).num_rows == 10
    new = await remade(house, 20)
    for path in (
        f"/bulk/queues/{house.queue}/partitions/0/rows?start=0&end=10&lenient=true&incarnation={old}",
        f'/bulk/queues/{house.queue}/rows?ranges={{"0":[0,10]}}&lenient=true&incarnation={old}',
    ):
        await house.no(409, "queue_made_again", "GET", path)
    assert (await house.rows(incarnation=new)).num_rows == (await house.rows()).num_rows == 20


async def test_a_queue_is_the_same_one_after_a_restart_and_with_another_configuration(
    own_house: BulkHouse,
) -> None:
    house = own_house
    await house.make()
    names = [house.queue, *(f"more{nth}" for nth in range(8))]  # moments are rounded up and down
    for name in names[1:]:
        await house.ok("POST", "/queues", json={"name": name})
    before = [await incarnation(house, name) for name in names]
    assert len(set(before)) == len(names)
    await house.ok("PUT", f"/queues/{house.queue}/config", json={"partitions": 3})
    assert await incarnation(house) == before[0]
    again = restarted(house)
    assert [await incarnation(again, name) for name in names] == before
    assert await remade(again, 1) not in before
    await stopped(again)

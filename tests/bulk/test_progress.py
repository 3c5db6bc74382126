"""Progress of a bulk reader's group settles messages; those that all groups settled are deleted."""

from __future__ import annotations

import pyarrow as pa

from tests.admin.live_broker import Worker
from tests.bulk.conftest import BulkHarness


def progress(harness: BulkHarness, group: str = "spark") -> str:
    return f"/bulk/queues/{harness.queue}/groups/{group}/progress"


def numbers(count: int) -> pa.Table:
    return pa.table(
        {
            "value": [b"%d" % nth for nth in range(count)],
            "key": [b"%d" % nth for nth in range(count)],
        }
    )


async def test_group_starts_at_the_earliest_and_retains_what_it_has_not_settled(
    harness: BulkHarness,
) -> None:
    await harness.make()
    await harness.fill(numbers(100))
    created = await harness.ok("PUT", progress(harness), json={"partitions": {}, "create": True})
    assert created == {"partitions": {"0": 0}}
    assert await harness.ok("GET", progress(harness)) == created
    [group] = await harness.ok("GET", f"/queues/{harness.queue}/groups")
    assert (group["name"], group["lag"]) == ("spark", 100)
    moved = await harness.ok("PUT", progress(harness), json={"partitions": {"0": 60}})
    assert moved == {"partitions": {"0": 60}}
    [group] = await harness.ok("GET", f"/queues/{harness.queue}/groups")
    assert (group["lag"], group["ledger"]["acked"]) == (40, 60)
    [offsets] = await harness.offsets()
    assert (offsets["earliest"], offsets["latest"]) == (60, 100)
    assert (await harness.ok("GET", f"/queues/{harness.queue}/stats"))["total_messages"] == 40
    assert await harness.ok("GET", "/verify") == []


async def test_progress_never_goes_backwards(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    await harness.ok("PUT", progress(harness), json={"partitions": {"0": 7}, "create": True})
    reported = await harness.ok("PUT", progress(harness), json={"partitions": {"0": 3}})
    assert reported == {"partitions": {"0": 7}, "lost": {"0": 3}}, (
        "a reader that starts at 3 finds nothing"
    )
    assert await harness.ok("GET", progress(harness)) == {"partitions": {"0": 7}}


async def test_lost_ranges_of_a_group_are_reported_and_its_rows_refused(
    own_harness: BulkHarness,
) -> None:
    harness = own_harness
    await harness.make()
    await harness.fill(numbers(8))
    await harness.ok("PUT", progress(harness), json={"partitions": {"0": 2}, "create": True})
    assert (await harness.rows(start=2, end=8, group="spark")).num_rows == 6
    assert (await harness.api.post(f"/queues/{harness.queue}/purge")).is_success
    await harness.fill(numbers(2), batch=1)
    harness = restarted(harness)
    assert await harness.ok("GET", progress(harness)) == {"partitions": {"0": 8}, "lost": {"0": 2}}
    reported = await harness.ok("PUT", progress(harness), json={"partitions": {"0": 2}})
    assert reported == {"partitions": {"0": 8}, "lost": {"0": 2}}
    path = f"/bulk/queues/{harness.queue}/partitions/0/rows?group=spark&end=10"
    refusal = await harness.refused(410, "out_of_range", "GET", f"{path}&start=2")
    assert "has lost 2 before group 'spark' had read it" in refusal["message"]
    assert (await harness.rows(start=2, end=10, group="spark", lenient="true")).num_rows == 2
    assert (await harness.rows(start=8, end=10, group="spark")).num_rows == 2
    assert await harness.ok("PUT", progress(harness), json={"partitions": {"0": 8}}) == {
        "partitions": {"0": 8}
    }
    await stopped(harness)


async def test_new_reader_gets_stored_messages_and_the_group_moves_back_to_them(
    harness: BulkHarness,
) -> None:
    await harness.make()
    await harness.ok("PUT", progress(harness, "others"), json={"partitions": {}, "create": True})
    await harness.fill(numbers(8))
    await harness.ok("PUT", progress(harness), json={"partitions": {"0": 8}, "create": True})
    begin = {"partitions": {"0": 3}, "begin": True}
    assert await harness.ok("PUT", progress(harness), json=begin) == {"partitions": {"0": 3}}
    await harness.ok("PUT", progress(harness, "others"), json={"partitions": {"0": 8}})
    assert (await harness.rows(start=3, end=8, group="spark")).num_rows == 5, (
        "it is stored for the group again"
    )
    assert await harness.ok("GET", "/verify") == []


async def test_replaced_values_of_a_compacted_queue_are_not_lost(harness: BulkHarness) -> None:
    await harness.make(type="compacted")
    await harness.ok("PUT", progress(harness), json={"partitions": {}, "create": True})
    await harness.fill(pa.table({"value": [b"0", b"1", b"2"], "key": [b"a", b"b", b"a"]}))
    assert (await harness.ok("GET", f"/bulk/queues/{harness.queue}/offsets"))["compacted"] is True
    for group in ("", "spark"):
        values = (await harness.rows(start=0, end=3, group=group))["value"].to_pylist()
        assert values == [b"1", b"2"]
    for group in ("spark", "late"):
        reported = await harness.ok(
            "PUT", progress(harness, group), json={"partitions": {"0": 0}, "create": True}
        )
        assert reported == {"partitions": {"0": 1}}


async def test_lag_is_exposed_in_the_metrics(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    await harness.ok("PUT", progress(harness), json={"partitions": {"0": 7}, "create": True})
    page = (await harness.api.get(f"{harness.root}/metrics")).text
    lines = [
        line
        for line in page.splitlines()
        if line.startswith("mqtt_queue_lag") and f'"$queue/{harness.queue}"' in line
    ]
    assert [line.rsplit(" ", 1)[1] for line in lines] in (["3.0"], ["3"])


async def test_group_may_start_at_the_end(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    body = {"partitions": {}, "create": True, "start": "latest"}
    assert await harness.ok("PUT", progress(harness), json=body) == {"partitions": {"0": 10}}


async def test_group_with_mqtt_consumers_is_refused(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    async with harness.client(f"live-{harness.queue}") as client:
        await Worker(client, harness.queue).join(consumer_group="spark")
        reported = await harness.refused(
            409, "in_use", "PUT", progress(harness), json={"partitions": {"0": 5}}
        )
        assert "group of its own" in reported["do"]


async def test_invalid_progress_is_refused(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    await harness.refused(
        404, "unknown_group", "PUT", progress(harness), json={"partitions": {"0": 5}}
    )
    create = {"partitions": {"0": 11}, "create": True}
    await harness.refused(410, "out_of_range", "PUT", progress(harness), json=create)
    await harness.refused(404, "unknown_group", "GET", progress(harness))  # nothing was created
    create = {"partitions": {"7": 1}, "create": True}
    await harness.refused(404, "unknown_partition", "PUT", progress(harness), json=create)
    create = {"partitions": {"zero": 1}, "create": True}
    await harness.refused(400, "invalid_request", "PUT", progress(harness), json=create)
    await harness.refused(
        404, "unknown_queue", "PUT", "/bulk/queues/nix/groups/g/progress", json={"partitions": {}}
    )
    bad: dict[str, object] = {"partitions": {}, "start": "yesterday"}
    await harness.refused(400, "invalid_queue_config", "PUT", progress(harness), json=bad)
    bad = {"partitions": {}, "create": True}
    await harness.refused(400, "invalid_queue_config", "PUT", progress(harness, "a%2Fb"), json=bad)


async def test_progress_survives_a_kill(own_harness: BulkHarness) -> None:
    harness = own_harness
    await harness.make()
    await harness.fill(numbers(1000))
    await harness.ok("PUT", progress(harness), json={"partitions": {"0": 600}, "create": True})
    again = restarted(harness)
    assert await again.ok("GET", progress(again)) == {"partitions": {"0": 600}}
    [offsets] = await again.offsets()
    assert (offsets["earliest"], offsets["latest"]) == (600, 1000)
    assert (await again.rows()).num_rows == 400
    await stopped(again)


def restarted(harness: BulkHarness) -> BulkHarness:
    """Kill the broker with -9 and start another in the same folder."""
    from tests.bulk.conftest import CONFIG
    from tests.support.broker_process import Broker

    harness.broker.kill()
    return BulkHarness(Broker(harness.broker.folder, CONFIG, (), {}), harness.queue)


async def stopped(harness: BulkHarness) -> None:
    await harness.api.aclose()
    harness.broker.stop()


async def recreate(harness: BulkHarness, count: int) -> str:
    """Delete and create the queue, publish `count` messages, and return its incarnation."""
    assert (await harness.api.delete(f"/queues/{harness.queue}?force=true")).is_success
    await harness.make()
    await harness.fill(numbers(count), app=f"again-{harness.queue}")
    return await incarnation(harness)


async def incarnation(harness: BulkHarness, queue: str = "") -> str:
    reported: str = (await harness.ok("GET", f"/bulk/queues/{queue or harness.queue}/offsets"))[
        "incarnation"
    ]
    return reported


async def test_recreated_queue_accepts_no_progress_of_its_predecessor(harness: BulkHarness) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    old = await incarnation(harness)
    body = {"partitions": {"0": 10}, "create": True, "incarnation": old}
    assert await harness.ok("PUT", progress(harness), json=body) == {"partitions": {"0": 10}}
    assert await recreate(harness, 20) != old
    reported = await harness.refused(409, "queue_made_again", "PUT", progress(harness), json=body)
    assert "deleted and made again" in reported["message"]
    assert "start again" in reported["do"]
    assert await harness.ok("GET", f"/queues/{harness.queue}/groups") == []
    assert (await harness.ok("GET", f"/queues/{harness.queue}/stats"))["total_messages"] == 20
    # A request without an incarnation is accepted, as before.
    body = {"partitions": {"0": 10}, "create": True}
    assert await harness.ok("PUT", progress(harness), json=body) == {"partitions": {"0": 10}}


async def test_rows_of_a_recreated_queue_are_not_taken_for_those_of_its_predecessor(
    harness: BulkHarness,
) -> None:
    await harness.make()
    await harness.fill(numbers(10))
    old = await incarnation(harness)
    assert (await harness.rows(incarnation=old)).num_rows == 10
    assert (await harness.ranges({"0": [0, 10]}, incarnation=old)).num_rows == 10
    new = await recreate(harness, 20)
    for path in (
        f"/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=10&lenient=true&incarnation={old}",
        f'/bulk/queues/{harness.queue}/rows?ranges={{"0":[0,10]}}&lenient=true&incarnation={old}',
    ):
        await harness.refused(409, "queue_made_again", "GET", path)
    assert (await harness.rows(incarnation=new)).num_rows == (await harness.rows()).num_rows == 20


async def test_queue_has_the_same_incarnation_after_restart_and_reconfiguration(
    own_harness: BulkHarness,
) -> None:
    harness = own_harness
    await harness.make()
    names = [harness.queue, *(f"more{nth}" for nth in range(8))]  # times are rounded up and down
    for name in names[1:]:
        await harness.ok("POST", "/queues", json={"name": name})
    before = [await incarnation(harness, name) for name in names]
    assert len(set(before)) == len(names)
    await harness.ok("PUT", f"/queues/{harness.queue}/config", json={"partitions": 3})
    assert await incarnation(harness) == before[0]
    again = restarted(harness)
    assert [await incarnation(again, name) for name in names] == before
    assert await recreate(again, 1) not in before
    await stopped(again)

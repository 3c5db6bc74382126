"""Batches are staged, committed in one step, and stored once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from sluice.bulk.staging import StageStore
from sluice.errors import StageUnwritable, StaleBatch
from tests.admin.live_broker import Worker, properties_of
from tests.bulk.conftest import ARROW, BulkHarness, arrow_body
from tests.bulk.test_progress import restarted, stopped

COLUMN = "letter"  # words: allowed (the column with the id of a dead letter)


def values(*payloads: bytes) -> pa.Table:
    return pa.table({"value": pa.array(payloads, pa.binary())})


async def commit(harness: BulkHarness, app: str, batch: int, stages: list[str], rows: int) -> Any:
    return await harness.ok(
        "POST", f"/bulk/stages/{app}/{batch}/commit", json={"stages": stages, "rows": rows}
    )


async def test_stages_of_a_batch_become_visible_together_at_commit(harness: BulkHarness) -> None:
    await harness.make()
    app = f"app-{harness.queue}"
    first = await harness.stage(values(b"a", b"b"), 0, app)
    second = await harness.stage(values(b"c"), 0, app)
    assert (first["rows"], second["rows"]) == (2, 1)
    assert (await harness.offsets())[0]["latest"] == 0
    assert await harness.ok("GET", f"/bulk/stages/{app}") == {"last": None}
    done = await commit(harness, app, 0, [first["stage"], second["stage"]], 3)
    assert done == {"committed": True, "rows": 3, "replayed": False, "skipped": 0}
    assert (await harness.rows()).column("value").to_pylist() == [b"a", b"b", b"c"]
    assert await harness.ok("GET", f"/bulk/stages/{app}") == {"last": 0}


async def test_repeated_batch_is_stored_once(harness: BulkHarness) -> None:
    await harness.make()
    app = f"app-{harness.queue}"
    for _ in range(2):
        done = await harness.fill(values(b"a", b"b"), 5, app)
    assert done == {"committed": True, "rows": 2, "replayed": True, "skipped": 0}
    assert (await harness.fill(values(b"old"), 4, app))["replayed"] is True
    assert (await harness.fill(values(b"c"), 6, app))["replayed"] is False
    assert (await harness.rows()).column("value").to_pylist() == [b"a", b"b", b"c"]


async def test_concurrent_commits_of_one_batch_store_it_once(harness: BulkHarness) -> None:
    await harness.make()
    app = f"app-{harness.queue}"
    stages = [
        await harness.stage(values(*[b"%d" % nth for nth in range(500)]), 0, app) for _ in range(2)
    ]
    answers = await asyncio.gather(
        *(commit(harness, app, 0, [stage["stage"]], 500) for stage in stages)
    )
    assert sorted(answer["replayed"] for answer in answers) == [False, True]
    assert (await harness.rows()).num_rows == 500


async def test_empty_batch_is_committed(harness: BulkHarness) -> None:
    app = f"app-{harness.queue}"
    assert await commit(harness, app, 3, [], 0) == {
        "committed": True,
        "rows": 0,
        "replayed": False,
        "skipped": 0,
    }
    assert await harness.ok("GET", f"/bulk/stages/{app}") == {"last": 3}


async def test_rows_carry_key_queue_headers_delay_priority_and_id(harness: BulkHarness) -> None:
    await harness.make()
    other = f"{harness.queue}/other"
    table = pa.table(
        {
            "value": pa.array(["text", "later"]),
            "key": pa.array([b"k", None], pa.binary()),
            "queue": pa.array([None, other]),
            "headers": pa.array(
                [[("tenant", b"north"), ("content-type", b"a/b")], []],
                pa.map_(pa.string(), pa.binary()),
            ),
            "delay": pa.array([None, "1h"]),
            "priority": pa.array([7, None], pa.int32()),
            "message_id": pa.array(["mine", None]),
        }
    )
    await harness.fill(table)
    async with harness.client(f"w-{harness.queue}") as client:
        worker = Worker(client, harness.queue)
        await worker.join()
        message = await worker.next()
        reported = properties_of(message)
        assert message.payload == b"text"
        assert (reported["message-id"], reported["tenant"], reported["partition-key"]) == (
            "mine",
            "north",
            "k",
        )
        assert reported["priority"] == "7"
        assert message.properties is not None
        assert message.properties.ContentType == "a/b"  # type: ignore[attr-defined]
    [later] = await harness.ok("GET", f"/queues/{other.replace('/', '$')}/messages")
    assert later["state"] == "delayed"
    [row] = (await harness.rows(headers=True)).to_pylist()
    assert row["key"] == b"k"
    assert dict(row["headers"]) == {
        "tenant": b"north",
        "content-type": b"a/b",
        "partition-key": b"k",
        "priority": b"7",
    }


async def test_headers_validated_once_for_a_queue_are_not_validated_again(
    harness: BulkHarness,
) -> None:
    """Rows as a reader gets them, written back."""
    await harness.make()
    await harness.publish(
        "a", key="k", delay="1h", message_id="mine", priority=7, properties=[["tenant", "north"]]
    )
    read = await harness.rows(headers=True, columns="value,headers")
    assert {"delay", "priority", "partition-key"} <= dict(
        read.column("headers").to_pylist()[0]
    ).keys()
    harness.queue += "b"
    await harness.make()
    await harness.fill(read)
    asked = pa.table(
        {
            "value": [b"b"],
            "headers": pa.array(
                [[("deliver-at", b"4102444800000"), ("delay", b"x")]],
                pa.map_(pa.string(), pa.binary()),
            ),
        }
    )
    await harness.fill(asked, 1)
    first, second = (await harness.rows(headers=True)).to_pylist()
    assert dict(first["headers"]) == {"tenant": b"north", "priority": b"7"}
    assert (first["key"], second["headers"]) == (None, [])
    assert first["message_id"] != "mine"
    found = await harness.ok("GET", f"/queues/{harness.queue}/messages")
    assert [one["state"] for one in found] == ["waiting", "waiting"]
    columns = {"priority": pa.array([2]), "key": pa.array([b"z"]), "delay": pa.array(["2h"])}
    for name, column in columns.items():
        read = read.append_column(name, column)
    await harness.fill(read, 2)
    last = (await harness.rows(headers=True)).to_pylist()[-1]
    assert last["key"] == b"z"
    assert dict(last["headers"]) == {
        "tenant": b"north",
        "priority": b"2",
        "partition-key": b"z",
        "delay": b"2h",
    }


def with_headers(*rows: list[tuple[str, bytes]]) -> pa.Table:
    return pa.table(
        {"value": [b"x"] * len(rows), "headers": pa.array(rows, pa.map_(pa.string(), pa.binary()))}
    )


@pytest.mark.parametrize("kind", ["work", "compacted"])
async def test_header_called_priority_with_an_invalid_value_is_an_ordinary_property(
    harness: BulkHarness, kind: str
) -> None:
    """Headers of devices are written back unchanged: only the column sets options."""
    await harness.make(type=kind)
    reported = [b"high", b"05", b"10", b"", b"7"]
    table = with_headers(*([("priority", one)] for one in reported))
    await harness.fill(
        table.append_column("key", pa.array([b"%d" % nth for nth in range(len(reported))]))
    )
    [*found] = (await harness.rows(headers=True)).column("headers").to_pylist()
    assert [dict(one)["priority"] for one in found] == reported
    listed = await harness.ok("GET", f"/queues/{harness.queue}/messages")
    assert [one["priority"] for one in listed] == [0, 0, 0, 0, 7 if kind == "work" else 0]
    if kind == "work":
        both = with_headers([("priority", b"high"), ("priority", b"3")])
        await harness.fill(both.append_column("priority", pa.array([5])), 1)
        last = (await harness.rows(headers=True)).column("headers").to_pylist()[-1]
        assert last == [("priority", b"5")]


async def test_last_header_wins_for_single_valued_fields(harness: BulkHarness) -> None:
    """A client that got a property twice would have to close its connection."""
    await harness.make()
    names = ("content-type", "response-topic", "correlation-data", "tenant")
    await harness.fill(with_headers([(name, b"%d" % nth) for nth in range(3) for name in names]))
    async with harness.client(f"w-{harness.queue}") as client:
        worker = Worker(client, harness.queue)
        await worker.join()
        reported: Any = (await worker.next()).properties
    assert (reported.ContentType, reported.ResponseTopic, reported.CorrelationData) == (
        "2",
        "2",
        b"2",
    )
    assert [value for name, value in reported.UserProperty if name == "tenant"] == ["0", "1", "2"]


async def test_null_value_is_refused_and_is_no_tombstone(harness: BulkHarness) -> None:
    await harness.make(type="compacted")
    await harness.fill(pa.table({"value": [b"a"], "key": [b"k"]}))
    path = f"/bulk/stages/app/0?queue={harness.queue}"
    for column in (pa.array([b"b", None], pa.binary()), pa.array([None, None], pa.null())):
        body = arrow_body(pa.table({"value": column, "key": [b"j", b"k"]}), 1)
        reported = await harness.refused(
            400, "invalid_batch", "POST", path, content=body, headers=ARROW
        )
        assert (
            f"value is null in row {1 if column.null_count == 1 else 0} of" in reported["message"]
        )
        assert "coalesce" in reported["do"] and "cast('' AS binary)" in reported["do"]
    assert (await harness.rows()).column("value").to_pylist() == [b"a"]
    await harness.fill(pa.table({"value": [b""], "key": [b"k"]}), 1)
    assert b"a" not in (await harness.rows()).column("value").to_pylist()


async def test_batch_that_does_not_fit_is_refused_with_the_free_capacity(
    harness: BulkHarness,
) -> None:
    await harness.make(limits={"max_queue_depth": 3})
    await harness.publish("a")
    stage = await harness.stage(
        values(*(b"%d" % nth for nth in range(5))), 0, f"large-{harness.queue}"
    )
    path, body = f"/bulk/stages/large-{harness.queue}/0/commit", {"stages": [stage["stage"]]}
    reported = await harness.refused(409, "queue_full", "POST", path, json=body)
    assert "has space for 2 messages, and the batch has 5" in reported["message"]
    assert "smaller batches" in reported["do"]


async def test_full_compacted_queue_accepts_known_keys_and_no_new_ones(
    harness: BulkHarness,
) -> None:
    await harness.make(type="compacted", limits={"max_queue_depth": 3})
    await harness.fill(pa.table({"value": [b"1", b"2", b"3"], "key": [b"a", b"b", b"c"]}))
    await harness.fill(pa.table({"value": [b"4", b"5", b""], "key": [b"a", b"a", b"b"]}), 1)
    assert dict(zip(*(await harness.rows(columns="key,value")).to_pydict().values())) == {
        b"c": b"3",
        b"a": b"5",
    }
    table = pa.table({"value": [b"6", b"7", b"8", b"9"], "key": [b"a", b"e", b"f", b"e"]})
    stage = await harness.stage(table, 2, f"fill-{harness.queue}")
    path, body = f"/bulk/stages/fill-{harness.queue}/2/commit", {"stages": [stage["stage"]]}
    reported = await harness.refused(409, "queue_full", "POST", path, json=body)
    assert "has space for 1 key, and the batch has 2" in reported["message"]


async def test_keys_of_arbitrary_bytes_map_to_their_partition(harness: BulkHarness) -> None:
    await harness.make(partitions=5)
    keys = [bytes([nth, 0xFF]) for nth in range(20)]
    await harness.fill(
        pa.table({"value": pa.array(keys, pa.binary()), "key": pa.array(keys, pa.binary())})
    )
    first = {nth: (await harness.rows(nth)).column("key").to_pylist() for nth in range(5)}
    await harness.fill(
        pa.table({"value": pa.array(keys, pa.binary()), "key": pa.array(keys, pa.binary())}), 1
    )
    again = {nth: (await harness.rows(nth)).column("key").to_pylist() for nth in range(5)}
    assert sum(map(len, first.values())) == 20
    assert {nth: found[: len(first[nth])] for nth, found in again.items()} == first
    assert all(set(found) == set(first[nth]) for nth, found in again.items())


async def test_ids_within_the_dedup_window_are_not_stored_again(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("a", message_id="one")
    table = pa.table({"value": ["a", "b", "b"], "message_id": ["one", "two", "two"]})
    await harness.fill(table)
    assert (await harness.rows()).column("message_id").to_pylist() == ["one", "two"]


# ---- refusals: the whole batch, with a reason


@pytest.mark.parametrize(
    ("config", "table", "status", "error"),
    [
        ({"limits": {"max_message_size": 10}}, values(b"ok", b"x" * 11), 413, "message_too_large"),
        ({"limits": {"max_queue_depth": 2}}, values(b"1", b"2", b"3"), 409, "queue_full"),
        ({"schema": {"type": "object"}}, values(b"{}", b"[]"), 400, "invalid_payload"),
        ({}, pa.table({"value": ["a", "b"], "priority": [1, 10]}), 400, "invalid_batch"),
        ({}, pa.table({"value": ["a", "b"], "delay": ["1s", "soon"]}), 400, "invalid_batch"),
        (
            {},
            pa.table({"value": ["a", "b"], "message_id": ["ok", "x" * 1025]}),
            400,
            "invalid_batch",
        ),
        ({}, pa.table({"value": ["a", "b"], "queue": [None, "a//b"]}), 400, "invalid_queue_name"),
        (
            {},
            pa.table(
                {
                    "value": ["a"],
                    "headers": pa.array([[("h", b"\xff")]], pa.map_(pa.string(), pa.binary())),
                }
            ),
            400,
            "invalid_batch",
        ),
    ],
)
async def test_batch_with_one_bad_row_is_refused_as_a_whole(
    harness: BulkHarness, config: dict[str, Any], table: pa.Table, status: int, error: str
) -> None:
    await harness.make(**config)
    app = f"app-{harness.queue}"
    stage = await harness.stage(table, 0, app)
    body = {"stages": [stage["stage"]], "rows": table.num_rows}
    await harness.refused(status, error, "POST", f"/bulk/stages/{app}/0/commit", json=body)
    assert (await harness.offsets())[0]["latest"] == 0
    assert await harness.ok("GET", f"/bulk/stages/{app}") == {"last": None}
    assert (await harness.fill(values(b"{}"), 0, app))["replayed"] is False, (
        "the batch can still be sent"
    )


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"payload": ["a"]}),
        pa.table({"value": ["a"], "extra": [1]}),
        pa.table({"value": [1]}),
        pa.table({"value": ["a"], "priority": ["high"]}),
        pa.table({"value": ["a"], "headers": ["h"]}),
    ],
)
async def test_unknown_columns_are_refused_at_upload(harness: BulkHarness, table: pa.Table) -> None:
    path = f"/bulk/stages/app-{harness.queue}/0?queue={harness.queue}"
    await harness.refused(
        400, "invalid_batch", "POST", path, content=arrow_body(table), headers=ARROW
    )


async def test_bodies_that_are_not_arrow_are_refused(harness: BulkHarness) -> None:
    path = f"/bulk/stages/app-{harness.queue}/0?queue={harness.queue}"
    await harness.refused(
        400, "invalid_batch", "POST", path, content=b"nonsense" * 100, headers=ARROW
    )
    body = arrow_body(values(b"x" * 1000))
    await harness.refused(
        400, "invalid_batch", "POST", path, content=body[: len(body) // 2], headers=ARROW
    )
    await harness.refused(
        415, "not_json", "POST", path, content=body, headers={"Content-Type": "text/csv"}
    )
    # not a queue
    await harness.refused(
        400, "invalid_batch", "POST", path.partition("?")[0], content=body, headers=ARROW
    )


async def test_oversized_batch_is_refused_with_a_remedy(harness: BulkHarness) -> None:
    app = f"app-{harness.queue}"
    large = values(*[b"x" * 100_000] * 41)
    path = f"/bulk/stages/{app}/0?queue={harness.queue}"
    reported = await harness.refused(
        413, "batch_too_large", "POST", path, content=arrow_body(large), headers=ARROW
    )
    assert "maxBytesPerTrigger" in reported["do"]
    half = values(*[b"x" * 100_000] * 21)
    stages = [(await harness.stage(half, 0, app))["stage"] for _ in range(2)]
    path = f"/bulk/stages/{app}/0/commit"
    await harness.refused(413, "batch_too_large", "POST", path, json={"stages": stages, "rows": 42})
    assert await harness.ok("DELETE", f"/bulk/stages/{app}/0") == {"dropped": 2}


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
async def test_decompressed_size_of_a_batch_is_bounded(harness: BulkHarness, codec: str) -> None:
    await harness.make()
    app = f"app-{harness.queue}"

    async def send(megabytes: int) -> httpx.Response:
        table, sink = values(*[bytes(1 << 20)] * megabytes), pa.BufferOutputStream()
        with pa.ipc.new_stream(
            sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
        ) as writer:
            writer.write_table(table, 2)
        body = bytes(sink.getvalue())
        assert len(body) < 100_000
        return await harness.api.post(
            f"/bulk/stages/{app}/0?queue={harness.queue}", content=body, headers=ARROW
        )

    reported = (await send(4)).json()
    assert (
        reported["error"] == "batch_too_large"
        and "bytes or more when it is unpacked, and" in reported["message"]
    )
    stages = [(await send(megabytes)).json()["stage"] for megabytes in (2, 3)]
    path = f"/bulk/stages/{app}/0/commit"
    await harness.refused(413, "batch_too_large", "POST", path, json={"stages": stages})
    await commit(harness, app, 0, stages[1:], 3)
    assert (await harness.rows(columns="value")).column("value").to_pylist() == [bytes(1 << 20)] * 3


async def test_size_of_all_stages_is_bounded(harness: BulkHarness) -> None:
    app = f"app-{harness.queue}"
    some = values(*[b"x" * 100_000] * 35)
    for _ in range(2):
        await harness.stage(some, 0, app)
    path = f"/bulk/stages/{app}/0?queue={harness.queue}"
    await harness.refused(503, "stages_full", "POST", path, content=arrow_body(some), headers=ARROW)
    assert await harness.ok("DELETE", f"/bulk/stages/{app}/0") == {"dropped": 2}
    await harness.stage(some, 0, app)
    assert await harness.ok("DELETE", f"/bulk/stages/{app}/0") == {"dropped": 1}


async def test_aborted_batch_cannot_be_committed(harness: BulkHarness) -> None:
    app = f"app-{harness.queue}"
    stage = await harness.stage(values(b"a"), 0, app)
    assert await harness.ok("DELETE", f"/bulk/stages/{app}/0") == {"dropped": 1}
    path = f"/bulk/stages/{app}/0/commit"
    reported = await harness.refused(
        409, "stale_batch", "POST", path, json={"stages": [stage["stage"]], "rows": 1}
    )
    assert "Stage its rows again" in reported["do"]


async def test_row_count_is_checked(harness: BulkHarness) -> None:
    app = f"app-{harness.queue}"
    stage = await harness.stage(values(b"a"), 0, app)
    path = f"/bulk/stages/{app}/0/commit"
    await harness.refused(
        400, "invalid_request", "POST", path, json={"stages": [stage["stage"]], "rows": 2}
    )


# ---- end of the process


async def test_kill_between_stage_and_commit_leaves_nothing_and_the_batch_can_be_resent(
    own_harness: BulkHarness,
) -> None:
    harness = own_harness
    await harness.make()
    stage = await harness.stage(values(b"a", b"b"), 0, "app")
    assert list((harness.broker.folder / "data" / "bulk" / "stages").iterdir())
    again = restarted(harness)
    assert not (harness.broker.folder / "data" / "bulk" / "stages").exists()
    assert (await again.offsets())[0]["latest"] == 0
    body = {"stages": [stage["stage"]], "rows": 2}
    await again.refused(409, "stale_batch", "POST", "/bulk/stages/app/0/commit", json=body)
    assert (await again.fill(values(b"a", b"b"), 0, "app"))["replayed"] is False
    assert (await again.rows()).num_rows == 2
    await stopped(again)


async def test_acknowledged_batch_is_known_after_a_kill(own_harness: BulkHarness) -> None:
    harness = own_harness
    await harness.make()
    await harness.fill(values(b"a", b"b"), 0, "app")
    again = restarted(harness)
    assert await again.ok("GET", "/bulk/stages/app") == {"last": 0}
    done = await again.fill(values(b"a", b"b"), 0, "app")
    assert done == {"committed": True, "rows": 2, "replayed": True, "skipped": 0}
    assert (await again.rows()).num_rows == 2
    await stopped(again)


async def test_kill_during_commits_leaves_whole_batches(own_harness: BulkHarness) -> None:
    harness = own_harness
    rows = 500
    await harness.make(limits={"max_queue_depth": 1_000_000})

    answered: asyncio.Queue[int] = asyncio.Queue()

    async def write_batches(target: BulkHarness, first: int) -> None:
        for batch in range(first, 1000):
            await target.fill(values(*[b"%d" % batch] * rows), batch, "app")
            answered.put_nowait(batch)

    for nth in range(3):
        first = (await harness.ok("GET", "/bulk/stages/app"))["last"]
        task = asyncio.create_task(write_batches(harness, 0 if first is None else first + 1))
        await answered.get()
        await answered.get()
        await asyncio.wait([task], timeout=0.03 * nth)  # at various moments of the third batch
        harness.broker.process.kill()
        await asyncio.wait([task])
        assert task.exception() is not None
        await harness.api.aclose()
        harness = restarted(harness)
        last = (await harness.ok("GET", "/bulk/stages/app"))["last"]
        [offsets] = await harness.offsets()
        expected = [
            b"%d" % batch for batch in range(0 if last is None else last + 1) for _ in range(rows)
        ]
        assert offsets["latest"] == len(expected)
        assert (await harness.rows(columns="value")).column("value").to_pylist() == expected
    assert len(expected) > 3 * rows
    await stopped(harness)


async def test_mqtt_is_served_while_a_large_batch_is_committed(harness: BulkHarness) -> None:
    """The frame stays open over several turns and has other records: all clients are answered."""
    await harness.make(limits={"max_queue_depth": 1_000_000})
    app = f"app-{harness.queue}"
    stage = await harness.stage(values(*[b"x" * 200] * 15_000), 0, app)
    async with harness.client(f"w-{harness.queue}") as client:
        done = asyncio.create_task(commit(harness, app, 0, [stage["stage"]], 15_000))
        sent = 0
        while not done.done():
            await client.publish(f"$queue/{harness.queue}/mine", json.dumps(sent), qos=1)
            sent += 1
        assert (await done)["committed"]
        worker = Worker(client, f"{harness.queue}/mine")
        await worker.join()
        got = {(await worker.next()).payload for _ in range(sent)}
    assert got == {json.dumps(nth).encode() for nth in range(sent)}


async def test_row_replaces_a_dead_letter_for_the_group_that_failed(harness: BulkHarness) -> None:
    await harness.make(partitions=3)
    await harness.ok(
        "PUT",
        f"/bulk/queues/{harness.queue}/groups/g/progress",
        json={"partitions": {}, "create": True},
    )
    await harness.reject(b"bad", **{"message-id": "mine", "partition-key": "k"})
    dead = f"dlq/{harness.queue}"
    [dead_letter] = await harness.ok("GET", f"/queues/{harness.queue}/dlq")
    place = f"{dead}/{dead_letter['partition']}/{dead_letter['sequence']}"
    table = pa.table(
        {"value": [b"good", b"late"], "key": [b"k", b"k"], COLUMN: [place, f"{dead}/0/99"]}
    )
    answer = await harness.fill(table)
    assert (answer["rows"], answer["skipped"], answer["replayed"]) == (2, 1, False)
    assert (await harness.ok("GET", f"/queues/{harness.queue}/dlq")) == []
    waiting = {
        one["name"]: one["lag"]
        for one in await harness.ok("GET", f"/queues/{harness.queue}/groups")
    }
    assert waiting == {"g": 1, "w": 1}, "g still waits for the original, and not for the repair"
    reported = await harness.ok("GET", f"/queues/{harness.queue}/messages/mine")
    assert reported["message_id"] == "mine"


@pytest.mark.parametrize(
    "dead_letter",
    [
        "nonsense",
        "dlq/q/0",
        "dlq/q/x/1",
        f"dlq/q/0/{1 << 64}",
        f"dlq/q/{1 << 64}/0",
        "dlq/q/0/٣",
        b"dlq/\xff/x",
    ],
)
async def test_dead_letter_is_identified_by_partition_and_sequence(
    harness: BulkHarness, dead_letter: str | bytes
) -> None:
    await harness.make()
    table = pa.table({"value": [b"x"], COLUMN: [dead_letter]})
    stage = await harness.stage(table, 0, "repairs")
    reported = await harness.refused(
        400,
        "invalid_batch",
        "POST",
        "/bulk/stages/repairs/0/commit",
        json={"stages": [stage["stage"]]},
    )
    assert "QUEUE/PARTITION/SEQUENCE" in reported["do"]


async def test_only_a_dead_letter_can_be_replaced(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("alive")
    stage = await harness.stage(
        pa.table({"value": [b"x"], COLUMN: [f"{harness.queue}/0/0"]}), 0, "theft"
    )
    reported = await harness.refused(
        400,
        "invalid_batch",
        "POST",
        "/bulk/stages/theft/0/commit",
        json={"stages": [stage["stage"]]},
    )
    assert "not a dead-letter queue" in reported["message"]
    assert (await harness.rows()).num_rows == 1


def test_stage_that_does_not_fit_on_disk_is_refused_with_a_remedy_and_dropped(
    tmp_path: Path,
) -> None:
    stages = StageStore(tmp_path, 1 << 20, 1 << 20, 60.0)
    upload = stages.begin("app", 0, "queue")
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    upload._file.close()
    upload._file = full
    with pytest.raises(StageUnwritable, match=r"No space left on device. Free space"):
        upload.write(b"x" * 100_000)  # more than the buffer holds
    upload.abandon()
    assert stages.bytes == 0 and not any((tmp_path / "bulk/stages").iterdir())
    with pytest.raises(StaleBatch):
        stages.find("app", 0, [upload.stage.name])

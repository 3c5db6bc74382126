"""What a bulk reader gets: rows, columns, gaps and errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import trustme

from sluice.bulk.arrow import build_schema
from sluice.bulk.read_throttle import ReadThrottle
from sluice.bulk.read_worker import NICE
from sluice.bulk.readers import PartitionRange, ReadRequest, WorkerPool, WorkerProcess
from tests.admin.rest.conftest import until
from tests.bulk.conftest import CONFIG, BulkHarness, read_arrow
from tests.support.broker_process import StartBroker


def values(count: int, size: int = 0) -> pa.Table:
    return pa.table({"value": [b"%06d" % nth + b"x" * size for nth in range(count)]})


async def test_range_has_every_row_in_order_with_spark_types(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("one", key="k", message_id="mine")
    await harness.publish("two")
    table = await harness.rows()
    assert table.schema == pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("queue", pa.string()),
            ("partition", pa.int32()),
            ("sequence", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("message_id", pa.string()),
            ("attempt", pa.int32()),
            ("topic", pa.string()),
        ]
    )
    first, second = table.to_pylist()
    assert (first["key"], first["value"], first["message_id"]) == (b"k", b"one", "mine")
    assert (second["key"], second["value"], second["sequence"]) == (None, b"two", 1)
    assert second["message_id"].endswith("-1")
    assert (second["queue"], second["partition"], second["attempt"]) == (harness.queue, 0, 1)
    assert second["topic"] == f"$queue/{harness.queue}"
    assert abs((datetime.now(UTC) - second["timestamp"]).total_seconds()) < 60


async def test_range_of_many_batches_is_complete(harness: BulkHarness) -> None:
    await harness.make(limits={"max_queue_depth": 1_000_000})
    await harness.fill(values(20_000, 100))
    table = await harness.rows()
    assert table.column("value").to_pylist() == values(20_000, 100).column("value").to_pylist()
    assert table.column("sequence").to_pylist() == list(range(20_000))
    part = await harness.rows(start=8_000, end=16_500, columns="sequence,value")
    assert part.column_names == ["sequence", "value"]
    assert part.column("sequence").to_pylist() == list(range(8_000, 16_500))
    assert [len(batch) <= 8192 for batch in table.to_batches()] == [True] * len(table.to_batches())


async def test_partitions_read_together_are_complete_and_each_in_order(
    harness: BulkHarness,
) -> None:
    await harness.make(partitions=3, limits={"max_queue_depth": 1_000_000})
    keys = [b"%d" % (nth % 50) for nth in range(20_000)]
    for batch in range(2):  # the second is after the first, and both have some of each partition
        await harness.fill(values(20_000, 100).append_column("key", [keys]), batch)
    ends = {str(one["partition"]): one["latest"] for one in await harness.offsets()}
    table = await harness.ranges({"0": [10, ends["0"]], "2": [0, ends["2"]], "1": [5, 5]})
    alone = {0: await harness.rows(0, start=10, end=ends["0"]), 2: await harness.rows(2)}
    for number, expected in alone.items():
        found = table.filter(pc.equal(table.column("partition"), number))
        assert found.combine_chunks() == expected.combine_chunks(), f"partition {number}"
    assert table.num_rows == sum(one.num_rows for one in alone.values())
    narrow = await harness.ranges({"2": [0, 3], "0": [0, 2]}, columns="value")
    assert (narrow.column_names, narrow.num_rows) == (["value"], 5)
    assert (await harness.ranges({"1": [0, 0], "0": [3, 3]})).num_rows == 0


async def test_all_ranges_are_refused_if_one_is_incomplete(harness: BulkHarness) -> None:
    await harness.make(partitions=2)
    await harness.fill(values(10))
    ends = {str(one["partition"]): one["latest"] for one in await harness.offsets()}
    path = f"/bulk/queues/{harness.queue}/rows"
    ranges = json.dumps({"0": [0, ends["0"]], "1": [0, ends["1"] + 1]})
    reported = await harness.refused(410, "out_of_range", "GET", path, params={"ranges": ranges})
    assert f"partition 1 of queue {harness.queue!r} goes up to {ends['1']}" in reported["message"]
    await harness.refused(
        404, "unknown_partition", "GET", path, params={"ranges": '{"0": [0, 1], "7": [0, 1]}'}
    )


@pytest.mark.parametrize(
    "ranges", ["", "{}", "[0]", '{"0": [1]}', '{"0": 1}', '{"x": [0, 1]}', '{"0": [-1, 2]}']
)
async def test_malformed_ranges_are_refused_with_an_explanation(
    harness: BulkHarness, ranges: str
) -> None:
    await harness.make()
    reported = await harness.refused(
        400,
        "invalid_request",
        "GET",
        f"/bulk/queues/{harness.queue}/rows",
        params={"ranges": ranges},
    )
    assert "ranges" in reported["message"]


async def test_empty_range_is_a_schema_without_rows(harness: BulkHarness) -> None:
    await harness.make()
    table = await harness.rows()
    assert table.num_rows == 0
    assert "value" in table.column_names


async def test_headers_are_a_map_of_the_user_properties(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish(
        "one",
        properties=[["tenant", "north"], ["tenant", "south"], ["unit", "°C"]],
        content_type="a/b",
    )
    await harness.publish("two")
    table = await harness.rows(headers=True)
    assert table.schema.field("headers").type == pa.map_(pa.string(), pa.binary())
    first, second = table.column("headers").to_pylist()
    assert dict(first) == {"tenant": b"south", "unit": "°C".encode(), "content-type": b"a/b"}
    assert len(first) == 3, "each name once"
    assert second == []


async def test_compressed_payloads_are_read_decompressed(harness: BulkHarness) -> None:
    await harness.make(performance={"compression": "zstd"})
    payloads = ["y" * 5000, "short", "z" * 3000]
    for payload in payloads:
        await harness.publish(payload)
    table = await harness.rows()
    assert table.column("value").to_pylist() == [payload.encode() for payload in payloads]


async def test_bound_messages_have_their_topic(harness: BulkHarness) -> None:
    await harness.make(bindings=[f"sensors/{harness.queue}/+"])
    async with harness.client(f"sensor-{harness.queue}") as client:
        await client.publish(f"sensors/{harness.queue}/a", b"20", qos=1)
    table = await harness.rows()
    assert table.column("topic").to_pylist() == [f"sensors/{harness.queue}/a"]


async def test_dead_letters_have_additional_columns(harness: BulkHarness) -> None:
    await harness.make()
    await harness.reject(b"poison", message_id="bad-1")
    dead_letters = f"dlq${harness.queue}"
    offsets = await harness.ok("GET", f"/bulk/queues/{dead_letters}/offsets")
    assert offsets["dead_letters"] is True
    found = [
        row
        for one in offsets["partitions"]
        for row in (await harness.rows(one["partition"], dead_letters, headers=True)).to_pylist()
    ]
    [dead_letter] = found
    assert dead_letter["value"] == b"poison"
    assert dead_letter["original_queue"] == harness.queue
    assert dead_letter["original_topic"] == f"$queue/{harness.queue}"
    assert (dead_letter["original_partition"], dead_letter["original_sequence"]) == (0, 0)
    assert dead_letter["original_message_id"] == "bad-1"
    assert (dead_letter["original_group"], dead_letter["attempts"]) == ("w", 1)
    assert (dead_letter["reason"], dead_letter["description"]) == ("rejected", "no good")
    for name in ("first_attempt", "last_attempt", "dead_at"):
        assert abs((datetime.now(UTC) - dead_letter[name]).total_seconds()) < 60
    assert dict(dead_letter["headers"])["dead-reason"] == b"rejected"
    plain = await harness.rows(queue=harness.queue, start=0, end=0, columns="reason,value")
    assert plain.schema == build_schema(["reason", "value"])


async def test_missing_dead_letter_fields_are_null(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("not dead at all")
    [row] = (
        await harness.rows(columns="original_queue,original_sequence,attempts,dead_at")
    ).to_pylist()
    assert set(row.values()) == {None}


async def test_range_before_the_earliest_sequence_is_refused_with_the_earliest(
    harness: BulkHarness,
) -> None:
    await harness.make()
    await harness.fill(values(10))
    await harness.ok(
        "PUT",
        f"/bulk/queues/{harness.queue}/groups/spark/progress",
        json={"partitions": {"0": 4}, "create": True},
    )
    rows = f"/bulk/queues/{harness.queue}/partitions/0/rows"
    reported = await harness.refused(
        410, "out_of_range", "GET", rows, params={"start": 3, "end": 10}
    )
    assert (reported["earliest"], reported["latest"]) == (4, 10)
    assert (await harness.rows(start=3, end=10, lenient=True)).num_rows == 6
    reported = await harness.refused(
        410, "out_of_range", "GET", rows, params={"start": 4, "end": 11}
    )
    assert "up to 10" in reported["message"]
    assert (await harness.rows(start=4, end=11, lenient=True)).num_rows == 6
    assert (await harness.rows(start=0, end=2**53, lenient=True)).num_rows == 6
    assert (await harness.rows(start=2, end=2)).num_rows == 0


async def test_count_is_that_of_a_read_of_the_same_ranges(harness: BulkHarness) -> None:
    await harness.make(partitions=2)
    await harness.fill(values(5_000))
    path = f"/bulk/queues/{harness.queue}"
    ends = {str(one["partition"]): one["latest"] for one in await harness.offsets()}
    await harness.ok(
        "PUT", f"{path}/groups/spark/progress", json={"partitions": {"0": 40}, "create": True}
    )
    ranges = {number: [7, end] for number, end in ends.items()}
    query = {"ranges": json.dumps(ranges)}
    await harness.refused(410, "out_of_range", "GET", f"{path}/rows/count", params=query)
    query["lenient"] = "true"
    found = await harness.ok("GET", f"{path}/rows/count", params=query)
    rows = await harness.ranges(ranges, lenient=True)
    counts = Counter(str(number) for number in rows.column("partition").to_pylist())
    assert found == {"partitions": dict(counts)}
    assert counts["0"] == ends["0"] - 40


async def test_gaps_inside_a_range_are_no_error(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("kept")
    await harness.publish("short lived", expiry="1s")
    await harness.publish("kept too")
    async with asyncio.timeout(30):
        # The only way to see it is to poll.
        while (await harness.ok("GET", f"/queues/{harness.queue}/stats"))["total_messages"] > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    table = await harness.rows(start=0, end=3)
    assert table.column("sequence").to_pylist() == [0, 2]


@pytest.mark.parametrize(
    ("query", "status", "error"),
    [
        ("start=0&end=1&columns=nonsense", 400, "invalid_request"),
        ("start=0&end=1&columns=key,key", 400, "invalid_request"),
        ("start=-1&end=1", 400, "invalid_request"),
        ("end=1", 400, "invalid_request"),
        ("start=0&end=1&more=1", 400, "invalid_request"),
    ],
)
async def test_invalid_requests_are_refused_with_an_explanation(
    harness: BulkHarness, query: str, status: int, error: str
) -> None:
    await harness.make()
    await harness.refused(
        status, error, "GET", f"/bulk/queues/{harness.queue}/partitions/0/rows?{query}"
    )


async def test_missing_resources_are_refused(harness: BulkHarness) -> None:
    await harness.refused(404, "unknown_queue", "GET", "/bulk/queues/nix/offsets")
    await harness.refused(
        404, "unknown_queue", "GET", "/bulk/queues/nix/partitions/0/rows?start=0&end=1"
    )
    await harness.make()
    await harness.refused(
        404,
        "unknown_partition",
        "GET",
        f"/bulk/queues/{harness.queue}/partitions/1/rows?start=0&end=1",
    )
    await harness.refused(
        404, "unknown_group", "GET", f"/bulk/queues/{harness.queue}/groups/nix/progress"
    )


# ---- offsets


async def test_offsets_by_time(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("before")
    await asyncio.sleep(0.02)
    between = time.time()
    await asyncio.sleep(0.02)
    await harness.publish("after")
    path = f"/bulk/queues/{harness.queue}/offsets/at"
    assert (await harness.ok("GET", path, params={"time": f"@{between:.3f}"}))["partitions"] == {
        "0": 1
    }
    assert (await harness.ok("GET", path, params={"time": "2001-01-01T00:00:00Z"}))[
        "partitions"
    ] == {"0": 0}
    later = datetime.fromtimestamp(between + 3600, UTC).isoformat()
    assert (await harness.ok("GET", path, params={"time": later}))["partitions"] == {"0": 2}
    await harness.refused(400, "invalid_request", "GET", path, params={"time": "yesterday"})


async def test_long_poll_is_answered_by_the_next_commit(harness: BulkHarness) -> None:
    await harness.make()
    await harness.publish("one")
    path = f"/bulk/queues/{harness.queue}/offsets"
    now = await harness.ok("GET", path, params={"wait": 20, "after": '{"0": 0}'})
    assert now["partitions"][0]["latest"] == 1, "there are new messages already"
    waiting = asyncio.create_task(
        harness.ok("GET", path, params={"wait": 300, "after": '{"0": 1}'})
    )
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await harness.publish("two")
    assert (await waiting)["partitions"][0]["latest"] == 2


async def test_long_poll_without_news_times_out(harness: BulkHarness) -> None:
    await harness.make()
    began = time.monotonic()
    found = await harness.ok(
        "GET", f"/bulk/queues/{harness.queue}/offsets", params={"wait": 1, "after": '{"0": 0}'}
    )
    assert found["partitions"][0]["latest"] == 0
    assert time.monotonic() - began > 0.9


async def test_long_poll_ends_when_the_server_stops(own_harness: BulkHarness) -> None:
    await own_harness.make()
    path = f"/bulk/queues/{own_harness.queue}/offsets"
    waiting = asyncio.create_task(
        own_harness.api.get(path, params={"wait": 60, "after": '{"0": 0}'})
    )
    for _ in range(5):  # until the server has read the earlier requests
        await own_harness.ok("GET", path)
    await asyncio.to_thread(own_harness.broker.stop)
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]) == (503, "stopping")


# ---- the workers


def workers_of(harness: BulkHarness) -> list[int]:
    """Return the worker processes of a broker."""
    parent = harness.broker.process.pid
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as line:
                    is_child = int(stat.read().rpartition(")")[2].split()[1]) == parent
                    if is_child and "sluice.bulk.read_worker" in line.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def worker_of(harness: BulkHarness) -> int:
    """Return the only worker process."""
    [worker] = workers_of(harness)
    return worker


async def test_concurrent_readers_have_separate_processes_that_outlive_each_other(
    own_harness: BulkHarness,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a core has one process")
    harness = own_harness
    await harness.make(limits={"max_queue_depth": 1_000_000})
    for batch in range(10):
        await harness.fill(values(300, 10_000), batch)
    url = f"/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=3000"
    parts: list[bytes] = []
    async with harness.api.stream("GET", url) as answer:
        pieces = answer.aiter_raw(65_536)
        await anext(pieces)
        first = worker_of(harness)
        async with harness.api.stream("GET", url) as other:
            assert len(workers_of(harness)) == 2
            os.kill(first, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in pieces:
                    pass
            async for piece in other.aiter_raw():
                parts.append(piece)
    assert read_arrow(b"".join(parts)).num_rows == 3_000
    assert (await harness.rows(start=0, end=500)).num_rows == 500
    assert first not in workers_of(harness)


async def test_next_reader_reuses_the_process_and_a_concurrent_one_gets_its_own(
    tmp_path: Path,
) -> None:
    pool = WorkerPool(lambda queue: str(tmp_path), ReadThrottle(), max_workers=2)
    wanted = ReadRequest("q", (PartitionRange(0, 0, 1),), ["value"])
    output, controls = socket.socket(), list[socket.socket]()

    def begin() -> WorkerProcess:
        worker, control = pool.begin_read(wanted, [5], output.fileno(), False)
        controls.append(control)
        return worker

    try:
        first = begin()
        pool.finish_read(first)
        assert begin() is first, "it has no other reader"
        second = begin()
        assert second is not first
        pool.finish_read(second)
        assert begin() is second, "it has the fewest readers"
        assert begin() in (first, second), "there are no more than two"
    finally:
        for end in (output, *controls):
            end.close()
        pool.close()


def maps_of(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as maps:
        return maps.read()


async def test_worker_lowers_its_priority_once_ready_and_loads_no_pandas(
    own_harness: BulkHarness,
) -> None:
    harness = own_harness
    await harness.make()
    await harness.fill(values(10))
    assert (await harness.rows()).num_rows == 10
    worker = worker_of(harness)
    lowest = 19  # the system's limit: a suite that runs under `nice` may be near it
    broker = os.getpriority(os.PRIO_PROCESS, 0)  # the broker has the niceness of this process
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(broker + NICE, lowest)
    maps = maps_of(worker)
    assert "/pyarrow/" in maps
    assert "/pandas/" not in maps


async def test_killed_worker_is_an_error_to_its_readers_only(own_harness: BulkHarness) -> None:
    harness = own_harness
    await harness.make(limits={"max_queue_depth": 1_000_000})
    for batch in range(10):
        await harness.fill(values(300, 10_000), batch)
    url = f"/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=3000"
    async with harness.api.stream("GET", url) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_raw(65_536)
        await anext(pieces)
        os.kill(worker_of(harness), signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass
    await harness.publish("all is well")
    assert (await harness.rows(start=0, end=3_000)).num_rows == 3_000, "another worker is used"
    assert "ERROR" not in harness.broker.log_text().upper()


async def test_slow_reader_gets_everything_and_blocks_no_other(own_harness: BulkHarness) -> None:
    harness = own_harness
    await harness.make(limits={"max_queue_depth": 1_000_000})
    for batch in range(10):
        await harness.fill(values(300, 10_000), batch)
    url = f"/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=3000"
    parts: list[bytes] = []
    async with harness.api.stream("GET", url) as answer:
        pieces = answer.aiter_raw(1 << 16)
        parts.append(await anext(pieces))
        memory = []
        for _ in range(3):  # the slow client reads nothing, while others read and publish
            assert (await harness.rows(start=0, end=500)).num_rows == 500
            await harness.publish("meanwhile")
            memory.append(sum(map(resident, [*workers_of(harness), harness.broker.process.pid])))
        assert max(memory) - min(memory) < 64 << 20
        async for piece in pieces:
            parts.append(piece)
    assert read_arrow(b"".join(parts)).num_rows == 3_000


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as facts:
        return int(facts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_disconnected_reader_is_forgotten(own_harness: BulkHarness) -> None:
    harness = own_harness
    await harness.make(limits={"max_queue_depth": 1_000_000})
    for batch in range(10):
        await harness.fill(values(300, 10_000), batch)
    url = f"/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=3000"
    for _ in range(40):  # more than the limit of concurrent readers
        async with harness.api.stream("GET", url) as answer:
            assert answer.status_code == 200
    await until(lambda: sum(map(threads_of, workers_of(harness))) < 20)
    assert (await harness.rows(start=0, end=3_000)).num_rows == 3_000
    assert "ERROR" not in harness.broker.log_text().upper()


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_worker_ends_with_the_broker(start_broker: StartBroker, end: str) -> None:
    harness = BulkHarness(start_broker(), "q")
    await harness.make()
    await harness.publish("one")
    await harness.rows()
    worker = worker_of(harness)
    assert worker
    await harness.api.aclose()
    getattr(harness.broker, end)()
    await until(lambda: not Path(f"/proc/{worker}").exists())


@pytest.mark.timeout(180)  # it writes two hundred megabytes
async def test_messages_moved_by_compaction_are_found(start_broker: StartBroker) -> None:
    """Segments are deleted during a read; compaction moved live messages, which are read again."""
    harness = BulkHarness(start_broker(), "q")
    await harness.make(limits={"max_queue_depth": 1_000_000})
    await harness.ok(
        "POST",
        "/queues",
        json={"name": "filler", "partitions": 1, "limits": {"max_queue_depth": 1_000_000}},
    )
    filler = BulkHarness(harness.broker, "filler")
    first = harness.broker.folder / "data" / "00000001.log"
    stored: list[bytes] = []
    async with asyncio.timeout(150):
        # One live message to megabytes of others, which are settled at once.
        while first.exists():
            batch = len(stored)
            stored.append(b"kept %d" % batch)
            await harness.publish(f"kept {batch}")
            await filler.fill(values(200, 100_000), batch, "filler")
            progress = {"partitions": {"0": 200 * (batch + 1)}, "create": True}
            await filler.ok("PUT", "/bulk/queues/filler/groups/spark/progress", json=progress)
            assert (await harness.rows(columns="value")).column("value").to_pylist() == stored
    assert (await harness.rows(columns="value")).column("value").to_pylist() == stored
    await filler.api.aclose()
    await harness.api.aclose()


async def test_response_goes_through_the_server_where_the_worker_cannot_write_it(
    own_harness: BulkHarness,
) -> None:
    """HTTP/1.0 has no chunks, so the worker cannot write them itself."""
    harness = own_harness
    await harness.make()
    await harness.fill(values(300, 10_000))
    reader, writer = await asyncio.open_connection(*harness.root.removeprefix("http://").split(":"))
    path = f"/api/v1/bulk/queues/{harness.queue}/partitions/0/rows?start=0&end=300"
    writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        data += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    assert read_arrow(data).num_rows == 300


async def test_over_tls_the_response_goes_through_the_server(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for blob in server.cert_chain_pems:
        blob.write_to_path(str(tmp_path / "cert.pem"), append=True)
    tls = (
        f'\n[tls]\ncert = "{tmp_path / "cert.pem"}"\nkey = "{tmp_path / "key.pem"}"\nhttp = true\n'
    )
    harness = BulkHarness(start_broker(config=CONFIG + tls), "q")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    await harness.api.aclose()
    root = harness.root.replace("http:", "https:")
    harness.api = httpx.AsyncClient(base_url=f"{root}/api/v1", timeout=30, verify=context)
    await harness.make(limits={"max_queue_depth": 1_000_000})
    for batch in range(5):
        await harness.fill(values(300, 10_000), batch)
    assert (await harness.rows()).num_rows == 1500
    await harness.api.aclose()

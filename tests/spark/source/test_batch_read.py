"""What the source reads and refuses, option by option. No Java: the test plays Spark's part."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from sluice.access.api_tokens import make_token, write_tokens
from sluice.access.identity import Role
from sluice.bulk import arrow
from sluice.spark import BulkClient, Endpoint
from sluice.spark.errors import BrokerGone, DataLost, InvalidOption, Refused
from sluice.spark.source import range_reader
from sluice.spark.source.columns import default_schema, schema_of
from sluice.spark.source.source_options import READ_OPTIONS, WRITE_OPTIONS, read_options
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import StartBroker

ROOT = Path(__file__).parents[3]


# ---- columns


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("dead_letters", [False, True])
def test_columns_are_those_of_the_bulk_api(headers: bool, dead_letters: bool) -> None:
    ours = to_arrow_schema(default_schema(headers, dead_letters), timezone="UTC")
    assert ours.equals(arrow.build_schema(arrow.default_columns(headers, dead_letters)))


def test_message_is_a_row_with_all_its_properties(harness: SparkHarness) -> None:
    harness.fill(["cat"], key="k", message_id=["m-1"])
    [row] = harness.read(includeHeaders="True")
    assert (row["key"], row["value"], row["queue"], row["sequence"]) == (
        b"k",
        b"cat",
        harness.queue,
        0,
    )
    assert (row["message_id"], row["attempt"], row["topic"]) == (
        "m-1",
        1,
        f"$queue/{harness.queue}",
    )
    assert dict(row["headers"]) == {"partition-key": b"k"}
    assert abs((datetime.now(UTC) - row["timestamp"]).total_seconds()) < 3600
    assert "headers" not in harness.read()[0]


async def test_dead_letter_rows_have_their_history(harness: SparkHarness) -> None:
    harness.make()
    await harness.reject(b"bad")
    dead_letters = f"dlq/{harness.queue}"
    [row] = harness.read(subscribe=dead_letters)
    assert (row["value"], row["original_queue"], row["original_group"]) == (
        b"bad",
        harness.queue,
        "w",
    )
    assert (row["reason"], row["description"], row["attempts"]) == ("rejected", "no good", 1)
    both = harness.read(subscribe=f"{dead_letters},{harness.queue}")
    assert [row["original_queue"] for row in both] == [harness.queue]


def test_option_selects_the_columns(harness: SparkHarness) -> None:
    harness.fill(["cat"], key="k")
    assert harness.read(columns="key, sequence") == [{"key": b"k", "sequence": 0}]
    source = harness.source(columns="key")
    assert source.schema().names == ["key"]
    with pytest.raises(InvalidOption, match=r"schema\(\) and option columns differ"):
        source.reader(schema_of(["value"]))


def test_columns_that_are_equal_in_a_partition_are_counted_and_not_read(
    harness: SparkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make(partitions=3)
    harness.fill([f"{nth}" for nth in range(100)])
    rows = harness.read()
    monkeypatch.delattr(BulkClient, "rows")
    monkeypatch.setattr(range_reader, "COUNTED_BATCH_ROWS", 7)
    counted = harness.read(columns="partition,queue,attempt")
    names = ("partition", "queue", "attempt")
    assert Counter(tuple(row[name] for name in names) for row in rows) == Counter(
        tuple(row.values()) for row in counted
    )


def test_user_schema_selects_the_columns(harness: SparkHarness) -> None:
    harness.fill(["a", "b"])
    reader = harness.source().reader(schema_of(["value", "partition"]))
    batch = next(reader.read(reader.partitions()[0]))
    assert batch.schema.names == ["value", "partition"]
    with pytest.raises(InvalidOption, match=r"'payload'.*Choose from key, value"):
        harness.source().reader(StructType([StructField("payload", StringType())]))
    with pytest.raises(InvalidOption, match=r"value is bigint. It is binary; cast"):
        harness.source().reader(StructType([StructField("value", LongType())]))


# ---- which queues


def test_several_queues_and_patterns(harness: SparkHarness) -> None:
    one, two, other = (f"{harness.queue}/{name}" for name in ("one", "two", "other"))
    for queue in (one, two, other):
        harness.fill([queue], queue)
    assert sorted(harness.values(subscribe=f"{one}, $queue/{two}")) == [one, two]
    assert sorted(harness.values(subscribePattern=f"{harness.queue}/(one|other)")) == [one, other]
    with pytest.raises(InvalidOption, match=r"no queue at http.* matches it.*whole name"):
        harness.read(subscribePattern=harness.queue)


# ---- start and end


def test_start_and_end_of_a_batch_read(harness: SparkHarness) -> None:
    harness.make(partitions=1)
    harness.fill(["0", "1", "2"])
    sequences = json.dumps({harness.queue: {"0": 1}})
    assert harness.values(startingOffsets=sequences) == ["1", "2"]
    assert harness.values(endingOffsets=sequences) == ["0"]
    assert harness.values(startingOffsets=json.dumps({harness.queue: {"0": -1}})) == []
    assert harness.values(startingOffsets=json.dumps({harness.queue: {"0": -2}})) == ["0", "1", "2"]
    assert harness.values(startingOffsets="latest") == []
    assert harness.values(startingOffsets=sequences, endingOffsets=sequences) == []
    harness.bulk_client.advance(harness.queue, "g", {0: 2}, create=True)
    assert harness.values(startingOffsets="group", group="g") == ["2"]
    assert harness.values(startingOffsets="group", group="not-yet") == ["2"]  # all that is stored
    with pytest.raises(DataLost, match=r"rows 1 to 3 .* failOnDataLoss=false"):
        harness.values(startingOffsets=sequences)
    assert harness.values(startingOffsets=sequences, failOnDataLoss="false") == ["2"]
    assert harness.values() == ["2"]


def test_deleted_rows_are_reported_with_the_options_of_a_batch_read(harness: SparkHarness) -> None:
    harness.make(partitions=1)
    harness.fill(["0", "1", "2"])
    harness.bulk_client.advance(harness.queue, "g", {0: 2}, create=True)
    with pytest.raises(
        DataLost, match=r"kept from 2 on.*startingOffsets earliest, or failOnData"
    ) as lost:
        harness.values(startingOffsets=json.dumps({harness.queue: {"0": 1}}))
    assert "stream" not in lost.value.remedy


@pytest.mark.parametrize("start", ["earliest", "group", '{"%s": {"0": 1}}'])
def test_offsets_beyond_the_end_are_refused_with_the_latest(
    start: str, harness: SparkHarness
) -> None:
    harness.make(partitions=1)
    harness.fill(["0", "1", "2"])
    beyond = json.dumps({harness.queue: {"0": 4}})
    reported = (
        rf"says 4 for partition 0 of queue '{harness.queue}', whose latest is 3.*at most 3, or -1"
    )
    given = {"startingOffsets": start.replace("%s", harness.queue), "group": "g"}
    with pytest.raises(InvalidOption, match=f"option endingOffsets {reported}"):
        harness.values(endingOffsets=beyond, **given)
    for lossy in ("true", "false"):
        with pytest.raises(InvalidOption, match=f"option startingOffsets {reported}"):
            harness.values(startingOffsets=beyond, failOnDataLoss=lossy)
    stream = harness.source(startingOffsets=beyond).streamReader(default_schema(False, False))
    with pytest.raises(InvalidOption, match=f"option startingOffsets {reported}"):
        stream.initialOffset()
    stream.stop()
    latest = json.dumps({harness.queue: {"0": 3}})
    assert harness.values(startingOffsets=latest, endingOffsets=latest) == []


def test_timestamps_limit_a_batch_read(harness: SparkHarness) -> None:
    harness.make(partitions=1)
    harness.fill(["old"])
    [row] = harness.read()
    stamp = row["timestamp"].timestamp()
    while True:
        harness.fill(["new"])
        new = harness.read()[-1]["timestamp"]
        if new.timestamp() > stamp:
            break
    assert "old" not in harness.values(startingTimestamp=new.isoformat())
    assert harness.values(startingTimestamp=new.isoformat())[-1] == "new"
    assert "old" in harness.values(endingTimestamp=f"{int(new.timestamp() * 1000)}")
    assert harness.values(startingTimestamp="2100-01-01") == []


def test_ranges_are_split_for_more_tasks(harness: SparkHarness) -> None:
    harness.make(partitions=2)
    harness.fill([f"{nth}" for nth in range(100)])
    assert [len(ranges) for ranges in harness.plan()] == [2]  # so short that one task takes both
    assert 7 <= len(harness.plan(minPartitions="8")) <= 9
    assert sorted(harness.values(minPartitions="8"), key=int) == [f"{nth}" for nth in range(100)]


# ---- refusals


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"startingOfsets": "latest"},
            "there is no option 'startingofsets'.*Did you mean startingOffsets",
        ),
        ({"subscribe": ""}, "no queue is named. Give subscribe"),
        ({"pushdown": "true"}, "option pushdown was removed.*startingOffsets.*startingTimestamp"),
        ({"provider": "sluice", "owner": "me"}, "cannot be a table of the catalog.*TEMPORARY VIEW"),
        ({"queue": "x", "subscribe": ""}, "no queue is named"),
        ({"columns": "key,colour"}, "option columns names 'colour'.*key, value, queue"),
        ({"columns": "key,key"}, "option columns names 'key' twice"),
        ({"subscribePattern": "x", "subscribe": "y"}, "both given"),
        ({"subscribePattern": "("}, "option subscribePattern.*regular expression"),
        (
            {"startingOffsets": "middle"},
            r"option startingOffsets is 'middle'.*earliest, latest, group, or JSON",
        ),
        ({"startingOffsets": '{"q": [1]}'}, "option startingOffsets"),
        ({"startingOffsets": '{"else": {"0": 1}}'}, "names queue 'else', which is not read"),
        ({"startingOffsets": "group"}, "Give the option group"),
        ({"startingOffsets": '{"q": {"0": 1.5}}'}, r"option startingOffsets is .*1\.5"),
        ({"startingOffsets": '{"q": {"0": true}}'}, "option startingOffsets is .*true"),
        ({"startingOffsets": '{"q": {"0": -3}}'}, "option startingOffsets is .*-3"),
        ({"endingOffsets": "earliest"}, "option endingOffsets is 'earliest'. Give latest, or JSON"),
        ({"endingOffsets": "foo"}, "option endingOffsets is 'foo'. Give latest, or JSON"),
        ({"endingOffsets": '{"q": {"0": 2.0}}'}, "option endingOffsets"),
        (
            {"minOffsetsPerTrigger": "-1"},
            "option minOffsetsPerTrigger is '-1'. Give a whole number from 0 on",
        ),
        (
            {"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"},
            "option minOffsetsPerTrigger is 6, and maxOffsetsPerTrigger is 5.*at most",
        ),
        ({"startingOffsets": "latest", "startingTimestamp": "2030-01-01"}, "both given"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp.*2030-01-31T12:00:00Z"),
        (
            {"startingTimestamp": "1969-12-31T23:59:59Z"},
            "option startingTimestamp is '1969.*from 1970 to 9999",
        ),
        (
            {"endingTimestamp": "253402300800000"},
            "option endingTimestamp is '253402300800000'.*from 1970",
        ),
        ({"minPartitions": "0"}, "option minPartitions is '0'. Give a whole number from 1 on"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss.*true or false"),
        ({"maxBytesPerTrigger": "lots"}, "option maxBytesPerTrigger.*16m"),
        ({"token": "a", "tokenFile": "b"}, "token and tokenFile are both given"),
        (
            {"tokenFile": "/nowhere/token"},
            "option tokenFile: /nowhere/token cannot be read.*every executor",
        ),
        ({"url": "localhost:8080"}, "option url is 'localhost:8080'.*http://127.0.0.1:8080"),
        (
            {"url": "http://127.0.0.1:99999"},
            "option url is 'http://127.0.0.1:99999'.*a port is 1 to 65535",
        ),
        ({"url": "http://[::1"}, r"option url is 'http://\[::1'"),
        ({"path": "tasks"}, r"load\(\) was given 'tasks'.*subscribe"),
        (
            {"subscribe": "not/there"},
            "option subscribe names 'not/there', and there is no such queue",
        ),
    ],
)
def test_invalid_option_is_named_with_a_remedy(
    options: dict[str, str], expected: str, harness: SparkHarness
) -> None:
    harness.fill(["x"])
    with pytest.raises(InvalidOption, match=expected):
        harness.read(**options)


def test_documented_defaults_are_accepted(harness: SparkHarness) -> None:
    options = read_options(
        harness.options(minOffsetsPerTrigger="0", endingOffsets="latest"), streaming=False
    )
    assert options == read_options(harness.options(), streaming=False)


def test_stream_refuses_an_end_option(harness: SparkHarness) -> None:
    with pytest.raises(InvalidOption, match=r"a stream has no end.*availableNow"):
        harness.source(endingOffsets="latest").streamReader(default_schema(False, False))


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs/spark.md").read_text("utf-8")
    assert [name for name in (*READ_OPTIONS, *WRITE_OPTIONS) if f"`{name}`" not in page] == []


def test_refused_login_names_the_token_option(start_broker: StartBroker, tmp_path: Path) -> None:
    made = {role.label: make_token(role.label, role, None) for role in (Role.VIEWER, Role.OPERATOR)}
    write_tokens(tmp_path / "tokens.toml", {name: token for name, (token, _) in made.items()})
    texts = {name: text for name, (_, text) in made.items()}
    (tmp_path / "viewer").write_text(texts["viewer"] + "\n")
    harness = SparkHarness(start_broker(f'[auth]\ntokens = "{tmp_path / "tokens.toml"}"\n'), "q")
    harness.bulk_client = BulkClient(Endpoint(harness.url, texts["operator"]))
    harness.fill(["a"])
    for options in ({}, {"token": "wrong"}):
        with pytest.raises(Refused, match=r"Give the option token or tokenFile"):
            harness.read(**options)
    assert harness.values(tokenFile=f"{tmp_path / 'viewer'}") == ["a"]
    stream = harness.source(token=texts["viewer"], group="g").streamReader(
        default_schema(False, False)
    )
    with pytest.raises(InvalidOption, match=r"option group is 'g': .*role"):
        stream.initialOffset()
    stream.stop()
    harness.close()


def test_unreachable_broker_is_waited_for_and_then_named(harness: SparkHarness) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BrokerGone, match=f"{url} did not answer for 1 s .*option url"):
            harness.read(url=url, retrySeconds="1")


# ---- connections that break


@contextmanager
def cutting_proxy(port: int, cuts: Callable[[int], int]) -> Iterator[int]:
    """Start a proxy to the broker that cuts the nth connection after `cuts(nth)` bytes; yield its
    port.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, target: socket.socket, most: int) -> None:
        try:
            while most > 0 and (data := source.recv(min(65536, most))):
                target.sendall(data)
                most -= len(data)
        except OSError:
            pass
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def serve() -> None:
        nth = 0
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            for source, target, most in ((near, far, 1 << 40), (far, near, cuts(nth))):
                thread = threading.Thread(target=pump, args=(source, target, most))
                thread.start()
                threads.append(thread)
            sockets.extend((near, far))
            nth += 1

    sockets: list[socket.socket] = []
    server = threading.Thread(target=serve)
    server.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
        for one in sockets:  # closing it would not wake a blocked accept
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()


def test_truncated_stream_resumes_after_the_last_row(harness: SparkHarness) -> None:
    harness.make(partitions=1)
    values = [f"{nth:06d}" for nth in range(30_000)]
    harness.fill(values)
    reader = harness.source().reader(schema_of(["value"]))
    [part] = reader.partitions()
    cuts = [300_000, 1000, 0, 700_000]
    with cutting_proxy(
        harness.broker.address("http").port, lambda nth: cuts[nth] if nth < len(cuts) else 1 << 40
    ) as port:
        bent = harness.source(url=f"http://127.0.0.1:{port}").reader(schema_of(["value"]))
        found = [
            row.decode() for batch in bent.read(part) for row in batch.column("value").to_pylist()
        ]
    assert found == values


def test_readers_can_be_pickled(harness: SparkHarness) -> None:
    harness.fill(["a"])
    reader = cloudpickle.loads(
        cloudpickle.dumps(harness.source().streamReader(default_schema(False, False)))
    )
    start = reader.initialOffset()
    again = cloudpickle.loads(
        cloudpickle.dumps(harness.source().streamReader(default_schema(False, False)))
    )
    assert json.dumps(again.initialOffset()) == json.dumps(start)
    reader.stop()
    again.stop()


def test_range_planned_for_a_queue_is_not_read_from_a_recreated_one(harness: SparkHarness) -> None:
    for lossy in ("true", "false"):
        harness.make()
        harness.fill(["a"])
        reader = harness.source(failOnDataLoss=lossy).reader(schema_of(["value"]))
        [part] = reader.partitions()
        assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success
        harness.make()
        harness.fill(["b", "c"])
        if lossy == "true":
            with pytest.raises(DataLost, match=r"deleted and made again.*new load"):
                list(reader.read(part))
        else:
            assert list(reader.read(part)) == []
        assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success


def test_token_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint("http://127.0.0.1:1", "secret"))


def test_batch_read_settles_nothing(harness: SparkHarness) -> None:
    harness.fill(["a"])
    harness.bulk_client.advance(harness.queue, "g", {}, create=True)
    harness.values(startingOffsets="group", group="g")
    assert harness.lag("g") == 1

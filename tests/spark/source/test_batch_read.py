"""What the source reads and refuses, option by option. No Java here: Spark's part is played by the test."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from sluice.access.identity import Role
from sluice.access.api_tokens import make_token, write_tokens
from sluice.bulk import arrow
from sluice.spark import Door, Where
from sluice.spark.source.columns import named, usual_schema
from sluice.spark.errors import BrokerGone, DataLost, InvalidOption, Refused
from sluice.spark.source.offsets import Range
from sluice.spark.source.source_options import READ, WRITE, read_options
from sluice.spark.source.pushdown import Bounds
from sluice.spark.source.batch_reader import NarrowingReader
from tests.support.broker_process import StartBroker
from tests.spark.conftest import House, ranges_of

ROOT = Path(__file__).parents[2]


# ---- columns


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("dead_letters", [False, True])
def test_the_columns_are_those_of_the_bulk_door(headers: bool, dead_letters: bool) -> None:
    ours = to_arrow_schema(usual_schema(headers, dead_letters), timezone="UTC")
    assert ours.equals(arrow.schema_of(arrow.usual(headers, dead_letters)))


def test_a_message_is_a_row_with_all_that_is_known_of_it(house: House) -> None:
    house.fill(["cat"], key="k", message_id=["m-1"])
    [row] = house.read(includeHeaders="True")
    assert (row["key"], row["value"], row["queue"], row["sequence"]) == (b"k", b"cat", house.queue, 0)
    assert (row["message_id"], row["attempt"], row["topic"]) == ("m-1", 1, f"$queue/{house.queue}")
    assert dict(row["headers"]) == {"partition-key": b"k"}
    assert abs((datetime.now(UTC) - row["timestamp"]).total_seconds()) < 3600
    assert "headers" not in house.read()[0]


async def test_dead_letters_tell_what_became_of_them(house: House) -> None:
    house.make()
    await house.reject(b"bad")
    letters = f"dlq/{house.queue}"
    [row] = house.read(subscribe=letters)
    assert (row["value"], row["original_queue"], row["original_group"]) == (b"bad", house.queue, "w")
    assert (row["reason"], row["description"], row["attempts"]) == ("rejected", "no good", 1)
    both = house.read(subscribe=f"{letters},{house.queue}")
    assert [row["original_queue"] for row in both] == [house.queue]


def test_a_schema_that_the_user_gives_chooses_the_columns(house: House) -> None:
    house.fill(["a", "b"])
    reader = house.source().reader(named(["value", "partition"]))
    batch = next(reader.read(reader.partitions()[0]))
    assert batch.schema.names == ["value", "partition"]
    with pytest.raises(InvalidOption, match=r"'payload'.*Choose from key, value"):
        house.source().reader(StructType([StructField("payload", StringType())]))
    with pytest.raises(InvalidOption, match=r"value is bigint. It is binary; cast"):
        house.source().reader(StructType([StructField("value", LongType())]))


# ---- which queues


def test_several_queues_and_patterns(house: House) -> None:
    one, two, other = (f"{house.queue}/{name}" for name in ("one", "two", "other"))
    for queue in (one, two, other):
        house.fill([queue], queue)
    assert sorted(house.values(subscribe=f"{one}, $queue/{two}")) == [one, two]
    assert sorted(house.values(subscribePattern=f"{house.queue}/(one|other)")) == [one, other]
    with pytest.raises(InvalidOption, match=r"no queue at http.* is called so.*whole name"):
        house.read(subscribePattern=house.queue)


# ---- from where to where


def test_where_a_batch_read_begins_and_ends(house: House) -> None:
    house.make(partitions=1)
    house.fill(["0", "1", "2"])
    sequences = json.dumps({house.queue: {"0": 1}})
    assert house.values(startingOffsets=sequences) == ["1", "2"]
    assert house.values(endingOffsets=sequences) == ["0"]
    assert house.values(startingOffsets=json.dumps({house.queue: {"0": -1}})) == []
    assert house.values(startingOffsets=json.dumps({house.queue: {"0": -2}})) == ["0", "1", "2"]
    assert house.values(startingOffsets="latest") == []
    assert house.values(startingOffsets=sequences, endingOffsets=sequences) == []
    house.door.advance(house.queue, "g", {0: 2}, create=True)
    assert house.values(startingOffsets="group", group="g") == ["2"]
    assert house.values(startingOffsets="group", group="not-yet") == ["2"]  # all that is kept
    with pytest.raises(DataLost, match=r"rows 1 to 3 .* failOnDataLoss=false"):
        house.values(startingOffsets=sequences)
    assert house.values(startingOffsets=sequences, failOnDataLoss="false") == ["2"]
    assert house.values() == ["2"]


def test_rows_that_are_gone_are_told_with_what_a_batch_read_can_do(house: House) -> None:
    house.make(partitions=1)
    house.fill(["0", "1", "2"])
    house.door.advance(house.queue, "g", {0: 2}, create=True)
    with pytest.raises(DataLost, match=r"kept from 2 on.*startingOffsets earliest, or failOnData") as lost:
        house.values(startingOffsets=json.dumps({house.queue: {"0": 1}}))
    assert "stream" not in lost.value.do


@pytest.mark.parametrize("start", ["earliest", "group", '{"%s": {"0": 1}}'])
def test_offsets_beyond_the_end_are_refused_with_the_latest(start: str, house: House) -> None:
    house.make(partitions=1)
    house.fill(["0", "1", "2"])
    beyond = json.dumps({house.queue: {"0": 4}})
    told = rf"says 4 for partition 0 of queue '{house.queue}', whose latest is 3.*at most 3, or -1"
    given = {"startingOffsets": start.replace("%s", house.queue), "group": "g"}
    with pytest.raises(InvalidOption, match=f"option endingOffsets {told}"):
        house.values(endingOffsets=beyond, **given)
    for lossy in ("true", "false"):
        with pytest.raises(InvalidOption, match=f"option startingOffsets {told}"):
            house.values(startingOffsets=beyond, failOnDataLoss=lossy)
    stream = house.source(startingOffsets=beyond).streamReader(usual_schema(False, False))
    with pytest.raises(InvalidOption, match=f"option startingOffsets {told}"):
        stream.initialOffset()
    stream.stop()
    latest = json.dumps({house.queue: {"0": 3}})
    assert house.values(startingOffsets=latest, endingOffsets=latest) == []


def test_times_bound_a_batch_read(house: House) -> None:
    house.make(partitions=1)
    house.fill(["old"])
    [row] = house.read()
    stamp = row["timestamp"].timestamp()
    while True:
        house.fill(["new"])
        new = house.read()[-1]["timestamp"]
        if new.timestamp() > stamp:
            break
    assert "old" not in house.values(startingTimestamp=new.isoformat())
    assert house.values(startingTimestamp=new.isoformat())[-1] == "new"
    assert "old" in house.values(endingTimestamp=f"{int(new.timestamp() * 1000)}")
    assert house.values(startingTimestamp="2100-01-01") == []


def test_ranges_are_split_for_more_tasks(house: House) -> None:
    house.make(partitions=2)
    house.fill([f"{nth}" for nth in range(100)])
    assert [len(ranges) for ranges in house.plan()] == [2]  # so short that one task takes both
    assert 7 <= len(house.plan(minPartitions="8")) <= 9
    assert sorted(house.values(minPartitions="8"), key=int) == [f"{nth}" for nth in range(100)]


# ---- filters


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("partition",), 1)], {(1, 0, 50)}),
        ([In(("partition",), (0, 1)), In(("partition",), (1, 2))], {(1, 0, 50)}),
        ([GreaterThan(("sequence",), 9), LessThan(("sequence",), 20)], {(0, 10, 20), (1, 10, 20)}),
        ([EqualTo(("sequence",), 7)], {(0, 7, 8), (1, 7, 8)}),
        ([EqualTo(("queue",), "another")], set()),
        ([EqualTo(("key",), b"x"), LessThan(("timestamp",), datetime(2100, 1, 1))], {(0, 0, 50), (1, 0, 50)}),
    ],
)
def test_filters_bound_what_is_fetched(filters: list[Filter], expected: set[tuple[int, int, int]]) -> None:
    bounds = Bounds.of(filters)
    found = [
        one for nth in (0, 1) for one in bounds.narrow(Range("q", nth, 0, 50)) if bounds.takes_queue("q")
    ]
    assert {(one.partition, one.start, one.end) for one in found} == expected


def test_a_reader_with_pushdown_fetches_less_and_leaves_the_filters_to_spark(house: House) -> None:
    house.make(partitions=1)
    house.fill([f"{nth}" for nth in range(10)])
    cases: list[tuple[list[Filter], list[tuple[int, int]]]] = [
        ([GreaterThanOrEqual(("sequence",), 7), EqualTo(("queue",), house.queue)], [(7, 10)]),
        ([GreaterThanOrEqual(("timestamp",), datetime(2100, 1, 1, tzinfo=UTC))], []),
        ([EqualTo(("queue",), "another")], []),
    ]
    for filters, expected in cases:
        reader = house.source(pushdown="true").reader(usual_schema(False, False))
        assert isinstance(reader, NarrowingReader)
        assert list(reader.pushFilters(filters)) == filters
        found = [one for some in ranges_of(reader.partitions()) for one in some]
        assert [(part.start, part.end) for part in found] == expected


def test_a_filter_on_the_queue_leaves_offsets_of_the_others_as_they_are(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    for queue in (one, two):
        house.make(queue)
        house.fill(["0", "1", "2"], queue)
    given = {name: json.dumps({one: {"0": at}, two: {"0": at}}) for name, at in OFFSETS.items()}
    reader = house.source(subscribe=f"{one},{two}", pushdown="true", **given).reader(named(["value"]))
    assert isinstance(reader, NarrowingReader)
    reader.pushFilters([EqualTo(("queue",), two)])
    [[part]] = ranges_of(reader.partitions())
    assert (part.queue, part.start, part.end) == (two, 1, 2)


OFFSETS = {"startingOffsets": 1, "endingOffsets": 2}


# ---- refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"startingOfsets": "latest"},
            "nobody knows the option 'startingofsets'.*Did you mean startingOffsets",
        ),
        ({"subscribe": ""}, "no queue is named. Give subscribe"),
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
        ({"endingTimestamp": "253402300800000"}, "option endingTimestamp is '253402300800000'.*from 1970"),
        ({"minPartitions": "0"}, "option minPartitions is '0'. Give a whole number from 1 on"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss.*true or false"),
        ({"maxBytesPerTrigger": "lots"}, "option maxBytesPerTrigger.*16m"),
        ({"token": "a", "tokenFile": "b"}, "token and tokenFile are both given"),
        ({"tokenFile": "/nowhere/token"}, "option tokenFile: /nowhere/token cannot be read.*every executor"),
        ({"url": "localhost:8080"}, "option url is 'localhost:8080'.*http://127.0.0.1:8080"),
        ({"url": "http://127.0.0.1:99999"}, "option url is 'http://127.0.0.1:99999'.*a port is 1 to 65535"),
        ({"url": "http://[::1"}, r"option url is 'http://\[::1'"),
        ({"path": "tasks"}, r"load\(\) was given 'tasks'.*subscribe"),
        ({"subscribe": "not/there"}, "option subscribe names 'not/there', and there is no such queue"),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(options: dict[str, str], told: str, house: House) -> None:
    house.fill(["x"])
    with pytest.raises(InvalidOption, match=told):
        house.read(**options)


def test_the_defaults_of_the_guide_can_be_given(house: House) -> None:
    options = read_options(house.options(minOffsetsPerTrigger="0", endingOffsets="latest"), streaming=False)
    assert options == read_options(house.options(), streaming=False)


def test_a_stream_refuses_an_end(house: House) -> None:
    with pytest.raises(InvalidOption, match=r"a stream has no end.*availableNow"):
        house.source(endingOffsets="latest").streamReader(usual_schema(False, False))


def test_every_option_is_in_the_guide() -> None:
    page = (ROOT / "docs/spark.md").read_text("utf-8")
    assert [name for name in (*READ, *WRITE) if f"`{name}`" not in page] == []


def test_a_login_that_is_refused_names_the_token(start_broker: StartBroker, tmp_path: Path) -> None:
    made = {role.word: make_token(role.word, role, None) for role in (Role.VIEWER, Role.OPERATOR)}
    write_tokens(tmp_path / "tokens.toml", {name: token for name, (token, _) in made.items()})
    texts = {name: text for name, (_, text) in made.items()}
    (tmp_path / "viewer").write_text(texts["viewer"] + "\n")
    house = House(start_broker(f'[auth]\ntokens = "{tmp_path / "tokens.toml"}"\n'), "q")
    house.door = Door(Where(house.url, texts["operator"]))
    house.fill(["a"])
    for options in ({}, {"token": "wrong"}):
        with pytest.raises(Refused, match=r"Give the option token or tokenFile"):
            house.read(**options)
    assert house.values(tokenFile=f"{tmp_path / 'viewer'}") == ["a"]
    stream = house.source(token=texts["viewer"], group="g").streamReader(usual_schema(False, False))
    with pytest.raises(InvalidOption, match=r"option group is 'g': .*role"):
        stream.initialOffset()
    stream.stop()
    house.close()


def test_a_broker_that_is_gone_is_waited_for_and_then_named(house: House) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(BrokerGone, match=f"{url} did not answer for 1 s .*option url"):
            house.read(url=url, retrySeconds="1")


# ---- lines that break


@contextmanager
def cutting_proxy(port: int, cuts: Callable[[int], int]) -> Iterator[int]:
    """A way to the broker that is cut after `cuts(nth)` bytes of the nth connection; its port."""
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
        for one in sockets:  # to close it would not wake who waits in it
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()


def test_a_stream_that_is_cut_short_goes_on_behind_the_last_row(house: House) -> None:
    house.make(partitions=1)
    values = [f"{nth:06d}" for nth in range(30_000)]
    house.fill(values)
    reader = house.source().reader(named(["value"]))
    [part] = reader.partitions()
    cuts = [300_000, 1000, 0, 700_000]
    with cutting_proxy(
        house.broker.address("http").port, lambda nth: cuts[nth] if nth < len(cuts) else 1 << 40
    ) as port:
        bent = house.source(url=f"http://127.0.0.1:{port}").reader(named(["value"]))
        found = [row.decode() for batch in bent.read(part) for row in batch.column("value").to_pylist()]
    assert found == values


def test_readers_travel_as_they_are(house: House) -> None:
    house.fill(["a"])
    reader = cloudpickle.loads(cloudpickle.dumps(house.source().streamReader(usual_schema(False, False))))
    start = reader.initialOffset()
    again = cloudpickle.loads(cloudpickle.dumps(house.source().streamReader(usual_schema(False, False))))
    assert json.dumps(again.initialOffset()) == json.dumps(start)
    reader.stop()
    again.stop()


def test_what_was_planned_of_a_queue_is_not_read_of_another_of_its_name(house: House) -> None:
    for lossy in ("true", "false"):
        house.make()
        house.fill(["a"])
        reader = house.source(failOnDataLoss=lossy).reader(named(["value"]))
        [part] = reader.partitions()
        assert house.api.delete(f"/queues/{house.queue}?force=true").is_success
        house.make()
        house.fill(["b", "c"])
        if lossy == "true":
            with pytest.raises(DataLost, match=r"deleted and made again.*new load"):
                list(reader.read(part))
        else:
            assert list(reader.read(part)) == []
        assert house.api.delete(f"/queues/{house.queue}?force=true").is_success


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Where("http://127.0.0.1:1", "secret"))


def test_nothing_is_settled_by_a_batch_read(house: House) -> None:
    house.fill(["a"])
    house.door.advance(house.queue, "g", {}, create=True)
    house.values(startingOffsets="group", group="g")
    assert house.lag("g") == 1

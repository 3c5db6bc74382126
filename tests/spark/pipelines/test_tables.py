"""Tables before and after crashes, and rows on their way to and from them: no Java, mostly no
broker.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import DeltaError
from typer.testing import CliRunner

from sluice.cli.pipelines import spark_command, stream_progress
from sluice.cli.pipelines.preflight import replace_options
from sluice.cli.root import app
from sluice.http_client import Endpoint
from sluice.spark import BulkClient, errors
from sluice.spark.errors import DataLost, InvalidOption, Refused
from sluice.spark.pipelines.jobs import archive, compact, replay, transform
from sluice.spark.pipelines.queues import MAX_APP_NAME, MAX_TRIES, Queues, app_name
from sluice.spark.pipelines.support import publish_batches, row_collection, stream_runner
from sluice.spark.pipelines.support.run_lock import RunInProgress, check_group_unused
from sluice.spark.pipelines.tables import (
    DeltaTable,
    ParquetTable,
    Table,
    delta,
    file_writer,
    open_table,
)
from tests.spark.conftest import SparkHarness

ROWS = [
    pa.RecordBatch.from_pydict({"value": [b"%d" % nth for nth in some]})
    for some in ((0, 1), (2, 3))
]


class RetriedFrame:
    """A DataFrame of one task, which Spark runs three times: the first is cut short, the second
    result is lost.
    """

    columns = ["value"]

    def mapInArrow(
        self, write: Callable[[Any], Iterator[pa.RecordBatch]], schema: str
    ) -> RetriedFrame:
        self._write = write
        return self

    def collect(self) -> list[dict[str, Any]]:
        with pytest.raises(ConnectionError):
            list(self._write(self._cut_short()))
        list(self._write(ROWS))
        return [row for batch in self._write(ROWS) for row in batch.to_pylist()]

    def _cut_short(self) -> Iterator[pa.RecordBatch]:
        yield ROWS[0]
        raise ConnectionError


def values(table: Table) -> list[bytes]:
    return [value for file in table.files() for value in pq.read_table(file)["value"].to_pylist()]


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_files_of_a_retried_task_are_in_no_table(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    table, rows = open_table(tmp_path, kind), RetriedFrame()
    assert table.add_batch("q", 0, rows) == 4  # type: ignore[arg-type]
    assert values(table) == [b"0", b"1", b"2", b"3"]
    if kind == "parquet":
        assert pq.read_table(tmp_path, partitioning=None).num_rows == 4
        assert not list((tmp_path / "_sluice" / "arriving").iterdir())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of synced files."""
    found: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: found.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    return found


def test_batch_counts_when_its_commit_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = RetriedFrame()
    log = tmp_path / "_delta_log"
    commits = [str(log / f"{number:020d}.json") for number in range(4)]
    table = DeltaTable(tmp_path)
    table.add_batch("q", 0, rows)
    first = synced.index(commits[0])
    assert synced[first : first + 4] == [*commits[:2], str(log), str(tmp_path.parent)]
    assert synced[-1] == str(tmp_path)  # the table, its first batch, and the parent directories
    table.add_batch("q", 1, rows)
    assert synced[-3:] == [commits[2], str(log), str(tmp_path)]
    synced.clear()
    assert (
        DeltaTable(tmp_path).add_batch("q", 1, rows) == 0
    )  # the process that committed it crashed before its sync
    assert commits[2] in synced
    table = DeltaTable(tmp_path / "last")
    table.replace_rows(rows, -1)
    assert str(tmp_path / "last" / "_delta_log" / f"{1:020d}.json") in synced


def test_parquet_batch_found_in_the_table_is_on_disk(tmp_path: Path, synced: list[str]) -> None:
    rows: Any = RetriedFrame()
    path = tmp_path / "new" / "table"
    for _ in range(2):  # the process that renamed it crashed before its sync
        ParquetTable(path).add_batch("q", 0, rows)
        assert synced[-1] == str(path) and {str(tmp_path / "new"), str(tmp_path)} <= set(synced)
        synced.clear()
    table = ParquetTable(path)
    table.has_batch = lambda key, batch: bool(synced)  # type: ignore[method-assign]  # another driver is faster
    assert table.add_batch("q", 0, rows) == 0
    assert synced[-1] == str(path)


def test_uncommitted_files_of_others_are_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = RetriedFrame()
    table = DeltaTable(tmp_path)
    table.add_batch("q", 0, rows)
    log = tmp_path / "_delta_log"
    real, gone = file_writer.sync, log / f"{2:020d}.json"
    (log / f"{2:020d}.json#1").symlink_to("nothing")
    seen: list[Path] = []

    def sync(path: str | Path) -> None:
        seen.append(Path(path))
        if seen[-1] == gone:
            gone.unlink()  # as when old commits are cleaned up
        real(path)

    gone.touch()
    monkeypatch.setattr(delta, "sync", sync)
    table._sync_log()
    assert seen == [gone, log]


def test_table_failure_is_not_reported_as_a_concurrent_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = RetriedFrame()

    def fail(*arguments: object, **more: object) -> None:
        raise DeltaError("no room")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", fail)
    table = DeltaTable(tmp_path)
    for group in (
        "one",
        "two",
    ):  # a new table, and one with other properties
        with pytest.raises(DeltaError, match="no room"):
            table.replace_rows(rows, table.version(), {compact.GROUP_PROPERTY: group})
    assert table.version() == 1


def test_parquet_batches_keep_their_order_when_copied(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path)
    for nth, name in enumerate(
        ("one-000000000", "two-000000000", "one-000000001", "one-000000002")
    ):
        (tmp_path / f"batch={name}").mkdir()
        os.utime(tmp_path / f"batch={name}", (nth, nth))
        pq.write_table(pa.table({"value": [name]}), tmp_path / f"batch={name}" / "part.parquet")
        os.utime(tmp_path / f"batch={name}", (nth, nth))
    found = [Path(file).parent.name for file in table.files()]
    assert found == [
        f"batch={name}"
        for name in ("one-000000000", "two-000000000", "one-000000001", "one-000000002")
    ]
    for nth, name in enumerate(
        ("one-000000002", "one-000000000", "one-000000001", "two-000000000")
    ):
        os.utime(tmp_path / f"batch={name}", (nth, nth))
    found = [Path(file).parent.name for file in table.files()]
    assert found == [
        f"batch={name}"
        for name in ("one-000000000", "one-000000001", "one-000000002", "two-000000000")
    ]


# ---- batches


HEADERS = pa.map_(pa.string(), pa.binary())


def test_headers_count_towards_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_batches, "MAX_BATCH_BYTES", 64 << 10)
    large, none = [("authorization", b"x" * 1900), ("trace", None)], None
    reported = pa.array([large] * 200 + [none, []] * 10, HEADERS)
    table = pa.table({"value": [b"{}"] * 220, "headers": reported})
    for rows in (
        table,
        table.slice(7),
        pa.concat_tables([table.slice(150), table]),
    ):  # chunks, and slices of them
        cut = list(publish_batches.split_batches(rows))
        assert pa.concat_tables(cut).equals(rows)
        sizes = [len(publish_batches.arrow_stream_bytes(one)) for one in cut]
        assert max(sizes) < 64 << 10 < 2 * min(sizes[:-1])


BATCH_BYTES = pa.table({"value": [b"a", b"b"]})


def test_batch_with_a_lost_response_is_recognized_as_ones_own(
    harness: SparkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    queues, send = Queues(harness.where), BulkClient._send_request
    cut: list[str] = []

    def send_and_lose_response(
        self: BulkClient, method: str, path: str, *rest: Any, **more: Any
    ) -> Any:
        answer = send(self, method, path, *rest, **more)
        if path.endswith("/commit") and not cut:
            cut.append(path)
            raise ConnectionResetError
        return answer

    monkeypatch.setattr(BulkClient, "_send_request", send_and_lose_response)
    assert queues.publish(f"test/{harness.queue}", 1, harness.queue, BATCH_BYTES)
    assert cut and harness.values() == ["a", "b"]
    assert not queues.publish(
        f"test/{harness.queue}", 1, harness.queue, BATCH_BYTES
    )  # another run's
    assert harness.values() == ["a", "b"]


def test_batch_is_sent_again_to_a_broker_that_lost_it(
    harness: SparkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    queues, commit = Queues(harness.where), BulkClient.commit
    restarts = [True, True, False]

    def commit_after_a_restart(
        self: BulkClient, app: str, batch: int, stages: list[str], rows: int
    ) -> bool:
        if restarts.pop(0):
            harness.bulk_client.abort(app, batch)  # a broker restart loses the stages
        return commit(self, app, batch, stages, rows)

    monkeypatch.setattr(BulkClient, "commit", commit_after_a_restart)
    assert queues.publish(f"test/{harness.queue}", 1, harness.queue, BATCH_BYTES)
    assert harness.values() == ["a", "b"] and not restarts
    restarts += [True] * MAX_TRIES
    with pytest.raises(Refused, match="cannot be committed"):
        queues.publish(f"test/{harness.queue}", 2, harness.queue, BATCH_BYTES)


def test_oversized_message_is_refused_with_the_setting(harness: SparkHarness) -> None:
    harness.make()
    huge = pa.table({"value": [b"x" * (33 << 20)]})
    with pytest.raises(
        Refused,
        match=r"33554432 are accepted at once\. .*raise bulk\.max_batch_bytes on the broker",
    ):
        Queues(harness.where).publish(f"test/{harness.queue}", 1, harness.queue, huge)


def test_application_with_a_long_name_is_known_to_the_broker(harness: SparkHarness) -> None:
    harness.make()
    names = [app_name("compact", "q" * 300 + end) for end in ("a", "b")]
    assert len(set(names)) == 2 and app_name("compact", "q") == "compact/q"
    assert [len(name) for name in names] == [MAX_APP_NAME] * 2
    assert Queues(harness.where).publish(names[0], 1, harness.queue, BATCH_BYTES)
    assert [Queues(harness.where).last_batch_number(name) for name in names] == [1, 0]


# ---- what a run may take


def refusal(harness: SparkHarness, *words: str) -> str:
    ran = CliRunner().invoke(app, ["pipeline", *words, "--url", harness.url])
    assert ran.exit_code == 2, ran.output
    return ran.stderr


def test_new_run_does_not_reuse_a_group_of_another_run(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", None)
    harness.make()
    queues = Queues(harness.where)
    assert queues.settled_count(harness.queue, "archive") is None
    for group in ("archive", "transform"):
        harness.bulk_client.advance(harness.queue, group, {}, create=True)
    harness.fill(["a", "b"])
    assert (
        queues.settled_count(harness.queue, "archive") == 0
    )  # created in advance, so that messages are stored for it
    for group in ("archive", "transform"):
        harness.bulk_client.advance(harness.queue, group, {0: 1})
    assert queues.settled_count(harness.queue, "archive") == 1
    archive = ["archive", "-q", harness.queue, "--to", str(tmp_path / "second")]
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", str(tmp_path / "second")]
    for words in (archive, ["transform", "-q", harness.queue, "--to", "x", *sql]):
        refused = refusal(harness, *words)
        assert (
            f"group {words[0]} follows another run of this queue" in refused
            and "Give --group NAME" in refused
        )

    first = tmp_path / "first"
    (first / "offsets").mkdir(parents=True)
    with pytest.raises(InvalidOption, match="--checkpoint of that run"):
        check_group_unused(first, "archive", 1)
    for settled in (None, 0):
        check_group_unused(first, "archive", settled)
    (first / "offsets" / "0").touch()
    check_group_unused(first, "archive", 1)


def test_dead_letters_are_deleted_only_on_request(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", None)
    home = f"failed-{harness.queue}"
    harness.make(dlq_config={"topic": home})
    harness.make(home)
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", str(tmp_path / "checkpoint")]
    for words in (
        ["compact", "-q", home, "--to", str(tmp_path / "last")],
        ["transform", "-q", home, "--to", "x", *sql],
    ):
        refused = refusal(harness, *words)
        assert f"{home} holds dead letters" in refused and "Add --settle" in refused


def test_unreadable_query_and_unnamed_target_are_reported(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", None)
    harness.make()
    file = tmp_path / "query.sql"
    file.write_bytes("SELECT 'Größe' AS value FROM messages".encode("latin-1"))
    words = [
        "transform",
        "-q",
        harness.queue,
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--sql-file",
        str(file),
    ]
    assert "query.sql is not UTF-8, at byte 10" in refusal(harness, *words, "--to", "x")
    file.write_text("SELECT value FROM messages")
    assert "--to is empty" in refusal(harness, *words, "--to", "")


def test_braces_in_a_name_are_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    visit = spark_command.SparkCommandContext("archive", Endpoint("http://127.0.0.1:1"), False)
    done = stream_runner.StreamProgress(rows=3, batches=1)
    stream_progress.report_stream(
        visit, done, lambda read, written: f"Archived {read} of {{a}}/{{0}}", {"lag": 0}
    )
    assert "Archived 3 messages of {a}/{0} (1 batch" in capsys.readouterr().out


# ---- last values


def test_last_values_belong_to_one_group_of_one_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = RetriedFrame()
    about = {
        compact.QUEUE_PROPERTY: "q",
        compact.GROUP_PROPERTY: "compact",
        compact.INCARNATION_PROPERTY: "1-2",
    }
    check = compact.check_table_matches_group
    new, table = DeltaTable(tmp_path / "new"), DeltaTable(tmp_path / "table")
    for settled in (None, 0):
        check(new, about, settled, {0: 5})
    with pytest.raises(InvalidOption, match=r"for another table.*--group NAME"):
        check(new, about, 7, {0: 5})

    table.replace_rows(rows, -1, about, {0: 9, 1: 4})
    for settled, start in (
        (7, {0: 9, 1: 4}),
        (7, {0: 30, 1: 4}),
        (0, {0: 2, 1: 4}),
    ):  # 0: killed before it settled
        check(table, about, settled, start)
    with pytest.raises(InvalidOption, match="read by group compact"):
        check(table, {**about, compact.GROUP_PROPERTY: "other"}, 7, {})
    with pytest.raises(InvalidOption, match="holds the last values of q"):
        check(table, {**about, compact.QUEUE_PROPERTY: "other"}, 7, {})
    with pytest.raises(InvalidOption, match="made again since"):
        check(table, {**about, compact.INCARNATION_PROPERTY: "2-3"}, 7, {})
    # deleted, and another queue of its name
    for settled, start in ((None, {0: 9}), (0, {0: 10, 1: 4})):
        with pytest.raises(InvalidOption, match="may be gone with it"):
            check(table, about, settled, start)
    table.replace_rows(rows, table.version(), about, {0: 12, 1: 4})
    assert (table.reached_sequence(0), table.reached_sequence(1), table.reached_sequence(2)) == (
        12,
        4,
        None,
    )
    for _ in range(2):  # the second time nothing changes
        before = table.version()
        table.record_reached({0: 13, 1: 4})
        assert (table.reached_sequence(0), table.reached_sequence(1), len(values(table))) == (
            13,
            4,
            4,
        )
    assert table.version() == before
    compact.open_last_values(table.path)

    older = DeltaTable(tmp_path / "older")  # an older table without the property
    older.replace_rows(rows, -1)
    check(older, about, 7, {0: 9})
    older.replace_rows(rows, older.version(), about, {0: 9})
    assert about.items() <= older.properties().items()


def test_restored_last_values_are_updated_or_refused(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    monkeypatch.setattr(compact, "last_messages", lambda rows, by, drop_empty: rows)
    monkeypatch.setattr(compact, "_merge_rows", lambda table, version, fresh, spark: fresh)
    monkeypatch.setattr(compact, "_count_rows", lambda table, spark: 0)
    harness.make()
    harness.bulk_client.advance(harness.queue, "keeper", {}, create=True)

    class Loaded(RetriedFrame):
        def __init__(self, options: dict[str, str]) -> None:
            self.options = options

        def count(self) -> int:
            return len(harness.read(**self.options))

    def load(self: Queues, spark: object, queue: str, **options: str) -> Any:
        return Loaded(options)

    def read(**how: Any) -> int:
        spark: Any = None
        return compact.to_table(spark, Queues(harness.where), harness.queue, tmp_path, **how).read

    monkeypatch.setattr(Queues, "read", load)
    harness.fill(["a", "b"])
    assert read() == 2
    backup = shutil.copytree(tmp_path, tmp_path / "backup")
    harness.fill(["c"])
    assert (read(), read()) == (1, 0)
    deltalake.DeltaTable(tmp_path).restore(1)
    with pytest.raises(InvalidOption, match=r"restored to an older version.*--skip-lost"):
        read()
    shutil.rmtree(tmp_path / "_delta_log")
    shutil.copytree(backup, tmp_path, dirs_exist_ok=True)
    assert (read(), read()) == (
        1,
        0,
    )  # c again, which the group has settled and another group keeps
    shutil.rmtree(tmp_path / "_delta_log")
    shutil.copytree(backup, tmp_path, dirs_exist_ok=True)
    harness.bulk_client.advance(harness.queue, "keeper", {0: 3})
    harness.fill(["d"])
    with pytest.raises(DataLost, match="rows 2 to 4"):
        read()
    assert read(skip_lost=True) == 1
    deltalake.DeltaTable(tmp_path).restore(1)
    assert (read(skip_lost=True), read(skip_lost=True)) == (0, 0)
    harness.fill(["e"])
    assert (read(skip_lost=True), read()) == (1, 0)  # written to since
    asyncio.run(harness.reject(b"for others"))
    assert read() == 1
    assert harness.api.post(f"/queues/{harness.queue}/dlq/retry", json={}).is_success
    harness.bulk_client.advance(
        harness.queue, "w", harness.bulk_client.offsets(harness.queue).latest()
    )
    for _ in range(2):  # a gap that is no loss
        assert read() == 0
    harness.fill(["gone"])
    assert harness.api.post(f"/queues/{harness.queue}/purge", json={}).is_success
    with pytest.raises(DataLost, match="before Spark has read it in group 'compact'"):
        read()
    assert (read(skip_lost=True), read()) == (0, 0)


def test_last_values_start_while_workers_settle(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    harness.fill([str(nth) for nth in range(10)])
    harness.bulk_client.advance(harness.queue, "w", {}, create=True)
    work = iter([{0: 3}, {}])
    ends: list[dict[int, int]] = []

    def look(rows: object, by: str, drop_empty: bool) -> object:
        harness.bulk_client.advance(
            harness.queue, "w", next(work)
        )  # nothing is stored for compact yet
        return rows

    def load(self: Queues, spark: object, queue: str, **options: str) -> Any:
        return SimpleNamespace(count=lambda: len(harness.read(**options)))

    def replace(
        self: DeltaTable, rows: object, version: int, about: object, end: dict[int, int]
    ) -> int:
        ends.append(end)
        return 7

    monkeypatch.setattr(compact, "last_messages", look)
    monkeypatch.setattr(Queues, "read", load)
    monkeypatch.setattr(DeltaTable, "replace_rows", replace)
    spark: Any = None
    done = compact.to_table(spark, Queues(harness.where), harness.queue, tmp_path)
    assert (done.read, ends, harness.bulk_client.progress(harness.queue, "compact")) == (
        7,
        [{0: 10}],
        {0: 10},
    )

    harness.fill(["10"])

    def settle(
        *arguments: object,
    ) -> object:  # another run, into another table, while the group does not exist
        harness.bulk_client.advance(harness.queue, "other", {0: 11}, create=True)
        return arguments[0]

    monkeypatch.setattr(compact, "last_messages", settle)
    with pytest.raises(InvalidOption, match="for another table"):
        compact.to_table(spark, Queues(harness.where), harness.queue, tmp_path, group="other")


def test_messages_redriven_for_another_group_are_not_read(harness: SparkHarness) -> None:
    harness.make()
    harness.bulk_client.advance(harness.queue, "compact", {}, create=True)
    asyncio.run(harness.reject(b"old"))
    harness.fill(["new"])
    end = harness.bulk_client.offsets(harness.queue).latest()
    harness.bulk_client.advance(harness.queue, "compact", {0: 1})
    harness.bulk_client.advance(harness.queue, "w", end)
    assert harness.api.post(f"/queues/{harness.queue}/dlq/retry", json={}).is_success
    between = {"startingOffsets": json.dumps({harness.queue: {"0": 1}}), "endingOffsets": "latest"}
    assert harness.values(**between) == ["new", "old"]
    assert harness.values(**between, group="compact") == ["new"]
    assert harness.values(**between, group="not-yet") == ["new", "old"]


def test_rows_are_collected_up_to_a_size() -> None:
    def span(home: str, first: int, weight: int) -> row_collection.SequenceSpan:
        return row_collection.SequenceSpan(home, 0, first, first + 9, weight)

    spans = [
        span("a", 0, 60),
        span("a", 10, 40),
        span("a", 20, 1),
        span("b", 0, 200),
        span("b", 10, 5),
    ]
    assert [[one.bytes for one in part] for part in row_collection.group_spans(spans, 100)] == [
        [60, 40],
        [1],
        [200],
        [5],
    ]
    assert row_collection.group_spans([], 100) == []


# ---- replay


def archive_of(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Add a batch to an archive."""
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    batches = iter(range(9))

    def grow() -> None:
        rows: Any = RetriedFrame()
        open_table(path, kind).add_batch("q", next(batches), rows)

    grow()
    return grow


@pytest.mark.parametrize("kind", ["delta", "parquet"])
@pytest.mark.parametrize("name", ["", "mine"])
def test_replay_resumes_with_the_archive_it_started_with(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    harness.make()
    queues = Queues(harness.where)
    grow = archive_of(tmp_path, kind, monkeypatch)
    first = replay.plan(queues, tmp_path, harness.queue, name=name)
    grow()
    later = replay.plan(queues, tmp_path, harness.queue, name=name)
    assert first.published_batches == 0 and later.version > first.version  # nothing published yet
    assert first.app == later.app
    queues.publish(first.app, first.batch_number(1), harness.queue, BATCH_BYTES)
    again = replay.plan(queues, tmp_path, harness.queue, name=name)
    assert (again.published_batches, again.version, again.batch_number(2)) == (
        1,
        first.version,
        first.batch_number(2),
    )
    assert len(again.table.files(again.version)) == 1 and not again.is_newest
    other = replay.plan(queues, tmp_path, harness.queue, name=name, where="key IS NULL")
    assert (other.published_batches, other.version) == (
        0,
        later.version,
    )  # other filters leave out nothing
    monkeypatch.setattr(replay, "_batches", lambda spark, chosen, files: iter([BATCH_BYTES] * 2))
    spark: Any = None
    done = replay.run_plan(spark, queues, first)  # planned before the first batch was published
    assert (done.known, done.published) == (2, 2)
    with pytest.raises(
        replay.VersionConflict, match="another run"
    ):  # the archive had grown when it was planned
        replay.run_plan(spark, queues, later)
    assert replay.run_plan(spark, queues, first).known == 4
    assert harness.values() == ["a", "b"] * 2
    if kind == "delta" and name:
        assert (
            replay.plan(
                queues, tmp_path, harness.queue, name=name, version=first.version
            ).published_batches
            == 2
        )
        with pytest.raises(InvalidOption, match=f"began with version {first.version}"):
            replay.plan(queues, tmp_path, harness.queue, name=name, version=later.version)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_replay_does_not_resume_with_a_changed_archive(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    harness.make()
    queues = Queues(harness.where)
    grow = archive_of(tmp_path, kind, monkeypatch)
    grow()
    first = replay.plan(queues, tmp_path, harness.queue, name="mine")
    queues.publish(first.app, first.batch_number(1), harness.queue, BATCH_BYTES)
    grow()
    assert replay.plan(queues, tmp_path, harness.queue, name="mine").published_batches == 1
    if kind == "parquet":  # a batch of another query, which a copy has made older
        (tmp_path / "batch=other-000000000").mkdir()
        os.utime(tmp_path / "batch=other-000000000", (1, 1))
    else:
        deltalake.DeltaTable(tmp_path).optimize.compact()
        assert replay.plan(queues, tmp_path, harness.queue, name="mine").published_batches == 1
        deltalake.DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        InvalidOption, match=r"replay mine has published 1 of its batches.*another --name"
    ):
        replay.plan(queues, tmp_path, harness.queue, name="mine")
    assert replay.plan(queues, tmp_path, harness.queue, name="rest").published_batches == 0
    if kind == "delta":
        with pytest.raises(InvalidOption, match=r"does not keep version 1 .*Leave --version out"):
            replay.plan(queues, tmp_path, harness.queue, name="rest", version=1)
        (tmp_path / "_delta_log" / f"{0:020d}.json").unlink()
        assert not DeltaTable(tmp_path).has_version(1)


def test_replay_started_by_an_earlier_version_is_not_restarted(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    queues = Queues(harness.where)
    archive_of(tmp_path, "delta", monkeypatch)
    queues.publish("replay/old", 3, harness.queue, BATCH_BYTES)
    with pytest.raises(InvalidOption, match=r"earlier version.*another --name"):
        replay.plan(queues, tmp_path, harness.queue, name="old")


def test_second_run_of_a_replay_waits_for_the_first(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    queues = Queues(harness.where)
    grow = archive_of(tmp_path, "delta", monkeypatch)
    first = replay.plan(queues, tmp_path, harness.queue)
    grow()
    later = replay.plan(queues, tmp_path, harness.queue)
    spark: Any = None

    def start_second_run(*arguments: object) -> Iterator[pa.Table]:
        monkeypatch.setattr(replay, "_batches", lambda *arguments: iter([BATCH_BYTES]))
        with pytest.raises(RunInProgress, match="another run is at work"):
            replay.run_plan(spark, queues, later)
        yield BATCH_BYTES

    monkeypatch.setattr(replay, "_batches", start_second_run)
    assert replay.run_plan(spark, queues, first).published == 2
    assert harness.values() == ["a", "b"]
    other = replay.plan(queues, tmp_path, harness.queue, name="other")
    (tmp_path / "_sluice" / "replay").rename(tmp_path / "_sluice" / "before")
    (tmp_path / "_sluice" / "replay").touch()  # like an archive that can only be read
    assert replay.run_plan(spark, queues, other).published == 2


def test_failed_replay_says_how_to_resume(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_of(tmp_path, "delta", monkeypatch)
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", lambda self: nullcontext())
    counted: list[replay.ReplayPlan] = []

    def count(self: replay.ReplayPlan, spark: object) -> int:
        counted.append(self)
        return 4

    def fail(spark: object, queues: Queues, chosen: replay.ReplayPlan, on_progress: object) -> None:
        assert chosen is counted[0]  # the confirmed plan is the one that runs
        raise Refused("no", "the broker says no", "Ask it")

    monkeypatch.setattr(replay.ReplayPlan, "count", count)
    monkeypatch.setattr(replay, "run_plan", fail)
    words = [
        "pipeline",
        "replay",
        "--from",
        str(tmp_path),
        "--name",
        "mine",
        "--yes",
        "--url",
        harness.url,
    ]
    refused = CliRunner().invoke(app, words).stderr
    assert "Name of this replay: mine, of version 1 of the archive." in refused
    assert "Ask it. Run it again to go on where it stopped, or with --name mine" in refused


# ---- lost messages


def test_run_with_missing_messages_says_how_to_continue_without_them(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make()
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", lambda self: nullcontext())
    received: list[bool] = []

    def lose(*places: Any, skip_lost: bool, **how: Any) -> Any:
        received.append(skip_lost)
        raise stream_runner.StreamFailed(
            "12 is gone. To go on with what is left: failOnDataLoss=false", kind="DataLost"
        )

    for module, name in ((archive, "start"), (transform, "start"), (compact, "to_table")):
        monkeypatch.setattr(module, name, lose)
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", str(tmp_path / "checkpoint")]
    for words in (
        ["archive", "--to", str(tmp_path / "table"), "--once"],
        ["transform", "--to", "x", "--once", *sql],
        ["compact", "--to", str(tmp_path / "last")],
    ):
        for flags in ([], ["--skip-lost"]):
            ran = CliRunner().invoke(
                app, ["pipeline", *words, "-q", harness.queue, *flags, "--url", harness.url]
            )
            assert ran.exit_code == 1 and "go on with what is left: --skip-lost" in ran.stderr, (
                ran.stderr
            )
    assert received == [False, True] * 3


def test_command_errors_name_flags_and_not_options() -> None:
    texts = [value for name, value in vars(errors).items() if name.isupper() and " " in str(value)]
    assert len(texts) >= 3
    texts += [str(errors.DataLost("12 is gone")), str(errors.BrokerGone("http://h", 30, "refused"))]
    texts += [
        "option group is 'x'",
        "option subscribe names 'x'",
        "Give the option token or tokenFile",
    ]
    texts += [
        "option tokenFile: t cannot be read",
        "Give each query a checkpointLocation of its own",
    ]
    for text in texts:
        for translated in (
            replace_options(text, "another --checkpoint"),
            replace_options(f"so it is. {text}", ""),
        ):
            assert not re.search(r"[a-z][A-Z]|option|load\(\)", translated), translated
    assert "start over, with another --to" in replace_options(
        errors.OWN_GROUP_REMEDY, "another --to"
    )
    assert replace_options("option tokenFile: t", "") == "--token-file: t"

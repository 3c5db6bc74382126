"""Tables as a crash finds and leaves them, and how rows go from them and to them: without Java, and mostly a broker."""

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

from sluice.cli import app
from sluice.cli.pipelines import spark_command
from sluice.cli.pipelines import stream_progress
from sluice.cli.support.options import Where
from sluice.cli.pipelines.preflight import flags_for
from sluice.spark import Door
from sluice.spark import errors
from sluice.spark.errors import DataLost, InvalidOption, Refused
from sluice.spark.pipelines.jobs import archive
from sluice.spark.pipelines.support import row_collection
from sluice.spark.pipelines.jobs import compact
from sluice.spark.pipelines.tables import delta
from sluice.spark.pipelines.support import publish_batches
from sluice.spark.pipelines.jobs import replay
from sluice.spark.pipelines.support import stream_runner
from sluice.spark.pipelines.jobs import transform
from sluice.spark.pipelines.tables import file_writer
from sluice.spark.pipelines.support.run_lock import AtWork, check_group
from sluice.spark.pipelines.queues import LONGEST_APP, TRIES, Queues, app_of
from sluice.spark.pipelines.tables import DeltaTable, ParquetTable, Table, open_table
from tests.spark.conftest import House

ROWS = [pa.RecordBatch.from_pydict({"value": [b"%d" % nth for nth in some]}) for some in ((0, 1), (2, 3))]


class TriedAgain:
    """A DataFrame of one task, which Spark tries three times: the first is cut short, of the second nobody hears."""

    columns = ["value"]

    def mapInArrow(self, write: Callable[[Any], Iterator[pa.RecordBatch]], schema: str) -> TriedAgain:
        self._write = write
        return self

    def collect(self) -> list[dict[str, Any]]:
        with pytest.raises(ConnectionError):
            list(self._write(self._cut_short()))
        list(self._write(ROWS))
        return [row for told in self._write(ROWS) for row in told.to_pylist()]

    def _cut_short(self) -> Iterator[pa.RecordBatch]:
        yield ROWS[0]
        raise ConnectionError


def values(table: Table) -> list[bytes]:
    return [value for file in table.files() for value in pq.read_table(file)["value"].to_pylist()]


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_what_a_task_wrote_before_it_was_tried_again_is_in_no_table(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    table, rows = open_table(tmp_path, kind), TriedAgain()
    assert table.add("q", 0, rows) == 4  # type: ignore[arg-type]
    assert values(table) == [b"0", b"1", b"2", b"3"]
    if kind == "parquet":
        assert pq.read_table(tmp_path, partitioning=None).num_rows == 4
        assert not list((tmp_path / "_sluice" / "arriving").iterdir())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was brought to the disk."""
    found: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: found.append(os.readlink(f"/proc/self/fd/{file}")))
    return found


def test_a_batch_counts_when_its_commit_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = TriedAgain()
    log = tmp_path / "_delta_log"
    commits = [str(log / f"{number:020d}.json") for number in range(4)]
    table = DeltaTable(tmp_path)
    table.add("q", 0, rows)
    first = synced.index(commits[0])
    assert synced[first : first + 4] == [*commits[:2], str(log), str(tmp_path.parent)]
    assert synced[-1] == str(tmp_path)  # the table, its first batch, and the way there
    table.add("q", 1, rows)
    assert synced[-3:] == [commits[2], str(log), str(tmp_path)]
    synced.clear()
    assert (
        DeltaTable(tmp_path).add("q", 1, rows) == 0
    )  # whoever had committed it has died before it was synced
    assert commits[2] in synced
    table = DeltaTable(tmp_path / "last")
    table.replace(rows, -1)
    assert str(tmp_path / "last" / "_delta_log" / f"{1:020d}.json") in synced


def test_a_batch_of_parquet_files_that_is_found_in_the_table_is_on_disk(
    tmp_path: Path, synced: list[str]
) -> None:
    rows: Any = TriedAgain()
    path = tmp_path / "new" / "table"
    for _ in range(2):  # whoever had renamed it has died before it was synced
        ParquetTable(path).add("q", 0, rows)
        assert synced[-1] == str(path) and {str(tmp_path / "new"), str(tmp_path)} <= set(synced)
        synced.clear()
    table = ParquetTable(path)
    table.has = lambda key, batch: bool(synced)  # type: ignore[method-assign]  # somebody else is faster
    assert table.add("q", 0, rows) == 0
    assert synced[-1] == str(path)


def test_what_others_are_about_to_commit_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = TriedAgain()
    table = DeltaTable(tmp_path)
    table.add("q", 0, rows)
    log = tmp_path / "_delta_log"
    real, gone = file_writer.sync, log / f"{2:020d}.json"
    (log / f"{2:020d}.json#1").symlink_to("nothing")
    seen: list[Path] = []

    def sync(path: str | Path) -> None:
        seen.append(Path(path))
        if seen[-1] == gone:
            gone.unlink()  # as when old commits are cleared away
        real(path)

    gone.touch()
    monkeypatch.setattr(delta, "sync", sync)
    table._sync_log()
    assert seen == [gone, log]


def test_a_fault_of_the_table_itself_is_not_told_as_a_change_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = TriedAgain()

    def fail(*told: object, **more: object) -> None:
        raise DeltaError("no room")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", fail)
    table = DeltaTable(tmp_path)
    for group in ("one", "two"):  # a table that is new, and one that is to say something else of itself
        with pytest.raises(DeltaError, match="no room"):
            table.replace(rows, table.version(), {compact.GROUP: group})
    assert table.version() == 1


def test_batches_of_parquet_files_keep_their_order_when_they_are_copied(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path)
    for nth, name in enumerate(("one-000000000", "two-000000000", "one-000000001", "one-000000002")):
        (tmp_path / f"batch={name}").mkdir()
        os.utime(tmp_path / f"batch={name}", (nth, nth))
        pq.write_table(pa.table({"value": [name]}), tmp_path / f"batch={name}" / "part.parquet")
        os.utime(tmp_path / f"batch={name}", (nth, nth))
    found = [Path(file).parent.name for file in table.files()]
    assert found == [
        f"batch={name}" for name in ("one-000000000", "two-000000000", "one-000000001", "one-000000002")
    ]
    for nth, name in enumerate(("one-000000002", "one-000000000", "one-000000001", "two-000000000")):
        os.utime(tmp_path / f"batch={name}", (nth, nth))
    found = [Path(file).parent.name for file in table.files()]
    assert found == [
        f"batch={name}" for name in ("one-000000000", "one-000000001", "one-000000002", "two-000000000")
    ]


# ---- portions


HEADERS = pa.map_(pa.string(), pa.binary())


def test_headers_count_where_a_portion_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_batches, "PORTION_BYTES", 64 << 10)
    large, none = [("authorization", b"x" * 1900), ("trace", None)], None
    told = pa.array([large] * 200 + [none, []] * 10, HEADERS)
    table = pa.table({"value": [b"{}"] * 220, "headers": told})
    for rows in (
        table,
        table.slice(7),
        pa.concat_tables([table.slice(150), table]),
    ):  # chunks, and parts of them
        cut = list(publish_batches.portions(rows))
        assert pa.concat_tables(cut).equals(rows)
        sizes = [len(publish_batches.stream_of(one)) for one in cut]
        assert max(sizes) < 64 << 10 < 2 * min(sizes[:-1])


PORTION = pa.table({"value": [b"a", b"b"]})


def test_a_portion_whose_answer_went_missing_is_ones_own(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    queues, send = Queues(house.where), Door._send
    cut: list[str] = []

    def send_and_hear_nothing(self: Door, method: str, path: str, *rest: Any, **more: Any) -> Any:
        answer = send(self, method, path, *rest, **more)
        if path.endswith("/commit") and not cut:
            cut.append(path)
            raise ConnectionResetError
        return answer

    monkeypatch.setattr(Door, "_send", send_and_hear_nothing)
    assert queues.publish(f"test/{house.queue}", 1, house.queue, PORTION)
    assert cut and house.values() == ["a", "b"]
    assert not queues.publish(f"test/{house.queue}", 1, house.queue, PORTION)  # somebody else's
    assert house.values() == ["a", "b"]


def test_a_portion_is_brought_again_to_a_broker_that_has_lost_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    queues, commit = Queues(house.where), Door.commit
    restarts = [True, True, False]

    def commit_after_a_restart(self: Door, app: str, batch: int, stages: list[str], rows: int) -> bool:
        if restarts.pop(0):
            house.door.abort(app, batch)  # a start finds no stages either
        return commit(self, app, batch, stages, rows)

    monkeypatch.setattr(Door, "commit", commit_after_a_restart)
    assert queues.publish(f"test/{house.queue}", 1, house.queue, PORTION)
    assert house.values() == ["a", "b"] and not restarts
    restarts += [True] * TRIES
    with pytest.raises(Refused, match="cannot be committed"):
        queues.publish(f"test/{house.queue}", 2, house.queue, PORTION)


def test_a_message_that_is_too_large_is_refused_with_the_setting(house: House) -> None:
    house.make()
    huge = pa.table({"value": [b"x" * (33 << 20)]})
    with pytest.raises(
        Refused, match=r"33554432 are taken at once\. .*raise bulk\.max_batch_bytes on the broker"
    ):
        Queues(house.where).publish(f"test/{house.queue}", 1, house.queue, huge)


def test_an_application_with_a_long_name_is_known_to_the_broker(house: House) -> None:
    house.make()
    names = [app_of("compact", "q" * 300 + end) for end in ("a", "b")]
    assert len(set(names)) == 2 and app_of("compact", "q") == "compact/q"
    assert [len(name) for name in names] == [LONGEST_APP] * 2
    assert Queues(house.where).publish(names[0], 1, house.queue, PORTION)
    assert [Queues(house.where).last_portion(name) for name in names] == [1, 0]


# ---- what a run may take


def refusal(house: House, *words: str) -> str:
    ran = CliRunner().invoke(app, ["pipeline", *words, "--url", house.url])
    assert ran.exit_code == 2, ran.output
    return ran.stderr


def test_a_new_run_takes_no_group_that_follows_another(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkVisit, "spark", None)
    house.make()
    queues = Queues(house.where)
    assert queues.settled(house.queue, "archive") is None
    for group in ("archive", "transform"):
        house.door.advance(house.queue, group, {}, create=True)
    house.fill(["a", "b"])
    assert queues.settled(house.queue, "archive") == 0  # made beforehand, so that messages are kept for it
    for group in ("archive", "transform"):
        house.door.advance(house.queue, group, {0: 1})
    assert queues.settled(house.queue, "archive") == 1
    archive = ["archive", "-q", house.queue, "--to", str(tmp_path / "second")]
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", str(tmp_path / "second")]
    for words in (archive, ["transform", "-q", house.queue, "--to", "x", *sql]):
        said = refusal(house, *words)
        assert f"group {words[0]} follows another run of this queue" in said and "Give --group NAME" in said

    first = tmp_path / "first"
    (first / "offsets").mkdir(parents=True)
    with pytest.raises(InvalidOption, match="--checkpoint of that run"):
        check_group(first, "archive", 1)
    for settled in (None, 0):
        check_group(first, "archive", settled)
    (first / "offsets" / "0").touch()
    check_group(first, "archive", 1)


def test_dead_letters_go_only_when_that_is_asked_for(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkVisit, "spark", None)
    home = f"failed-{house.queue}"
    house.make(dlq_config={"topic": home})
    house.make(home)
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", str(tmp_path / "checkpoint")]
    for words in (
        ["compact", "-q", home, "--to", str(tmp_path / "last")],
        ["transform", "-q", home, "--to", "x", *sql],
    ):
        said = refusal(house, *words)
        assert f"{home} holds dead letters" in said and "Add --settle" in said


def test_a_query_that_cannot_be_read_and_a_target_without_a_name_are_told(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkVisit, "spark", None)
    house.make()
    file = tmp_path / "query.sql"
    file.write_bytes("SELECT 'Größe' AS value FROM messages".encode("latin-1"))
    words = [
        "transform",
        "-q",
        house.queue,
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--sql-file",
        str(file),
    ]
    assert "query.sql is not UTF-8, at byte 10" in refusal(house, *words, "--to", "x")
    file.write_text("SELECT value FROM messages")
    assert "--to is empty" in refusal(house, *words, "--to", "")


def test_braces_in_a_name_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    visit = spark_command.SparkVisit("archive", Where("http://127.0.0.1:1", "", None), False)
    done = stream_runner.Progress(rows=3, batches=1)
    stream_progress.report_stream(visit, done, lambda read, written: f"Archived {read} of {{a}}/{{0}}", {"lag": 0})
    assert "Archived 3 messages of {a}/{0} (1 batch" in capsys.readouterr().out


# ---- last values


def test_last_values_belong_to_one_group_of_one_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = TriedAgain()
    about = {compact.QUEUE: "q", compact.GROUP: "compact", compact.INCARNATION: "1-2"}
    check = compact.check_following
    new, table = DeltaTable(tmp_path / "new"), DeltaTable(tmp_path / "table")
    for settled in (None, 0):
        check(new, about, settled, {0: 5})
    with pytest.raises(InvalidOption, match=r"for another table.*--group NAME"):
        check(new, about, 7, {0: 5})

    table.replace(rows, -1, about, {0: 9, 1: 4})
    for settled, start in (
        (7, {0: 9, 1: 4}),
        (7, {0: 30, 1: 4}),
        (0, {0: 2, 1: 4}),
    ):  # 0: killed before it could settle
        check(table, about, settled, start)
    with pytest.raises(InvalidOption, match="group compact brings them"):
        check(table, {**about, compact.GROUP: "other"}, 7, {})
    with pytest.raises(InvalidOption, match="holds the last values of q"):
        check(table, {**about, compact.QUEUE: "other"}, 7, {})
    with pytest.raises(InvalidOption, match="made again since"):
        check(table, {**about, compact.INCARNATION: "2-3"}, 7, {})
    for settled, start in ((None, {0: 9}), (0, {0: 10, 1: 4})):  # gone, and another one of its name
        with pytest.raises(InvalidOption, match="may be gone with it"):
            check(table, about, settled, start)
    table.replace(rows, table.version(), about, {0: 12, 1: 4})
    assert (table.reached(0), table.reached(1), table.reached(2)) == (12, 4, None)
    for _ in range(2):  # the second time there is nothing to say
        before = table.version()
        table.reach({0: 13, 1: 4})
        assert (table.reached(0), table.reached(1), len(values(table))) == (13, 4, 4)
    assert table.version() == before
    compact.last_values(table.path)

    older = DeltaTable(tmp_path / "older")  # of a time when tables said nothing of it
    older.replace(rows, -1)
    check(older, about, 7, {0: 9})
    older.replace(rows, older.version(), about, {0: 9})
    assert about.items() <= older.about().items()


def test_last_values_that_were_restored_are_brought_up_to_date_or_refused(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    monkeypatch.setattr(compact, "latest", lambda rows, by, drop_empty: rows)
    monkeypatch.setattr(compact, "_laid_over", lambda table, version, fresh, spark: fresh)
    monkeypatch.setattr(compact, "_count", lambda table, spark: 0)
    house.make()
    house.door.advance(house.queue, "keeper", {}, create=True)

    class Loaded(TriedAgain):
        def __init__(self, options: dict[str, str]) -> None:
            self.options = options

        def count(self) -> int:
            return len(house.read(**self.options))

    def load(self: Queues, spark: object, queue: str, **options: str) -> Any:
        return Loaded(options)

    def read(**how: Any) -> int:
        spark: Any = None
        return compact.to_table(spark, Queues(house.where), house.queue, tmp_path, **how).read

    monkeypatch.setattr(Queues, "read", load)
    house.fill(["a", "b"])
    assert read() == 2
    backup = shutil.copytree(tmp_path, tmp_path / "backup")
    house.fill(["c"])
    assert (read(), read()) == (1, 0)
    deltalake.DeltaTable(tmp_path).restore(1)
    with pytest.raises(InvalidOption, match=r"restored to an older version.*--skip-lost"):
        read()
    shutil.rmtree(tmp_path / "_delta_log")
    shutil.copytree(backup, tmp_path, dirs_exist_ok=True)
    assert (read(), read()) == (1, 0)  # c once more, which the group has settled and another one keeps
    shutil.rmtree(tmp_path / "_delta_log")
    shutil.copytree(backup, tmp_path, dirs_exist_ok=True)
    house.door.advance(house.queue, "keeper", {0: 3})
    house.fill(["d"])
    with pytest.raises(DataLost, match="rows 2 to 4"):
        read()
    assert read(skip_lost=True) == 1
    deltalake.DeltaTable(tmp_path).restore(1)
    assert (read(skip_lost=True), read(skip_lost=True)) == (0, 0)
    house.fill(["e"])
    assert (read(skip_lost=True), read()) == (1, 0)  # it was written to since
    asyncio.run(house.reject(b"for others"))
    assert read() == 1
    assert house.api.post(f"/queues/{house.queue}/dlq/retry", json={}).is_success
    house.door.advance(house.queue, "w", house.door.offsets(house.queue).latest())
    for _ in range(2):  # a gap that is nobody's loss
        assert read() == 0
    house.fill(["gone"])
    assert house.api.post(f"/queues/{house.queue}/purge", json={}).is_success
    with pytest.raises(DataLost, match="before Spark has read it in group 'compact'"):
        read()
    assert (read(skip_lost=True), read()) == (0, 0)


def test_last_values_are_begun_while_workers_settle(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    house.fill([str(nth) for nth in range(10)])
    house.door.advance(house.queue, "w", {}, create=True)
    work = iter([{0: 3}, {}])
    ends: list[dict[int, int]] = []

    def look(rows: object, by: str, drop_empty: bool) -> object:
        house.door.advance(house.queue, "w", next(work))  # nothing is kept for compact yet
        return rows

    def load(self: Queues, spark: object, queue: str, **options: str) -> Any:
        return SimpleNamespace(count=lambda: len(house.read(**options)))

    def replace(self: DeltaTable, rows: object, version: int, about: object, end: dict[int, int]) -> int:
        ends.append(end)
        return 7

    monkeypatch.setattr(compact, "latest", look)
    monkeypatch.setattr(Queues, "read", load)
    monkeypatch.setattr(DeltaTable, "replace", replace)
    spark: Any = None
    done = compact.to_table(spark, Queues(house.where), house.queue, tmp_path)
    assert (done.read, ends, house.door.progress(house.queue, "compact")) == (7, [{0: 10}], {0: 10})

    house.fill(["10"])

    def settle(*told: object) -> object:  # another run, into another table, while there is no such group
        house.door.advance(house.queue, "other", {0: 11}, create=True)
        return told[0]

    monkeypatch.setattr(compact, "latest", settle)
    with pytest.raises(InvalidOption, match="for another table"):
        compact.to_table(spark, Queues(house.where), house.queue, tmp_path, group="other")


def test_what_was_put_back_for_another_group_is_not_read_for_this_one(house: House) -> None:
    house.make()
    house.door.advance(house.queue, "compact", {}, create=True)
    asyncio.run(house.reject(b"old"))
    house.fill(["new"])
    end = house.door.offsets(house.queue).latest()
    house.door.advance(house.queue, "compact", {0: 1})
    house.door.advance(house.queue, "w", end)
    assert house.api.post(f"/queues/{house.queue}/dlq/retry", json={}).is_success
    between = {"startingOffsets": json.dumps({house.queue: {"0": 1}}), "endingOffsets": "latest"}
    assert house.values(**between) == ["new", "old"]
    assert house.values(**between, group="compact") == ["new"]
    assert house.values(**between, group="not-yet") == ["new", "old"]


def test_rows_are_brought_together_up_to_a_weight() -> None:
    def span(home: str, first: int, weight: int) -> row_collection.Span:
        return row_collection.Span(home, 0, first, first + 9, weight)

    spans = [span("a", 0, 60), span("a", 10, 40), span("a", 20, 1), span("b", 0, 200), span("b", 10, 5)]
    assert [[one.bytes for one in part] for part in row_collection.bundles(spans, 100)] == [
        [60, 40],
        [1],
        [200],
        [5],
    ]
    assert row_collection.bundles([], 100) == []


# ---- replay


def archive_of(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let an archive grow by a batch."""
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: ROWS[0].schema)
    batches = iter(range(9))

    def grow() -> None:
        rows: Any = TriedAgain()
        open_table(path, kind).add("q", next(batches), rows)

    grow()
    return grow


@pytest.mark.parametrize("kind", ["delta", "parquet"])
@pytest.mark.parametrize("name", ["", "mine"])
def test_a_replay_goes_on_with_the_archive_that_it_began_with(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    house.make()
    queues = Queues(house.where)
    grow = archive_of(tmp_path, kind, monkeypatch)
    first = replay.plan(queues, tmp_path, house.queue, name=name)
    grow()
    later = replay.plan(queues, tmp_path, house.queue, name=name)
    assert first.done == 0 and later.version > first.version  # nothing was published yet
    assert first.app == later.app
    queues.publish(first.app, first.number(1), house.queue, PORTION)
    again = replay.plan(queues, tmp_path, house.queue, name=name)
    assert (again.done, again.version, again.number(2)) == (1, first.version, first.number(2))
    assert len(again.table.files(again.version)) == 1 and not again.is_newest
    other = replay.plan(queues, tmp_path, house.queue, name=name, where="key IS NULL")
    assert (other.done, other.version) == (0, later.version)  # another question leaves out nothing
    monkeypatch.setattr(replay, "_portions", lambda spark, chosen, files: iter([PORTION] * 2))
    spark: Any = None
    done = replay.carry_out(spark, queues, first)  # planned before the first portion was there
    assert (done.known, done.published) == (2, 2)
    with pytest.raises(replay.OtherVersion, match="another run"):  # the archive had grown when it was planned
        replay.carry_out(spark, queues, later)
    assert replay.carry_out(spark, queues, first).known == 4
    assert house.values() == ["a", "b"] * 2
    if kind == "delta" and name:
        assert replay.plan(queues, tmp_path, house.queue, name=name, version=first.version).done == 2
        with pytest.raises(InvalidOption, match=f"began with version {first.version}"):
            replay.plan(queues, tmp_path, house.queue, name=name, version=later.version)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_replay_does_not_go_on_with_an_archive_that_is_not_what_it_was(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    house.make()
    queues = Queues(house.where)
    grow = archive_of(tmp_path, kind, monkeypatch)
    grow()
    first = replay.plan(queues, tmp_path, house.queue, name="mine")
    queues.publish(first.app, first.number(1), house.queue, PORTION)
    grow()
    assert replay.plan(queues, tmp_path, house.queue, name="mine").done == 1
    if kind == "parquet":  # a batch of another query, which a copy has made older
        (tmp_path / "batch=other-000000000").mkdir()
        os.utime(tmp_path / "batch=other-000000000", (1, 1))
    else:
        deltalake.DeltaTable(tmp_path).optimize.compact()
        assert replay.plan(queues, tmp_path, house.queue, name="mine").done == 1
        deltalake.DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(InvalidOption, match=r"replay mine has published 1 of its portions.*another --name"):
        replay.plan(queues, tmp_path, house.queue, name="mine")
    assert replay.plan(queues, tmp_path, house.queue, name="rest").done == 0
    if kind == "delta":
        with pytest.raises(InvalidOption, match=r"does not keep version 1 .*Leave --version out"):
            replay.plan(queues, tmp_path, house.queue, name="rest", version=1)
        (tmp_path / "_delta_log" / f"{0:020d}.json").unlink()
        assert not DeltaTable(tmp_path).keeps(1)


def test_a_replay_that_an_earlier_version_began_is_not_begun_again(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    queues = Queues(house.where)
    archive_of(tmp_path, "delta", monkeypatch)
    queues.publish("replay/old", 3, house.queue, PORTION)
    with pytest.raises(InvalidOption, match=r"earlier version.*another --name"):
        replay.plan(queues, tmp_path, house.queue, name="old")


def test_of_two_runs_of_a_replay_one_waits_for_the_other(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    queues = Queues(house.where)
    grow = archive_of(tmp_path, "delta", monkeypatch)
    first = replay.plan(queues, tmp_path, house.queue)
    grow()
    later = replay.plan(queues, tmp_path, house.queue)
    spark: Any = None

    def begin_another(*told: object) -> Iterator[pa.Table]:
        monkeypatch.setattr(replay, "_portions", lambda *told: iter([PORTION]))
        with pytest.raises(AtWork, match="another run is at work"):
            replay.carry_out(spark, queues, later)
        yield PORTION

    monkeypatch.setattr(replay, "_portions", begin_another)
    assert replay.carry_out(spark, queues, first).published == 2
    assert house.values() == ["a", "b"]
    other = replay.plan(queues, tmp_path, house.queue, name="other")
    (tmp_path / "_sluice" / "replay").rename(tmp_path / "_sluice" / "before")
    (tmp_path / "_sluice" / "replay").touch()  # as good as an archive that can only be read
    assert replay.carry_out(spark, queues, other).published == 2


def test_a_replay_that_fails_says_how_to_go_on(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_of(tmp_path, "delta", monkeypatch)
    monkeypatch.setattr(spark_command.SparkVisit, "spark", lambda self: nullcontext())
    counted: list[replay.Plan] = []

    def count(self: replay.Plan, spark: object) -> int:
        counted.append(self)
        return 4

    def fail(spark: object, queues: Queues, chosen: replay.Plan, tell: object) -> None:
        assert chosen is counted[0]  # what was asked for is what is done
        raise Refused("no", "the broker says no", "Ask it")

    monkeypatch.setattr(replay.Plan, "count", count)
    monkeypatch.setattr(replay, "carry_out", fail)
    words = ["pipeline", "replay", "--from", str(tmp_path), "--name", "mine", "--yes", "--url", house.url]
    said = CliRunner().invoke(app, words).stderr
    assert "Name of this replay: mine, of version 1 of the archive." in said
    assert "Ask it. Run it again to go on where it stopped, or with --name mine" in said


# ---- what was lost


def test_a_run_that_misses_messages_says_how_to_go_on_without_them(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    monkeypatch.setattr(spark_command.SparkVisit, "spark", lambda self: nullcontext())
    heard: list[bool] = []

    def lose(*places: Any, skip_lost: bool, **how: Any) -> Any:
        heard.append(skip_lost)
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
            ran = CliRunner().invoke(app, ["pipeline", *words, "-q", house.queue, *flags, "--url", house.url])
            assert ran.exit_code == 1 and "go on with what is left: --skip-lost" in ran.stderr, ran.stderr
    assert heard == [False, True] * 3


def test_a_command_tells_of_flags_and_not_of_options() -> None:
    said = [value for name, value in vars(errors).items() if name.isupper() and " " in str(value)]
    assert len(said) >= 3
    said += [str(errors.DataLost("12 is gone")), str(errors.BrokerGone("http://h", 30, "refused"))]
    said += ["option group is 'x'", "option subscribe names 'x'", "Give the option token or tokenFile"]
    said += ["option tokenFile: t cannot be read", "Give each query a checkpointLocation of its own"]
    for text in said:
        for translated in (flags_for(text, "another --checkpoint"), flags_for(f"so it is. {text}", "")):
            assert not re.search(r"[a-z][A-Z]|option|load\(\)", translated), translated
    assert "begin anew, with another --to" in flags_for(errors.OWN_GROUP, "another --to")
    assert flags_for("option tokenFile: t", "") == "--token-file: t"

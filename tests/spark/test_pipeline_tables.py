"""Tables as a crash finds and leaves them, and how rows go from them and to them: without Java, and mostly a broker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sluice.cli import app, sparking, streaming
from sluice.cli.options import Where
from sluice.spark import Door
from sluice.spark.faults import InvalidOption, Refused
from sluice.spark.pipelines import portions, running, tables
from sluice.spark.pipelines.alone import check_group
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
    monkeypatch.setattr(tables, "_arrow_schema", lambda rows: ROWS[0].schema)
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
    monkeypatch.setattr(tables, "_arrow_schema", lambda rows: ROWS[0].schema)
    rows: Any = TriedAgain()
    log = tmp_path / "_delta_log"
    commits = [str(log / f"{number:020d}.json") for number in range(4)]
    table = DeltaTable(tmp_path)
    table.add("q", 0, rows)
    assert synced[-4:] == [*commits[:2], str(log), str(tmp_path)]  # the table, and its first batch
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
    monkeypatch.setattr(portions, "PORTION_BYTES", 64 << 10)
    large, none = [("authorization", b"x" * 1900), ("trace", None)], None
    told = pa.array([large] * 200 + [none, []] * 10, HEADERS)
    table = pa.table({"value": [b"{}"] * 220, "headers": told})
    for rows in (
        table,
        table.slice(7),
        pa.concat_tables([table.slice(150), table]),
    ):  # chunks, and parts of them
        cut = list(portions.portions(rows))
        assert pa.concat_tables(cut).equals(rows)
        sizes = [len(portions.stream_of(one)) for one in cut]
        assert max(sizes) < 64 << 10 < 2 * min(sizes[:-1])


PORTION = pa.table({"value": [b"a", b"b"]})


def test_a_portion_whose_answer_went_missing_is_ones_own(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    queues, send = Queues(house.where), Door._send
    cut: list[str] = []

    def send_and_hear_nothing(self: Door, method: str, path: str, *rest: Any) -> Any:
        answer = send(self, method, path, *rest)
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
    monkeypatch.setattr(sparking.SparkVisit, "spark", None)
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
    monkeypatch.setattr(sparking.SparkVisit, "spark", None)
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
    monkeypatch.setattr(sparking.SparkVisit, "spark", None)
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
    visit = sparking.SparkVisit("archive", Where("http://127.0.0.1:1", "", None), False)
    done = running.Progress(rows=3, batches=1)
    streaming.report_stream(visit, done, lambda read, written: f"Archived {read} of {{a}}/{{0}}", {"lag": 0})
    assert "Archived 3 messages of {a}/{0} (1 batch" in capsys.readouterr().out

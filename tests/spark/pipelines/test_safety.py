"""What pipelines refuse, and two of them at once: no Java, and mostly no broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from typer.testing import CliRunner

from sluice.admin.rest.errors import Stopping
from sluice.cli.pipelines import spark_command
from sluice.cli.root import app
from sluice.errors import (
    ConfigError,
    NoRoom,
    QueueFull,
    SluiceError,
    StagesFull,
    StaleBatch,
    StoreUnavailable,
    TooManyReaders,
    WorkerLost,
)
from sluice.report import page
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines import queues, tables
from sluice.spark.pipelines.jobs import compact, transform
from sluice.spark.pipelines.support import dead_letter_queues, stream_runner
from sluice.spark.pipelines.support.run_lock import RunInProgress, exclusive_run
from sluice.spark.pipelines.tables import DeltaTable, delta, open_table, parquet
from tests.spark.conftest import SparkHarness

WORK = pa.table({"value": pa.array([b"a", b"b"], pa.binary()), "archived_at": ["now", "now"]})
DEAD_LETTERS = WORK.append_column("reason", pa.array(["rejected", "expired"]))


class Rows:
    """The part of a DataFrame that tables use."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.schema = table.schema
        self.columns = table.column_names


def rows(table: pa.Table = WORK) -> Any:
    return Rows(table)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Functions in this list run when the files of a batch are written and not yet part of the
    table.
    """
    waiting: list[Callable[[], object]] = []

    def write(rows: Rows, folder: Path) -> list[tuple[str, int, int]]:
        name = f"part-{uuid.uuid4().hex}.parquet"
        pq.write_table(rows.table, folder / name)
        if waiting:
            waiting.pop()()
        return [(name, (folder / name).stat().st_size, rows.table.num_rows)]

    for module in (delta, parquet):
        monkeypatch.setattr(module, "write_rows", write)
    monkeypatch.setattr(delta, "_arrow_schema", lambda rows: rows.schema)
    return waiting


def kept(table: tables.Table) -> int:
    return sum(pq.ParquetFile(file).metadata.num_rows for file in table.files())


# ---- two drivers of one query


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_batch_written_by_two_drivers_at_once_is_in_the_table_once(
    tmp_path: Path, meanwhile: list[Callable[[], object]], kind: str
) -> None:
    table, other = open_table(tmp_path, kind), open_table(tmp_path, kind)
    assert table.add_batch("q", 0, rows()) == 2
    meanwhile.append(lambda: other.add_batch("q", 1, rows()))
    assert table.add_batch("q", 1, rows()) == 0
    assert kept(table) == 4 and table.has_batch("q", 1)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2  # the second one leaves no files


def test_batch_committed_between_check_and_commit_is_detected(
    tmp_path: Path, meanwhile: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = DeltaTable(tmp_path)
    table.add_batch("q", 0, rows())
    real, looked = delta._has_transaction, []

    def look(opened: deltalake.DeltaTable, key: str, batch: int) -> bool:
        looked.append(batch)
        found = real(opened, key, batch)
        if len(looked) == 2:
            monkeypatch.setattr(delta, "_has_transaction", real)
            DeltaTable(tmp_path).add_batch("q", 1, rows())
        return found

    monkeypatch.setattr(delta, "_has_transaction", look)
    assert table.add_batch("q", 1, rows()) == 0
    assert kept(table) == 4


def test_interrupted_driver_deletes_nothing_of_another(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    table, other = open_table(tmp_path, "parquet"), open_table(tmp_path, "parquet")

    def start_and_crash() -> None:
        def crash() -> None:
            raise KeyboardInterrupt

        meanwhile.append(crash)
        with pytest.raises(KeyboardInterrupt):
            other.add_batch("q", 0, rows())

    meanwhile.append(start_and_crash)
    assert table.add_batch("q", 0, rows()) == 2
    assert kept(table) == 2
    arriving = tmp_path / "_sluice" / "arriving"
    assert len(list(arriving.iterdir())) == 1
    assert table.add_batch("q", 1, rows()) == 2  # deletes leftovers of earlier batches
    assert not list(arriving.iterdir())


def test_last_values_are_not_replaced_by_older_ones(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    table, other = DeltaTable(tmp_path), DeltaTable(tmp_path)
    for _ in range(2):  # a table that does not exist yet, and one that does
        version = table.version()
        meanwhile.append(partial(other.replace_rows, rows(DEAD_LETTERS.slice(1)), version))
        with pytest.raises(tables.TableChanged, match="another process"):
            table.replace_rows(rows(), version)
        assert kept(table) == 1


def test_second_run_with_the_same_checkpoint_is_refused_in_one_line(
    harness: SparkHarness, tmp_path: Path
) -> None:
    harness.make()
    words = [
        "pipeline",
        "archive",
        "-q",
        harness.queue,
        "--to",
        str(tmp_path),
        "--once",
        "--url",
        harness.url,
    ]
    with exclusive_run(tmp_path / "_sluice" / "checkpoint"):
        ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 1
    assert "another run is at work" in ran.stderr and len(ran.stderr.splitlines()) == 2
    with (
        exclusive_run(tmp_path / "free"),
        pytest.raises(RunInProgress),
        exclusive_run(tmp_path / "free"),
    ):
        pass
    with exclusive_run(tmp_path / "free"):  # the other run has ended
        pass


# ---- archives and last values


def test_compact_replaces_only_files_it_has_written(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    archive, last, before = tmp_path / "archive", tmp_path / "last", tmp_path / "before"
    DeltaTable(archive).add_batch("q", 0, rows())
    with pytest.raises(InvalidOption, match="has not made"):
        compact.open_last_values(archive)
    values = WORK.select(["value"])
    compact.open_last_values(last).replace_rows(rows(values), -1)
    assert compact.open_last_values(last).version() == 1
    with pytest.raises(InvalidOption, match="holds the last values"):
        DeltaTable(last).add_batch("q", 0, rows())
    with pytest.raises(InvalidOption, match="holds the last values"):
        open_table(last).check_archive()

    # An older table without the property: overwritten each time, and without the columns of an
    # archive.
    deltalake.write_deltalake(before, values, mode="overwrite")
    table = compact.open_last_values(before)
    table.replace_rows(rows(values), table.version())
    with pytest.raises(InvalidOption, match="holds the last values"):
        table.check_archive()
    deltalake.write_deltalake(tmp_path / "theirs", values, mode="append")
    with pytest.raises(InvalidOption, match="has not made"):
        compact.open_last_values(tmp_path / "theirs")


def test_table_adds_the_columns_of_dead_letters_or_says_that_it_cannot(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    delta, parquet = tmp_path / "delta", tmp_path / "parquet"
    DeltaTable(delta).add_batch("work", 0, rows())
    DeltaTable(delta).add_batch("dead", 0, rows(DEAD_LETTERS))
    found = deltalake.DeltaTable(delta).to_pyarrow_table()
    assert sorted(found["reason"].to_pylist(), key=str) == [None, None, "expired", "rejected"]
    other = WORK.set_column(0, "value", pa.array([1, 2]))
    with pytest.raises(InvalidOption, match="column value of another type"):
        DeltaTable(delta).add_batch("other", 0, rows(other))
    open_table(parquet, "parquet").add_batch("work", 0, rows())
    with pytest.raises(InvalidOption, match=r"differing: reason.*another directory"):
        open_table(parquet).add_batch("dead", 0, rows(DEAD_LETTERS))


def test_requested_version_must_exist_in_the_archive(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    delta = DeltaTable(tmp_path / "delta")
    for batch in range(2):
        delta.add_batch("q", batch, rows())
    for version in range(delta.version() + 1):
        delta.check_version(version)
    for wrong in (-1, delta.version() + 1):
        with pytest.raises(InvalidOption, match=f"Give one from 0 to {delta.version()}"):
            delta.check_version(wrong)
    with pytest.raises(InvalidOption, match="have no versions"):
        open_table(tmp_path / "parquet", "parquet").check_version(0)


def test_invalid_options_are_reported_before_spark_is_started(
    harness: SparkHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_command.SparkCommandContext, "spark", None)
    harness.make()
    file = tmp_path / "file"
    file.write_text("")
    queue, nowhere = harness.queue, str(tmp_path / "nowhere")
    sql = ["--sql", "SELECT value FROM messages", "--checkpoint", nowhere]
    wrong = {
        f"archive -q {queue} --to {nowhere} --format orc": "format 'orc' is not known",
        f"archive -q {queue} --to {file}": "is a file",
        f"replay --from {nowhere}": "holds no rows",
        f"compact --from {nowhere} --to-queue x": "holds no rows",
        f"compact -q {queue} --to-queue x --settle": "--settle does nothing with --to-queue",
        f"compact -q {queue} --to-queue x --skip-lost": "--skip-lost does nothing with --to-queue",
        f"flow --from {nowhere}": "holds no rows",
        f"flow -q {queue} --window soon": "--window 'soon'",
        f"flow -q {queue} --to {tmp_path}": "is a directory",
        f"dead-letters --to {tmp_path}": "is a directory",
        f"dead-letters -q dlq/{queue}": f"Name the queue whose messages died: {queue}",
        f"redrive -q dlq/{queue}": f"Name the queue whose messages died: {queue}",
        f"audit --published queue:{queue} --dead queue:{queue}": f"queue:dlq/{queue}",
    }
    for words, expected in wrong.items():
        ran = CliRunner().invoke(app, ["pipeline", *words.split(), "--url", harness.url])
        assert (ran.exit_code, expected in ran.stderr) == (2, True), f"{words}: {ran.stderr}"
    ran = CliRunner().invoke(
        app, ["pipeline", "transform", "-q", queue, "--to", queue, *sql, "--url", harness.url]
    )
    assert ran.exit_code == 2 and "would never end" in ran.stderr


# ---- dead letters


def described(
    name: str, dlq: str = "", invalid: str | None = None, dead: bool = False
) -> dict[str, Any]:
    return {
        "stats": {"name": name, "dlq": dlq, "is_dead_letters": dead},
        "config": {"dlq_config": {"invalid_topic": invalid}},
    }


def test_dead_letters_are_read_from_the_configured_queue() -> None:
    there = {
        "usual": described("usual", "dlq/usual"),
        "dlq/usual": described("dlq/usual", dead=True),
        "own": described("own", "ops/failed", "ops/invalid"),
        "ops/failed": described("ops/failed", "dlq/ops/failed", dead=True),
        "ops/invalid": described("ops/invalid", dead=True),
        "alive": described("alive", "dlq/alive"),
        "dlq/deleted": described("dlq/deleted", dead=True),
    }
    found = {
        name: dead_letter_queues.find_dead_letter_queues(name, there.get)
        for name in ("usual", "own", "alive", "deleted", "nowhere")
    }
    assert found == {
        "usual": ["dlq/usual"],
        "own": ["ops/failed", "ops/invalid"],
        "alive": [],
        "deleted": ["dlq/deleted"],
        "nowhere": None,
    }
    for wrong in ("dlq/usual", "ops/invalid"):
        with pytest.raises(
            InvalidOption, match=r"holds dead letters\. Name the queue whose messages died"
        ):
            dead_letter_queues.find_dead_letter_queues(wrong, there.get)


# ---- streams that fail


class Failing:
    """A stream that fails at the first poll, without progress."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.recentProgress: list[Any] = []

    def awaitTermination(self, seconds: float) -> bool:
        raise StreamingQueryException(self.words)


def starts_of(words: str, most: int) -> int:
    """Return how often a stream that fails with this text is started, up to a limit."""
    asked, started = Event(), 0

    def start() -> Any:
        nonlocal started
        started += 1
        if started == most:
            asked.set()
        return Failing(words)

    with suppress(stream_runner.StreamFailed), pytest.MonkeyPatch.context() as hurried:
        hurried.setattr(asked, "wait", lambda pause: asked.is_set())
        stream_runner.run(start, once=False, stop_requested=asked)
    return started


def refused(refusal: SluiceError | str) -> str:
    return (
        f"[STREAM_FAILED] x\nsluice.spark.errors.Refused: the broker at http://h says: {refusal}\n"
    )


def test_stream_retries_only_transient_failures() -> None:
    passing: list[SluiceError] = [
        StaleBatch("app", 1, "some of its stages are not here"),
        StagesFull(1000),
        TooManyReaders(64),
        WorkerLost(),
        StoreUnavailable("the disk is slow"),
        NoRoom("the disk is full"),
        Stopping(),
        QueueFull("tasks", 1000),
    ]
    for refusal in passing:
        assert starts_of(refused(refusal), 20) == 20, refusal
    assert starts_of("sluice.spark.errors.BrokerGone: no answer", 20) == 20
    never = "batch 0 of 'q' cannot be used: row 0 of stage 3: priority is 12. Give 0 to 9"
    assert starts_of(refused(never), 20) == 1
    assert starts_of("sluice.spark.errors.DataLost: gone", 20) == 1
    unknown = stream_runner.MAX_UNKNOWN_TRIES + 1
    assert starts_of("java.io.IOException: No space left on device", 20) == unknown
    assert starts_of(refused("the role viewer may not do that"), 20) == unknown


def test_failure_in_a_user_function_is_reported_with_its_line() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/x/site-packages/pyspark/worker.py", line 7, in main\n'
        '  File "/home/me/clean.py", line 12, in rows\n'
        "ValueError: row is bad\n\tat org.apache.spark"
    )
    assert (
        stream_runner.explain_error(Exception(trace)).what
        == "ValueError: row is bad (/home/me/clean.py, line 12)"
    )


def test_user_function_that_returns_nothing_or_fails_is_reported_with_its_line(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def none(messages):\n    pass\n\n"
        "def broken(messages):\n    raise RuntimeError('I broke')\n"
    )
    messages: Any = SimpleNamespace()
    with pytest.raises(InvalidOption, match="gives NoneType, not a DataFrame"):
        transform.find_function(f"{own}:none")(messages)
    with pytest.raises(InvalidOption, match=r"own.py, line 5: RuntimeError: I broke"):
        transform.find_function(f"{own}:broken")(messages)
    own.write_text("1 / 0\n")
    with pytest.raises(InvalidOption, match="cannot be loaded: ZeroDivisionError"):
        transform.find_function(f"{own}:none")


def test_several_named_queues_are_all_read() -> None:
    assert (
        queues.includes_queue("a, b", "b")
        and queues.includes_queue("/dlq\\/.*/", "dlq/x")
        and queues.includes_queue("a", "a")
    )
    assert not queues.includes_queue("a,b", "c") and not queues.includes_queue("/dlq\\/.*/", "x")


def test_spark_start_failure_is_reported_with_its_last_output(tmp_path: Path) -> None:
    visit: Any = SimpleNamespace()
    log = spark_command._JavaLog(visit)
    log.path = tmp_path / "spark.log"
    log.path.write_text(
        "26/01/31 WARN Utils: a name\n"
        'Exception in thread "main" java.lang.IllegalArgumentException: no such size: 4x\n'
        "\tat java.base\n"
    )
    gone = Exception(
        "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
    )
    failure = spark_command._start_error(gone, log)
    assert failure.what == "Spark cannot be started: IllegalArgumentException: no such size: 4x"
    assert "--master and --conf" in failure.remedy and str(log.path) in failure.remedy
    log.path.write_text(
        "Invalid maximum heap size: -Xmx4x\nError: Could not create the Java Virtual Machine.\n"
    )
    assert spark_command._start_error(gone, log).what.endswith(
        ": Invalid maximum heap size: -Xmx4x"
    )
    java = Exception(
        "o.\n: org.apache.spark.SparkException: Could not parse Master URL: 'here'\n\tat x"
    )
    assert spark_command._start_error(java, log).what.endswith(
        ": SparkException: Could not parse Master URL: 'here'"
    )


# ---- reports


def test_unwritable_report_leaves_nothing_and_names_the_users_path(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is a directory"):
        page.check_writable(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written"):
        page.save("x", tmp_path)
    assert not list(tmp_path.parent.glob(".*.new"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/report\.html cannot be written"):
        page.check_writable(tmp_path / "file" / "report.html")
    page.check_writable(tmp_path / "new" / "report.html")

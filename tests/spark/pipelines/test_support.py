"""Parts of the pipelines that need neither Spark nor a broker: pages, charts, batches, checks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer
from pyspark.errors import AnalysisException, StreamingQueryException
from typer.testing import CliRunner

from sluice.cli.pipelines import spark_command, stream_progress
from sluice.cli.root import app
from sluice.cli.support import (
    CommandError,
    parse_time_argument,
)
from sluice.http_client import Endpoint
from sluice.report import element, formatting, page
from sluice.report import time_charts as charts
from sluice.spark import pipelines
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.jobs import audit
from sluice.spark.pipelines.support import publish_batches, stream_runner, time_buckets
from sluice.spark.pipelines.tables import open_table
from sluice.spark.runtime import spark_home
from tests.support.broker_process import same_build

NOON = datetime(2030, 5, 17, 12, 0, tzinfo=UTC)


def test_string_never_becomes_markup() -> None:
    made = element(
        "p", "<b>&", element("i", "x"), None, ["a", "b"], title='"<', class_="k", hidden=None
    )
    assert str(made) == '<p title="&quot;&lt;" class="k">&lt;b&gt;&amp;<i>x</i>ab</p>'


def test_axis_ends_at_a_round_number_and_marks_full_hours() -> None:
    assert charts.scale(310) == (400, [0, 100, 200, 300, 400])
    assert charts.scale(0.37)[0] == pytest.approx(0.4)
    assert charts.scale(0)[0] > 0
    marks = charts.round_times(NOON + timedelta(minutes=7), 5 * 3600)
    assert [formatting.format_axis_time(time, 5 * 3600) for time in marks] == [
        "13:00",
        "14:00",
        "15:00",
        "16:00",
        "17:00",
    ]


def test_time_buckets_without_events_are_shown_too() -> None:
    bucket = time_buckets.choose_bucket(NOON, NOON + timedelta(hours=20))
    assert bucket == timedelta(minutes=15)
    assert time_buckets.choose_bucket(None, None) == timedelta(seconds=10)
    assert time_buckets.fill_gaps([NOON + 3 * bucket, NOON], bucket) == [
        NOON + nth * bucket for nth in range(4)
    ]
    assert time_buckets.fill_gaps([], bucket) == []
    assert time_buckets.fill_gaps([NOON], bucket, 4) == [
        NOON + nth * bucket for nth in (-1, 0, 1, 2)
    ]


def test_line_is_interrupted_where_values_are_missing() -> None:
    times = [NOON + timedelta(minutes=nth) for nth in range(5)]
    drawn = str(
        charts.lines(
            "t", "u", times, timedelta(minutes=1), [charts.Series("one", [1, 2, None, 4, 5])]
        )
    )
    assert drawn.count('class="line tone-0"') == 2


def test_numbers_and_times_are_formatted_for_people() -> None:
    assert [formatting.format_short(number) for number in (0, 0.25, 12, 1234, 5_600_000)] == [
        "0",
        "0.25",
        "12",
        "1.2k",
        "5.6M",
    ]
    assert [
        formatting.format_duration(seconds) for seconds in (0, 0.35, 4.2, 200, 7500, 100_000)
    ] == [
        "0 ms",
        "350 ms",
        "4.2 s",
        "3 min 20 s",
        "2 h 5 min",
        "1 d 3 h",
    ]
    assert formatting.payload_text(b"\xff\x00") == "(2 B, not text)"
    assert formatting.payload_text(b"a\x1b[31m" + b"b" * 300, 10) == "a [31mbbbb…"


def test_times_are_shown_in_utc_in_any_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Kolkata")
            time.tzset()
            here = datetime.fromtimestamp(NOON.timestamp())  # as Spark returns it, without a zone
            assert here.hour == 17 and formatting.format_time(here) == "2030-05-17 12:00:00"
            marks = charts.round_times(here, 3600)
            assert [formatting.format_axis_time(one, 3600) for one in marks] == [
                "12:00",
                "12:15",
                "12:30",
                "12:45",
                "13:00",
            ]
    finally:
        time.tzset()


def test_report_is_replaced_atomically(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.html"
    page.save("one", file)
    page.save("two", file)
    assert [one.name for one in file.parent.iterdir()] == ["report.html"]
    assert file.read_text() == "two"


def test_batches_are_cut_by_size_at_deterministic_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish_batches, "MAX_BATCH_BYTES", 1000)
    table = pa.table({"value": [b"x" * 400] * 5 + [b"y" * 5000, b"z"]})
    sizes = [
        [portion.num_rows for portion in publish_batches.split_batches(table)] for _ in range(2)
    ]
    assert sizes == [[2, 2, 1, 1, 1]] * 2
    monkeypatch.setattr(publish_batches, "MAX_BATCH_ROWS", 3)
    monkeypatch.setattr(publish_batches, "MAX_BATCH_BYTES", 1 << 20)
    assert [portion.num_rows for portion in publish_batches.split_batches(table)] == [3, 3, 1]
    assert list(publish_batches.split_batches(table.slice(0, 0))) == []


def test_stream_failure_is_explained() -> None:
    java = (
        "[STREAM_FAILED] Query terminated\nTraceback (most recent call last):\n  File x\n"
        "sluice.spark.errors.DataLost: rows are gone. Give it a group\n"
        "\tat org.apache\nValueError: other\n"
    )
    failure = stream_runner.explain_error(Exception(java))
    assert (failure.what, failure.kind) == ("rows are gone. Give it a group", "DataLost")
    assert stream_runner.explain_error(Exception("")).what == "Exception"
    spark = (
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: no room."
        " SQLSTATE: XXKST\nat x"
    )
    assert stream_runner.explain_error(Exception(spark)).what == "no room."
    java = (
        "An error occurred while calling o1.start.\n"
        ": java.io.IOException: mkdir of /proc/x failed\n\tat y"
    )
    assert (
        stream_runner.explain_error(Exception(java)).what == "IOException: mkdir of /proc/x failed"
    )


class EndlessQuery:
    """A stream that runs until it is stopped, and requests that itself after three polls."""

    def __init__(self, asked: Event) -> None:
        self.looks = 0
        self.is_stopped = False
        sink = SimpleNamespace(numOutputRows=-1)
        self.recentProgress = [
            SimpleNamespace(batchId=nth, numInputRows=10 * nth, sink=sink) for nth in range(3)
        ]
        self._asked = asked

    def awaitTermination(self, seconds: float) -> bool:
        self.looks += 1
        if self.looks == 3:
            self._asked.set()
        return self.is_stopped

    def stop(self) -> None:
        self.is_stopped = True


def test_stopped_stream_ends_with_a_summary() -> None:
    asked = Event()
    stream: Any = EndlessQuery(asked)
    done = stream_runner.run(lambda: stream, once=False, stop_requested=asked)
    assert stream.is_stopped and stream.looks == 3
    assert (done.rows, done.batches, done.restarts) == (30, 2, 0)


def test_only_a_stream_with_a_checkpoint_says_that_it_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_context = spark_command.SparkCommandContext("flow", Endpoint("http://127.0.0.1:1"), False)
    for has_checkpoint in (False, True):
        asked = Event()
        start: Any = partial(EndlessQuery, asked)
        with pytest.MonkeyPatch.context() as known:
            known.setattr(stream_progress, "stop_on_signal", partial(nullcontext, asked))
            stream_progress.run_stream(fake_context, "watching", start, False, None, has_checkpoint)
        notes = capsys.readouterr().err
        assert "watching; Ctrl-C stops it" in notes and ("the next time" in notes) == has_checkpoint


class FailingQuery(EndlessQuery):
    """A stream that has read rows, and fails at the first poll."""

    def awaitTermination(self, seconds: float) -> bool:
        raise StreamingQueryException("sluice.spark.errors.BrokerGone: no answer")


def test_stream_resumes_after_a_broker_outage_longer_than_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Event()
    monkeypatch.setattr(asked, "wait", lambda pause: False)
    starts: list[Any] = [
        FailingQuery(asked),
        AnalysisException("sluice.spark.errors.BrokerGone: no answer"),
        EndlessQuery(asked),
    ]
    received: list[tuple[str, float]] = []

    def start() -> Any:
        this = starts.pop(0)
        if isinstance(this, Exception):
            raise this
        return this

    done = stream_runner.run(
        start,
        False,
        stop_requested=asked,
        on_retry=lambda why, pause: received.append((why.what, pause)),
    )
    assert (done.rows, done.restarts, starts) == (30, 2, [])
    assert received == [("no answer", 1.0), ("no answer", 2.0)]


def test_stream_of_a_user_is_started_again_after_failures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Event()
    monkeypatch.setattr(asked, "wait", lambda pause: False)
    starts: list[Any] = [FailingQuery(asked), EndlessQuery(asked)]
    pipelines.keep_running(lambda: starts.pop(0), asked)
    assert (starts, caplog.messages) == ([], ["no answer; again in 1 s"])


def test_slow_python_start_gets_a_longer_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Event()
    monkeypatch.setattr(asked, "wait", lambda pause: False)

    class Late(EndlessQuery):
        def awaitTermination(self, seconds: float) -> bool:
            raise StreamingQueryException(
                "[STREAM_FAILED] Query ... Python worker failed to connect back."
            )

    starts: list[Any] = [Late(asked), Late(asked), EndlessQuery(asked)]
    done = stream_runner.run(lambda: starts.pop(0), once=True, stop_requested=asked)
    assert (done.rows, done.restarts) == (30, 2)
    starts = [Late(asked) for _ in range(stream_runner.MAX_START_TRIES + 1)]
    with pytest.raises(stream_runner.StreamFailed, match="too much to do"):
        stream_runner.run(lambda: starts.pop(0), once=True, stop_requested=asked)


def test_stream_that_cannot_start_is_not_retried() -> None:
    def start() -> Any:
        raise AnalysisException("no such column")

    with pytest.raises(AnalysisException):
        stream_runner.run(start, once=False)


def test_table_format_is_detected(tmp_path: Path) -> None:
    (tmp_path / "batch=q-000000000").mkdir()
    with pytest.raises(InvalidOption, match="Parquet files, not delta"):
        open_table(tmp_path, "delta")
    with pytest.raises(InvalidOption, match="orc"):
        open_table(tmp_path / "new", "orc")
    for name in ("s3://bucket/table", Path("s3://bucket/table")):
        with pytest.raises(InvalidOption, match="not a path"):
            open_table(name)


def test_audit_refuses_invalid_sources_before_spark_is_started(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    assert audit.parse_source(f"json:{tmp_path}/*.json#job") == audit.AuditSource(
        "json", f"{tmp_path}/*.json", "job"
    )
    assert audit.parse_source("queue:a").queue == "a"
    for wrong, expected in (
        ("json:nowhere.json", "no file nowhere.json"),
        ("xml:a", "names no source"),
        ("queue:", "names no source"),
        (str(tmp_path), "holds no rows"),
    ):
        with pytest.raises(InvalidOption, match=expected):
            audit.parse_source(wrong)


def test_relative_time_is_refused_where_a_command_may_be_repeated() -> None:
    assert parse_time_argument("--since", "2030-01-31", None) == "2030-01-31T00:00:00.000+00:00"
    assert parse_time_argument("--since", "2h", 7200.0) == "1970-01-01T00:00:00.000+00:00"
    for now in (None, 7200.0):
        with pytest.raises(CommandError, match="--since 'soon' is n"):
            parse_time_argument("--since", "soon", now)
    with pytest.raises(CommandError, match="is not a time"):
        parse_time_argument("--since", "2h", None)


def test_java_starts_python_without_the_zip_that_lacks_compiled_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(spark_home.SPARK_HOME_VARIABLE, raising=False)
    with spark_home.spark_home_without_zip():
        made = Path(os.environ[spark_home.SPARK_HOME_VARIABLE])
        assert (made / "jars").is_dir() and (made / "bin" / "spark-submit").is_file()
        assert not (made / "python").exists()
    assert spark_home.SPARK_HOME_VARIABLE not in os.environ
    monkeypatch.setenv(spark_home.SPARK_HOME_VARIABLE, "/their/own")
    with spark_home.spark_home_without_zip():
        assert os.environ[spark_home.SPARK_HOME_VARIABLE] == "/their/own"


def test_spark_gets_the_token_file_and_not_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    monkeypatch.setenv("SLUICE_TOKEN_FILE", str(file))
    received: list[dict[str, str]] = []
    program = typer.Typer()

    @spark_command.pipeline_command(program, "one")
    def one(fake_context: spark_command.SparkCommandContext) -> None:
        received.append(fake_context.queues.options())

    for words in ([], ["--token-file", str(file)], ["--token", "other"]):
        assert CliRunner().invoke(program, words).exit_code == 0
    assert [options.get("tokenFile") for options in received] == [str(file), str(file), None]
    assert [options.get("token") for options in received] == [None, None, "other"]


def test_killed_java_is_reported() -> None:
    from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]

    for fault in (
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o55.awaitTermination"),
        ConnectionRefusedError(111, "Connection refused"),
    ):
        with (
            pytest.raises(CommandError, match="Java, in which Spark runs, has ended"),
            spark_command._explain_errors(None),
        ):
            raise fault


def test_without_java_a_pipeline_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    ran = CliRunner().invoke(app, ["pipeline", "audit", "--published", "queue:a"])
    assert ran.exit_code == 1
    assert (
        "apt-get install openjdk-17-jre-headless" in ran.stderr
        and len(ran.stderr.splitlines()) == 2
    )


def test_without_pyspark_a_pipeline_says_what_to_install_and_other_commands_work() -> None:
    hidden = (
        "import sys; sys.modules['pyspark'] = None; sys.argv[0] = 'sluice'; import sluice.cli; "
    )
    run = "import importlib.util as u; real = u.find_spec; "
    run += "u.find_spec = lambda name, *a: None if name == 'pyspark' else real(name, *a);"
    run += " sluice.cli.main()"
    for words, code, expected in (
        (["pipeline", "archive", "-q", "a", "--to", "b"], 1, "sluice[spark]"),
        (["--help"], 0, ""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", hidden + run, *words],
            env=same_build(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, expected in done.stderr) == (code, True), done.stderr


def test_command_line_starts_without_spark() -> None:
    look = (
        "import sys, sluice.cli;"
        " print(*[one for one in ('pyspark', 'pyarrow', 'pandas') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], env=same_build(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "\n", done.stderr

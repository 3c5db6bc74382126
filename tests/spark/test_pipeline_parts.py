"""Parts of the pipelines that need neither Spark nor a broker: pages, charts, portions, what is missing to begin."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from sluice.cli import app
from sluice.markup import element
from sluice.spark.faults import InvalidOption
from sluice.spark.pipelines import queues, running, spans
from sluice.spark.pipelines.report import charts, page, wording
from sluice.spark.pipelines.tables import open_table
from tests.brokers import same_build

NOON = datetime(2030, 5, 17, 12, 0, tzinfo=UTC)


def test_a_string_never_becomes_markup() -> None:
    made = element("p", "<b>&", element("i", "x"), None, ["a", "b"], title='"<', class_="k", hidden=None)
    assert str(made) == '<p title="&quot;&lt;" class="k">&lt;b&gt;&amp;<i>x</i>ab</p>'


def test_an_axis_ends_at_a_round_number_and_marks_full_hours() -> None:
    assert charts.scale(310) == (400, [0, 100, 200, 300, 400])
    assert charts.scale(0.37)[0] == pytest.approx(0.4)
    assert charts.scale(0)[0] > 0
    marks = charts.round_times(NOON + timedelta(minutes=7), 5 * 3600)
    assert [wording.mark(time, 5 * 3600) for time in marks] == ["13:00", "14:00", "15:00", "16:00", "17:00"]


def test_spans_without_events_are_shown_too() -> None:
    bucket = spans.choose_bucket(NOON, NOON + timedelta(hours=20))
    assert bucket == timedelta(minutes=15)
    assert spans.choose_bucket(None, None) == timedelta(seconds=10)
    assert spans.fill([NOON + 3 * bucket, NOON], bucket) == [NOON + nth * bucket for nth in range(4)]
    assert spans.fill([], bucket) == []
    assert spans.fill([NOON], bucket, 4) == [NOON + nth * bucket for nth in (-1, 0, 1, 2)]


def test_a_line_is_interrupted_where_nothing_is_known() -> None:
    times = [NOON + timedelta(minutes=nth) for nth in range(5)]
    drawn = str(
        charts.lines("t", "u", times, timedelta(minutes=1), [charts.Series("one", [1, 2, None, 4, 5])])
    )
    assert drawn.count('class="line tone-0"') == 2


def test_numbers_and_times_are_said_as_people_say_them() -> None:
    assert [wording.short(number) for number in (0, 0.25, 12, 1234, 5_600_000)] == [
        "0",
        "0.25",
        "12",
        "1.2k",
        "5.6M",
    ]
    assert [wording.lasting(seconds) for seconds in (0, 0.35, 4.2, 200, 7500, 100_000)] == [
        "0 ms",
        "350 ms",
        "4.2 s",
        "3 min 20 s",
        "2 h 5 min",
        "1 d 3 h",
    ]
    assert wording.text_of(b"\xff\x00") == "(2 B, not text)"
    assert wording.text_of(b"a\x1b[31m" + b"b" * 300, 10) == "a [31mbbbb…"


def test_times_are_told_in_utc_wherever_the_machine_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Kolkata")
            time.tzset()
            here = datetime.fromtimestamp(NOON.timestamp())  # as Spark hands it over, without a zone
            assert here.hour == 17 and wording.moment(here) == "2030-05-17 12:00:00"
            marks = charts.round_times(here, 3600)
            assert [wording.mark(one, 3600) for one in marks] == ["12:00", "12:15", "12:30", "12:45", "13:00"]
    finally:
        time.tzset()


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.html"
    page.save("one", file)
    page.save("two", file)
    assert [one.name for one in file.parent.iterdir()] == ["report.html"]
    assert file.read_text() == "two"


def test_portions_are_cut_at_their_size_and_in_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "PORTION_BYTES", 1000)
    table = pa.table({"value": [b"x" * 400] * 5 + [b"y" * 5000, b"z"]})
    sizes = [[portion.num_rows for portion in queues.portions(table)] for _ in range(2)]
    assert sizes == [[2, 2, 1, 1, 1]] * 2
    monkeypatch.setattr(queues, "PORTION_ROWS", 3)
    monkeypatch.setattr(queues, "PORTION_BYTES", 1 << 20)
    assert [portion.num_rows for portion in queues.portions(table)] == [3, 3, 1]
    assert list(queues.portions(table.slice(0, 0))) == []


def test_a_failure_of_a_stream_is_told_in_our_words() -> None:
    java = (
        "[STREAM_FAILED] Query terminated\nTraceback (most recent call last):\n  File x\n"
        "sluice.spark.faults.DataLost: rows are gone. Give it a group\n\tat org.apache\nValueError: other\n"
    )
    assert running.explained(Exception(java)).what == "DataLost: rows are gone. Give it a group"
    assert running.explained(Exception("")).what == "Exception"


class Endless:
    """A stream that goes on until it is stopped, and after three looks asks for that itself."""

    def __init__(self, asked: Event) -> None:
        self.looks = 0
        self.is_stopped = False
        self.recentProgress = [SimpleNamespace(batchId=nth, numInputRows=10 * nth) for nth in range(3)]
        self._asked = asked

    def awaitTermination(self, seconds: float) -> bool:
        self.looks += 1
        if self.looks == 3:
            self._asked.set()
        return self.is_stopped

    def stop(self) -> None:
        self.is_stopped = True


def test_a_stream_that_is_asked_to_stop_ends_with_a_summary() -> None:
    asked = Event()
    stream: Any = Endless(asked)
    done = running.run(lambda: stream, once=False, asked=asked)
    assert stream.is_stopped and stream.looks == 3
    assert (done.rows, done.batches, done.restarts) == (30, 2, 0)


def test_a_table_is_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "batch=q-000000000").mkdir()
    with pytest.raises(InvalidOption, match="Parquet files, not delta"):
        open_table(tmp_path, "delta")
    with pytest.raises(InvalidOption, match="orc"):
        open_table(tmp_path / "new", "orc")
    with pytest.raises(InvalidOption, match="not a path"):
        open_table("s3://bucket/table")


def test_without_java_a_pipeline_says_in_one_line_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    ran = CliRunner().invoke(app, ["pipeline", "audit", "--published", "queue:a"])
    assert ran.exit_code == 1
    assert "apt-get install openjdk-17-jre-headless" in ran.stderr and len(ran.stderr.splitlines()) == 2


def test_without_pyspark_a_pipeline_says_what_to_install_and_other_commands_work() -> None:
    hidden = "import sys; sys.modules['pyspark'] = None; sys.argv[0] = 'sluice'; import sluice.cli; "
    run = "import importlib.util as u; real = u.find_spec; "
    run += "u.find_spec = lambda name, *a: None if name == 'pyspark' else real(name, *a); sluice.cli.main()"
    for words, code, said in (
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
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_the_command_line_starts_without_spark() -> None:
    look = "import sys, sluice.cli; print(*[one for one in ('pyspark', 'pyarrow', 'pandas') if one in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", look], env=same_build(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "\n", done.stderr

"""Reports without Java: windows that are summed, pages, and what the commands refuse and print."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.pipelines import report_commands, spark_command
from sluice.cli.root import app
from sluice.cli.support import (
    CommandError,
    Output,
)
from sluice.report import formatting
from sluice.report import time_charts as charts
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines import queues
from sluice.spark.pipelines.jobs import audit, dead_letters, flow
from sluice.spark.pipelines.support import time_buckets
from sluice.spark.pipelines.support.latency_windows import (
    MIN_LATENCY_SECONDS,
    STEP_FACTOR,
    Count,
    Windows,
    step_seconds,
)
from tests.spark.conftest import SparkHarness

NOON = datetime(2030, 5, 17, 12, 0, tzinfo=UTC)
HOUR = 3600
DAY = 24 * HOUR


def counted(
    start: int, messages: int, queue: str = "jobs", seconds: int = 60, taking: float | None = None
) -> Count:
    """Return counts as Spark does for messages of equal latency."""
    step = None
    if taking is not None:
        step = next(nth for nth in range(2000) if taking < MIN_LATENCY_SECONDS * STEP_FACTOR**nth)
    return Count(start, start + seconds, queue, step, messages, 10 * messages, taking)


def windows(*counts: Count, most: int = 5000) -> Windows:
    found = Windows(max_windows=most)
    found.add(counts)
    return found


@contextmanager
def zone(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


# ---- windows


def test_windows_do_not_depend_on_message_order() -> None:
    counts = [
        counted(60 * nth, 5, queue, taking=seconds)
        for nth in range(30)
        for queue in ("a", "b")
        for seconds in (0.01, 2.5)
    ]
    known = list(windows(*counts))
    random.Random(7).shuffle(counts)
    late = Windows()
    for one in (
        counts
    ):  # each in a batch of its own, the past of one partition after the present of another
        late.add([one])
    assert list(late) == known and late.total().messages == 600


def test_overall_percentiles_are_not_those_of_the_windows() -> None:
    quiet = [counted(60 * nth, 1, taking=10.0) for nth in range(9)]
    found = windows(*quiet, counted(600, 991, taking=0.1))
    reported = flow.summary(found)["latency"]
    assert reported["p50"] == pytest.approx(0.1, rel=0.025) and reported["p99"] == pytest.approx(
        0.1, rel=0.025
    )
    assert (reported["p99_worst"], reported["slowest"]) == (pytest.approx(10.0, rel=0.025), 10.0)


@pytest.mark.parametrize("seconds", [0.001, 0.0015, 0.25, 3.0, 86_400.0])
def test_latency_is_within_a_fortieth_and_never_above_the_slowest(seconds: float) -> None:
    [row] = windows(counted(0, 3, taking=seconds))
    assert row["p50"] == pytest.approx(seconds, rel=0.025)
    assert row["p99"] <= row["slowest"] == seconds
    assert step_seconds(0) == 0.0


def test_windows_are_widened_before_they_become_too_many_without_loss() -> None:
    found = windows(*(counted(60 * nth, 2) for nth in range(10_000)), most=1000)
    assert len(found) <= 1000 and found.total().messages == 20_000
    assert (found.requested_seconds, found.seconds) == (60, 900)
    assert found.peak() == pytest.approx(2 / 60)
    assert "Windows of 1 min would be too many: these are of 15 min" in flow.report(
        found, "jobs", NOON
    )
    many = windows(*(counted(0, 1, f"q{nth}") for nth in range(50)), most=10)
    assert len(many.queues()) == 50 and many.total().messages == 50


def test_two_messages_a_year_apart_make_a_small_page() -> None:
    for seconds in (1, 7, 60):
        found = windows(counted(0, 1, seconds=seconds), counted(364 * DAY, 1, seconds=seconds))
        assert found.seconds == seconds and len(found) == 2
        assert len(flow.report(found, "jobs", NOON)) < 100_000
    assert "<circle" in flow.report(windows(counted(0, 1), counted(120, 1)), "jobs", NOON)


def test_empty_flow_and_flow_without_times_have_a_page_too() -> None:
    assert "Nothing has come through" in flow.report(Windows(), "jobs", NOON)
    assert flow.summary(Windows())["messages"] == 0 and flow.summary(Windows())["window"] is None
    untimed = windows(counted(0, 5))
    assert "--since" in flow.report(untimed, "jobs", NOON) and "p99" not in flow.report(
        untimed, "jobs", NOON
    )
    assert flow.summary(untimed)["latency"] is None


def test_number_of_time_buckets_is_bounded_for_any_range() -> None:
    for size in (1, 7, 10, 60, 300, 3600, DAY, 1_000_000):
        for seconds in (0, 100, DAY, 400 * DAY, 60_000 * DAY):
            found = time_buckets.bucket_seconds_for(size, seconds, 96)
            assert seconds / found <= 96 and found % size == 0
    assert time_buckets.bucket_seconds_for(60, 6 * HOUR, 96) == 300


@pytest.mark.parametrize("place", ["Europe/Berlin", "America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize("month", [3, 10, 11])
def test_flow_across_a_daylight_saving_change_has_all_its_windows(place: str, month: int) -> None:
    first = int(datetime(2026, month, 1, tzinfo=UTC).timestamp())
    with zone(place):
        found = windows(*(counted(first + HOUR * nth, 100, seconds=HOUR) for nth in range(31 * 24)))
        reported = flow.summary(found)
        assert (reported["windows"], reported["peak_per_second"]) == (31 * 24, 100 / HOUR)
        assert all(one["end"] - one["start"] == timedelta(hours=1) for one in found)
        assert "2026" in flow.report(found, "jobs", NOON)


# ---- texts and charts


def test_axis_labels_are_all_different() -> None:
    for axis in (charts.NUMBERS, charts.COUNTS, charts.TIMES):
        for power in range(-8, 9):
            for digit in (0, 1, 1.3, 2, 3.7, 5, 6, 8, 9.9):
                top, ticks = axis.scale(digit * 10.0**power)
                texts = [axis.show(tick) for tick in ticks]
                assert top >= digit * 10.0**power * 0.999 and len(set(texts)) == len(texts) > 1, (
                    texts
                )
    assert [formatting.format_duration(tick) for tick in charts.scale_duration(5000)[1]] == [
        "0 ms",
        "30 min",
        "1 h",
        "1 h 30 min",
    ]


def test_rates_use_a_unit_that_gives_a_readable_number() -> None:
    rates = (0.0, 1 / DAY / 2, 1 / 300, 1 / 60, 0.5, 2.5, 1234)
    assert [formatting.format_rate(one) for one in rates] == [
        "0/s",
        "0.5/d",
        "12/h",
        "1/min",
        "30/min",
        "2.5/s",
        "1.2k/s",
    ]
    slow = flow.report(
        windows(counted(0, 1, seconds=300), counted(300, 1, seconds=300)), "jobs", NOON
    )
    assert "messages per hour" in slow and "12/h" in slow and "0/s" not in slow
    assert (
        formatting.format_rate(1 / 300, reference=5.0) == "0.00333/s"
    )  # in one column with others


def test_empty_latencies_have_an_axis_too() -> None:
    page = flow.report(windows(counted(0, 5, taking=0.0), counted(60, 5, taking=0.0)), "jobs", NOON)
    assert [re.search(f">{nth} ms</text>", page) is not None for nth in range(5)] == [True] * 5


def test_truncated_payload_is_classified_by_its_full_type() -> None:
    text = ("あ" * 200).encode()
    assert formatting.payload_text(text[:400], length=len(text)) == "あ" * 133 + "…"
    assert (
        formatting.payload_text(text[:400]) == "(400 B, not text)"
    )  # the data ends within a character
    assert formatting.payload_text(b"\xff" * 400, length=1 << 20) == "(1.0 MiB, not text)"
    assert formatting.payload_text(b"short", length=5) == "short"


def test_queues_beyond_the_palette_are_shown_as_one() -> None:
    found = windows(
        *(counted(60 * nth, 100 - queue, f"q{queue:02}") for nth in range(2) for queue in range(60))
    )
    page = flow.report(found, "all", NOON)
    assert "q06" in page and "53 others" in page
    assert "The 50 busiest; and 10 others, not shown." in page
    eight = flow.report(windows(*(counted(0, 1, f"q{nth}") for nth in range(8))), "all", NOON)
    assert "other" not in eight


# ---- dead letters


class Frame:
    """A DataFrame of which only the rows matter."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self._rows = [SimpleNamespace(asDict=lambda row=row: row) for row in rows]

    def collect(self) -> list[Any]:
        return self._rows


def test_dead_letters_during_a_daylight_saving_change_keep_order_and_bars() -> None:
    begin = int(datetime(2026, 10, 24, 18, tzinfo=UTC).timestamp())
    with zone("Europe/Berlin"):
        # As Spark returns them: the hour from two to three o'clock exists twice.
        frame: Any = Frame(
            *(
                {
                    "start": datetime.fromtimestamp(begin + HOUR * nth),
                    "cause": None,
                    dead_letters.COUNT_COLUMN: 1,
                }
                for nth in range(12)
            )
        )
        spans_ = dead_letters._collect_rows(frame)
    starts = [one["start"] for one in spans_]
    assert starts == time_buckets.fill_gaps(starts, timedelta(hours=1)) and len(set(starts)) == 12
    found = dead_letters.Findings(
        12, 0, 1, starts[0], starts[-1], timedelta(hours=1), buckets=spans_
    )
    assert dead_letters.report(found, "jobs", NOON).count("<title>2026-") == 12


def dead_letters_of(*numbers: int) -> dead_letters.Shares:
    return dead_letters.Shares(
        9,
        [
            {"why": f"reason {nth}", dead_letters.COUNT_COLUMN: number}
            for nth, number in enumerate(numbers)
        ],
    )


def test_reasons_and_groups_beyond_the_most_frequent_are_shown_as_one() -> None:
    bars = dead_letters_of(50, 30).bars(100, lambda one: str(one["why"]))
    assert [(name, value) for name, value, _ in bars] == [
        ("reason 0", 50),
        ("reason 1", 30),
        ("7 others", 20),
    ]
    groups = dead_letters.Shares(
        1, [{"failed_queue": "jobs", "group": "mail", dead_letters.COUNT_COLUMN: 100}]
    )
    found = dead_letters.Findings(
        100, 0, 1, NOON, NOON, reasons=dead_letters_of(50, 30), groups=groups
    )
    page = dead_letters.report(found, "jobs", NOON)
    assert page.count(">7 others<") == 1 and ">mail<" in page


# ---- audit


def test_audit_source_may_be_a_groups_backlog_or_a_queues_dead_letters() -> None:
    assert audit.parse_source("queue:a?group=w#string(key)") == audit.AuditSource(
        "queue", "a", "string(key)", "w"
    )
    assert audit.parse_source(f"{audit.DEAD_LETTERS}:a") == audit.AuditSource(
        audit.DEAD_LETTERS, "a", ""
    )
    for wrong in ("queue:?group=w", "queue:a?group=", f"{audit.DEAD_LETTERS}:"):
        with pytest.raises(InvalidOption, match="names no source"):
            audit.parse_source(wrong)


class Side:
    """The rows of a side; records when it is read."""

    def __init__(self, name: str, read: list[str]) -> None:
        self.name = name
        self._read = read

    def persist(self) -> Side:
        return self

    def unpersist(self) -> None:
        self._read.append(f"forgotten {self.name}")

    def count(self) -> int:
        self._read.append(self.name)
        return 0


def test_backlog_is_read_before_the_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def fake_read_side(spark: object, queues: object, source: audit.AuditSource) -> Side:
        read.append(f"opened {source.location}")
        return Side(source.location, read)

    def fake_compare_sides(sides: dict[str, Side]) -> audit.AuditResult:
        read.append("judged")
        return audit.AuditResult(sorted(sides))

    monkeypatch.setattr(audit, "read_side", fake_read_side)
    monkeypatch.setattr(audit, "compare_sides", fake_compare_sides)
    unused: Any = None
    given = {
        name: audit.AuditSource("queue", name, "")
        for name in ("published", "acked", "dead", "waiting")
    }
    assert audit.run(unused, unused, given).known == ["acked", "dead", "published", "waiting"]
    assert read[:2] == ["opened waiting", "waiting"]
    assert read[2:] == [
        "opened published",
        "opened acked",
        "opened dead",
        "judged",
        "forgotten waiting",
    ]


class RecordingQueues:
    """Queues that record the calls."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def exists(self, queue: str) -> bool:
        return True

    def dead_letter_queues(self, queue: str) -> list[str]:
        return [] if queue == "well" else ["failed"]

    def read(self, spark: object, queue: str, **more: str) -> str:
        self.recorded.append((queue, more))
        return "rows"

    def dead_letters(self, spark: object, queue: str, dead_letter_queues: list[str]) -> str:
        self.recorded.append((queue, dead_letter_queues))
        return "dead"


def test_audit_side_is_read_as_its_source_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "select_ids", lambda rows, expression: (rows, expression))
    asked: Any = RecordingQueues()
    spark: Any = SimpleNamespace(createDataFrame=lambda rows, schema: schema)
    sources = (
        "queue:a,b",
        "queue:a?group=w#key",
        f"{audit.DEAD_LETTERS}:a",
        f"{audit.DEAD_LETTERS}:well",
    )
    found: list[Any] = [audit.read_side(spark, asked, audit.parse_source(one)) for one in sources]
    assert found == [("rows", ""), ("rows", "key"), ("dead", ""), "id string"]
    of_group = {"group": "w", "startingOffsets": "group", "failOnDataLoss": "false"}
    assert asked.recorded == [("/a,b/", {}), ("a", of_group), ("a", ["failed"])]


class RecordingContext:
    """The context of a broker whose queue `jobs` has a group `w` and sends its dead letters to
    `failed`.
    """

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.out = SimpleNamespace(note=self.recorded.append)

    def groups(self, queue: str) -> set[str]:
        return {"w"}

    def dead_letter_queues(self, queue: str) -> list[str]:
        self.recorded.append(f"looked for dead letters of {queue}")
        return []

    def describe(self, queue: str) -> dict[str, Any]:
        stats = {"name": queue, "dlq": "failed", "is_dead_letters": queue == "failed"}
        return {"stats": stats, "config": {"dlq_config": {}}}


def test_audit_names_the_group_it_treats_as_waiting_and_refuses_a_missing_one() -> None:
    fake_context: Any = RecordingContext()
    report_commands._check_source(fake_context, "waiting", audit.parse_source("queue:jobs"))
    assert len(fake_context.recorded) == 1 and "queue:jobs?group=w" in fake_context.recorded[0]
    report_commands._check_source(fake_context, "waiting", audit.parse_source("queue:jobs?group=w"))
    report_commands._check_source(
        fake_context, "dead", audit.parse_source(f"{audit.DEAD_LETTERS}:jobs")
    )
    assert fake_context.recorded[1:] == ["looked for dead letters of jobs"]
    with pytest.raises(CommandError, match="jobs has no group x"):
        report_commands._check_source(
            fake_context, "waiting", audit.parse_source("queue:jobs?group=x")
        )
    with pytest.raises(CommandError, match="holds no dead letters") as refused:
        report_commands._check_source(fake_context, "dead", audit.parse_source("queue:jobs"))
    assert (
        "queue:failed" in refused.value.remedy
        and f"{audit.DEAD_LETTERS}:jobs" in refused.value.remedy
    )


# ---- commands


def test_comma_in_a_queue_name_is_part_of_it(harness: SparkHarness) -> None:
    assert queues.exact_subscription("a/b", "c") == "a/b,c"
    reported = queues.exact_subscription("a,b", "c.d")
    assert [
        name for name in ("a,b", "c.d", "a", "b", "cxd") if queues.includes_queue(reported, name)
    ] == [
        "a,b",
        "c.d",
    ]
    for name in (harness.queue, f"{harness.queue},b"):
        harness.fill([name], queue=name)
    assert harness.values(
        **queues._subscribe_option(queues.exact_subscription(f"{harness.queue},b"))
    ) == [f"{harness.queue},b"]


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *words], env={"SLUICE_URL": "http://127.0.0.1:1"})


def test_option_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    description = {"stats": {"is_dead_letters": True}}
    monkeypatch.setattr(
        spark_command.SparkCommandContext, "check_queue", lambda fake_context, name: description
    )
    table = ["--to", str(tmp_path / "table")]
    for words, texts in (
        (["flow", "-q", "a", "--every", "10s"], "--every does nothing without --follow"),
        (
            ["compact", "-q", "a", "--to-queue", "b", "--group", "g"],
            "--group does nothing with --to-queue",
        ),
        (["archive", "-q", "dlq/a", *table, "-g", "g"], "--group does nothing for dlq/a"),
        (
            [
                "transform",
                "-q",
                "a",
                "--to",
                "b",
                "--checkpoint",
                "c",
                "--watermark",
                "1m",
                "--function",
                "x.py:f",
            ],
            "--watermark does nothing with --function",
        ),
    ):
        ran = command(*words)
        assert ran.exit_code == 2 and texts in ran.stderr, ran.stderr


def test_dry_run_without_dead_letters_answers_like_one_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        spark_command.SparkCommandContext, "dead_letter_queues", lambda fake_context, queue: []
    )
    dry, wet = (
        command("redrive", "-q", "a", "--json", *more) for more in (["--dry-run"], ["--yes"])
    )
    assert json.loads(dry.stdout) == {"would_put_back": 0, dead_letters.COUNT_COLUMN: []}
    assert json.loads(wet.stdout) == {"put_back": 0, "skipped": 0}


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Output(as_json=False).spinner().disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert not Output(as_json=False).spinner().disable
    assert Output(as_json=True).spinner().disable

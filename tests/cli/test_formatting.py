"""Formatting of numbers, times and texts."""

from __future__ import annotations

import pytest

from sluice.cli.support import formatting

NOON = formatting.to_timestamp("2026-03-01T12:00:00.000Z")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0ms"),
        (0.35, "350ms"),
        (4.24, "4.2s"),
        (4.0, "4s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (200, "3m 20s"),
        (7500, "2h 5m"),
        (86400 * 3 + 3600 * 4, "3d 4h"),
        (-5, "-5s"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, expected: str) -> None:
    assert formatting.format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_023_990, "1.0 MiB"),
        (157_286_400, "150 MiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_sizes_have_a_unit(number: int, expected: str) -> None:
    assert formatting.format_size(number) == expected


@pytest.mark.parametrize(
    ("per_second", "expected"),
    [(0.0, "0"), (0.04, "0"), (0.4, "0.4"), (9.99, "10.0"), (12.3, "12"), (12345.6, "12,346")],
)
def test_rates_have_more_digits_when_small(per_second: float, expected: str) -> None:
    assert formatting.format_rate(per_second) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], ""), ([4], "4"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6")],
)
def test_partitions_are_shown_as_ranges(numbers: list[int], expected: str) -> None:
    assert formatting.format_ranges(numbers) == expected


def test_future_and_past_times_are_distinguished() -> None:
    assert formatting.format_age("2026-03-01T11:59:00.000Z", NOON) == "1m ago"
    assert formatting.format_age("2026-03-01T12:02:00.000Z", NOON) == "in 2m"
    assert formatting.format_age("2026-03-01T12:00:00.400Z", NOON) == "now"
    assert formatting.format_age(None, NOON) == "never"


def test_time_of_another_day_has_its_date() -> None:
    assert formatting.format_clock("2026-03-01T01:02:03.004Z", NOON) == "01:02:03.004"
    assert formatting.format_clock("2026-02-28T01:02:03.004Z", NOON) == "2026-02-28 01:02:03.004"
    assert formatting.format_clock("2026-03-01T01:02:03Z", NOON) == "01:02:03.000"


def test_text_of_a_peer_cannot_control_the_terminal() -> None:
    assert (
        formatting.escape_controls("a\x1b[31mred\x07\r\nb\u202ec")
        == "a\\x1b[31mred\\x07\\r\\nb\\u202ec"
    )
    assert formatting.escape_controls("a\tb\nc\rd", multiline=True) == "a\tb\nc\\rd"


def test_payload_is_cut_to_its_row() -> None:
    assert formatting.format_payload("hello", 5, 5) == "hello"
    assert formatting.format_payload("hello!", 6, 5) == "hell…"
    assert formatting.format_payload("a\nb", 3, 10) == "a\\nb"
    assert formatting.format_payload(None, 2048, 10) == "(2.0 KiB, not text)"


def test_a_sparkline_shows_the_newest_values_at_the_right() -> None:
    assert formatting.sparkline([], 4) == "    "
    assert formatting.sparkline([0, 0], 4) == "  ▁▁"
    assert formatting.sparkline([9, 9, 0, 4, 8], 3) == "▁▄█"

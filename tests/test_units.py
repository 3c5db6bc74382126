"""Tests of the notation of addresses and durations."""

from __future__ import annotations

import pytest

from sluice.units import (
    Address,
    format_duration,
    parse_address,
    parse_duration,
    parse_rate,
    quote_path_segment,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:1883", Address("127.0.0.1", 1883)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        (" broker.example:8883 ", Address("broker.example", 8883)),
    ],
)
def test_address_round_trips(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1883", "127.0.0.1:1883"),
        (":1883", "0.0.0.0:1883"),
        ("::1:1883", r"\[::1\]:1883"),
        ("[]:1883", "HOST:PORT"),
        ("host:65536", "from 0"),
        ("host:-1", "from 0"),
        ("host:mqtt", "from 0"),
        ("host:", "from 0"),
    ],
)
def test_invalid_address_is_refused_with_the_expected_form(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("5s", 5), ("1.5s", 1.5), ("5m", 300), ("3h", 10800), ("7d", 604800)],
)
def test_duration_round_trips(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1m30s", 90), ("1h0m5s", 3605), ("2d12h", 216_000), ("1s500ms", 1.5), ("1m1ms", 60.001)],
)
def test_duration_may_have_several_parts(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["30s1m", "1m1m", "1m30", "1m 30s", "ms", ""])
def test_parts_of_a_duration_have_decreasing_units(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("zero", [0, 0.0, "0", "0s", "0ms"])
def test_zero_needs_no_unit(zero: object) -> None:
    assert parse_duration(zero) == 0


@pytest.mark.parametrize(
    ("value", "hint"),
    [(10, '"10s"'), ("10", '"10s"'), ("soon", '"5m"'), ("-5s", '"5m"'), ("5 weeks", '"5m"')],
)
def test_duration_without_a_unit_is_refused_with_the_expected_form(
    value: object, hint: str
) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_duration(value)


@pytest.mark.parametrize(
    ("text", "segment"),
    [
        ("a/b", "a%2Fb"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        ("a.b", "a.b"),
        ("grün", "gr%C3%BCn"),
    ],
)
def test_path_segment_is_never_only_dots(text: str, segment: str) -> None:
    assert quote_path_segment(text) == segment


@pytest.mark.parametrize(
    ("text", "rate", "burst"),
    [
        ("100/s", 100.0, 0.0),
        ("30/m", 0.5, 0.0),
        ("1.5/s", 1.5, 0.0),
        ("60/h burst 2", 1 / 60, 2.0),
    ],
)
def test_rate_is_parsed(text: str, rate: float, burst: float) -> None:
    parsed_rate, parsed_burst = parse_rate(text)
    assert parsed_rate == pytest.approx(rate) and parsed_burst == burst


@pytest.mark.parametrize("text", ["", "fast", "0/s", "-1/s", "5", "5/d", "5/s burst 0", "1e9/s"])
def test_other_text_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|burst"):
        parse_rate(text)

"""Tests of log lines: readable, parseable, and without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from sluice.process.logs import (
    MAX_LINES_PER_EVENT,
    RATE_LIMIT_SECONDS,
    RateLimitFilter,
    configure_logs,
)

log = logging.getLogger("sluice.test")


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []  # removed during the test, so that they are not closed
    yield
    root.handlers, root.level = handlers, level


def lines(form: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logs(level, form, stream)
    return stream


def test_text_line_has_the_event_and_its_fields() -> None:
    stream = lines("text")
    log.info(
        "listener opened", extra={"address": "127.0.0.1:1883", "backlog": 5, "note": "two words"}
    )
    line = stream.getvalue()
    assert line.endswith(
        'Z info    sluice.test listener opened address=127.0.0.1:1883 backlog=5 note="two words"\n'
    )


def test_json_line_is_one_object_with_typed_fields() -> None:
    stream = lines("json")
    log.warning("slow %s", "reader", extra={"bytes": 5, "since": None})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "sluice.test",
        "event": "slow reader",
        "bytes": 5,
        "since": None,
    }


def test_lines_below_the_level_are_omitted() -> None:
    stream = lines("text", "warning")
    log.info("quiet")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_never_appear(form: str) -> None:
    stream = lines(form)
    fields = {"password": "hunter2", "api_token": "hunter2", "store": "redis://u:hunter2@h:6379/0"}
    try:
        raise OSError("cannot reach redis://u:hunter2@h")
    except OSError:
        log.exception("store %s failed", "redis://:hunter2@h", extra=fields)
    assert "hunter2" not in stream.getvalue()
    assert "redis://u:***@h:6379/0" in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_peer_cannot_forge_a_line_or_control_the_terminal(form: str) -> None:
    stream = lines(form)
    log.info("client %s", "a\nb\x1b[2J", extra={"client": "x\n2026 info forged\x1b[2J\u2028"})
    log.info("client \u202e%s", "\u2066a", extra={"client": "\u200fx\u061c\u2069"})
    assert stream.getvalue().count("\n") == 2
    for sign in "\u202e\u2066\u200f\u061c\u2069":
        assert sign not in stream.getvalue()
        assert f"\\u{ord(sign):04x}" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "\u2028" not in stream.getvalue()


def test_exception_is_logged_with_its_traceback() -> None:
    text, parsed = lines("text"), None
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("failed")
        parsed = lines("json")
        log.exception("failed")
    assert text.getvalue().endswith("RuntimeError: broken\n")
    assert json.loads(parsed.getvalue())["exception"].endswith("RuntimeError: broken")


def test_flood_of_one_event_is_suppressed_and_counted() -> None:
    now = [100.0]
    stream = lines("json")
    logging.getLogger().handlers[0].filters = [RateLimitFilter(lambda: now[0])]
    for nth in range(1000):
        log.warning("protocol violation", extra={"peer": nth})
    log.warning("something else")
    now[0] += RATE_LIMIT_SECONDS
    log.warning("protocol violation", extra={"peer": "later"})
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    storm = [one for one in entries if one["event"] == "protocol violation"]
    assert [one["peer"] for one in storm] == [*range(MAX_LINES_PER_EVENT), "later"]
    assert storm[MAX_LINES_PER_EVENT - 1]["more"] == "not logged for 10 s"
    assert storm[-1]["not_logged"] == 1000 - MAX_LINES_PER_EVENT
    assert [one["event"] for one in entries].count("something else") == 1


def test_fatal_error_is_always_logged() -> None:
    stream = lines("text")
    for _ in range(3 * MAX_LINES_PER_EVENT):
        log.critical("broker failed")
    assert stream.getvalue().count("\n") == 3 * MAX_LINES_PER_EVENT

"""Log lines for people and for machines, from the same records.

Rooms log through the standard library: `log.info("listener opened", extra={"address": address})`. The event is a
fixed phrase and the facts are fields, so a line can be searched for either way. Logs speak of the life of listeners,
connections and stores and never of single messages: at a hundred thousand messages a second the log would be the load.

Three rules hold for both forms. Secrets do not leave: a field whose name says secret, or the password of a URL, is
starred. What a peer chose (client ids, topics) cannot forge a line or steer a terminal: control characters are written
as escapes. And what a peer can cause at will cannot fill the disk: of one event only so many lines are written in a
while, and the next one says how many were not (`Calm`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TextIO

_OWN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET_NAME: Final = re.compile(
    r"password|passwd|secret|token|credential|authorization|private_key", re.IGNORECASE
)
_URL_PASSWORD: Final = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")
_PLAIN: Final = re.compile(r"[\w.:/@+*#$,%\[\]-]+", re.ASCII)
# Also what changes the direction of writing, and what cannot be seen: a line must look like what it says.
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_STARS: Final = "***"
MOST_LINES: Final = 20  # of one event,
CALM_SECONDS: Final = 10.0  # within so long
_MOST_EVENTS: Final = 1000


def configure_logs(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send every logger of the process to `stream` (stderr unless given): stdout is for the ready line alone."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(Calm())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore"):  # they log whole URLs, and webhooks have secrets in theirs
        logging.getLogger(name).setLevel(logging.WARNING)
    # gRPC's C library writes lines of its own to stderr, past the handler; calls report their errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Calm(logging.Filter):
    """At most MOST_LINES of one event within CALM_SECONDS. An event is the fixed phrase, whatever its fields: a storm
    of bad packets is one thing that happens, and not a hundred thousand. The first line behind it has `not_logged`,
    the number of those that were left out; the metrics count them all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._events: dict[tuple[str, str], _Event] = {}
        self._guard = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        now = self._clock()
        with self._guard:
            event = self._events.get((record.name, str(record.msg)))
            if event is None:
                if len(self._events) >= _MOST_EVENTS:
                    self._forget(now)
                event = self._events[record.name, str(record.msg)] = _Event(now)
            elif now - event.since >= CALM_SECONDS:
                if event.left_out:
                    record.__dict__["not_logged"] = event.left_out
                event.begin(now)
            event.count += 1
            if event.count > MOST_LINES:
                event.left_out += 1
                return False
            if event.count == MOST_LINES:
                record.__dict__["more"] = f"not logged for {CALM_SECONDS:.0f} s"
        return True

    def _forget(self, now: float) -> None:
        """Phrases that are made as they come are as many as their makers like: what is over is let go."""
        self._events = {
            key: event
            for key, event in self._events.items()
            if event.left_out or now - event.since < CALM_SECONDS
        }


class _Event:
    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        self.since = now
        self.count = 0
        self.left_out = 0


def hide_secrets(text: str) -> str:
    """Star the password of each URL in `text`."""
    return _URL_PASSWORD.sub(rf"\1{_STARS}@", text)


class TextLines(logging.Formatter):
    """`2026-03-01T12:00:00.123Z info  sluice.app listener opened address=127.0.0.1:1883`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        event = _visible(hide_secrets(record.getMessage()).replace("\n", "\\n"))
        line = f"{_time(record)} {record.levelname.lower():<7} {record.name} {event}{fields}"
        trace = _trace(self, record)
        return f"{line}\n{_visible(trace)}" if trace else line


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": hide_secrets(record.getMessage()),
        }
        line.update(_fields(record))
        trace = _trace(self, record)
        if trace:
            line["exception"] = trace
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as `extra`; logging itself mixes it with the record's own attributes."""
    return {
        name: _STARS if _SECRET_NAME.search(name) else _clean(value)
        for name, value in vars(record).items()
        if name not in _OWN_ATTRIBUTES
    }


def _clean(value: object) -> object:
    """Numbers stay numbers for the JSON form; everything else becomes text without passwords."""
    return value if value is None or isinstance(value, int | float) else hide_secrets(str(value))


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return hide_secrets(formatter.formatException(record.exc_info)) if record.exc_info else ""


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else _visible(json.dumps(text, ensure_ascii=False))


def _visible(text: str) -> str:
    return _CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

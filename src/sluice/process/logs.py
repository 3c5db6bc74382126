"""Formats log records as text or JSON.

Modules log through the standard library: `log.info("listener opened", extra={"address": address})`.
The event is a fixed phrase and the facts are fields, so that both can be searched. Logs report
events of listeners, connections and stores, never single messages: at a hundred thousand messages
per second the log would be the load.

Three rules hold for both formats. Secrets are masked: fields with a secret's name, and passwords in
URLs. Text chosen by a peer (client ids, topics) cannot forge a line or control a terminal: control
characters are escaped. Events that a peer can cause at will cannot fill the disk: the lines of one
event are rate limited, and the next line reports the number of suppressed ones (`RateLimitFilter`).
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

_OWN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}
_SECRET_NAME: Final = re.compile(
    r"password|passwd|secret|token|credential|authorization|private_key", re.IGNORECASE
)
_URL_OPTION: Final = re.compile(r"([?&](?:sentinel_)?password=)[^&\s]+")
_URL_PASSWORD: Final = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")
_UNQUOTED: Final = re.compile(r"[\w.:/@+*#$,%\[\]-]+", re.ASCII)
# Includes bidirectional and invisible characters: a line must look like its content.
_UNSAFE_CHARACTERS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_MASK: Final = "***"
MAX_LINES_PER_EVENT: Final = 20  # of one event
RATE_LIMIT_SECONDS: Final = 10.0  # within this time
_MAX_EVENTS: Final = 1000


def configure_logs(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send all loggers of the process to `stream`, by default stderr; stdout has the ready line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore"):  # they log whole URLs, and URLs of webhooks contain secrets
        logging.getLogger(name).setLevel(logging.WARNING)
    # gRPC's C library writes to stderr directly; calls report their errors anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class RateLimitFilter(logging.Filter):
    """Writes at most MAX_LINES_PER_EVENT lines of one event within RATE_LIMIT_SECONDS.

    An event is the fixed phrase, regardless of its fields: a storm of bad packets is one event. The
    first line after it has the field `not_logged`, the number of suppressed lines; metrics count
    all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._events: dict[tuple[str, str], _EventCount] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        now = self._clock()
        with self._lock:
            event = self._events.get((record.name, str(record.msg)))
            if event is None:
                if len(self._events) >= _MAX_EVENTS:
                    self._drop_idle_events(now)
                event = self._events[record.name, str(record.msg)] = _EventCount(now)
            elif now - event.since >= RATE_LIMIT_SECONDS:
                if event.suppressed:
                    record.__dict__["not_logged"] = event.suppressed
                event.reset(now)
            event.count += 1
            if event.count > MAX_LINES_PER_EVENT:
                event.suppressed += 1
                return False
            if event.count == MAX_LINES_PER_EVENT:
                record.__dict__["more"] = f"not logged for {RATE_LIMIT_SECONDS:.0f} s"
        return True

    def _drop_idle_events(self, now: float) -> None:
        """Remove idle events: a phrase that contains variable text would accumulate otherwise."""
        self._events = {
            key: event
            for key, event in self._events.items()
            if event.suppressed or now - event.since < RATE_LIMIT_SECONDS
        }


class _EventCount:
    def __init__(self, now: float) -> None:
        self.reset(now)

    def reset(self, now: float) -> None:
        self.since = now
        self.count = 0
        self.suppressed = 0


def hide_secrets(text: str) -> str:
    """Mask the password of each URL in `text`."""
    return _URL_OPTION.sub(rf"\1{_MASK}", _URL_PASSWORD.sub(rf"\1{_MASK}@", text))


class TextFormatter(logging.Formatter):
    """`2026-03-01T12:00:00.123Z info  sluice.app listener opened address=127.0.0.1:1883`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quote(value)}" for name, value in _fields(record).items())
        event = _escape_unsafe(hide_secrets(record.getMessage()).replace("\n", "\\n"))
        line = f"{_format_time(record)} {record.levelname.lower():<7} {record.name} {event}{fields}"
        trace = _format_trace(self, record)
        return f"{line}\n{_escape_unsafe(trace)}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": hide_secrets(record.getMessage()),
        }
        line.update(_fields(record))
        trace = _format_trace(self, record)
        if trace:
            line["exception"] = trace
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields that the caller passed as `extra`; logging mixes them with its own."""
    return {
        name: _MASK if _SECRET_NAME.search(name) else _mask_value(value)
        for name, value in vars(record).items()
        if name not in _OWN_ATTRIBUTES
    }


def _mask_value(value: object) -> object:
    """Return numbers unchanged for JSON, and everything else as text without passwords."""
    return value if value is None or isinstance(value, int | float) else hide_secrets(str(value))


def _format_trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return hide_secrets(formatter.formatException(record.exc_info)) if record.exc_info else ""


def _format_time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quote(value: object) -> str:
    text = str(value)
    return (
        text if _UNQUOTED.fullmatch(text) else _escape_unsafe(json.dumps(text, ensure_ascii=False))
    )


def _escape_unsafe(text: str) -> str:
    return _UNSAFE_CHARACTERS.sub(_escape_match, text)


def _escape_match(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

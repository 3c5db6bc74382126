"""The options of the format `sluice`, named after those of Spark's Kafka connector where it has
one.

The driver parses and checks them once. An unknown option is refused, with the name that was
probably meant. Executors get plain values.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, TypeVar

from sluice.http_client import RETRY_SECONDS, Endpoint
from sluice.spark.errors import InvalidOption
from sluice.units import parse_duration

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
GROUP: Final = "group"
# Sequences by queue and partition; -2 is the earliest, -1 the latest.
Positions = dict[str, dict[int, int]]

COMMON_OPTIONS: Final = ("url", "token", "tokenFile", "ca", "retrySeconds")
READ_OPTIONS: Final = (
    *COMMON_OPTIONS,
    "subscribe",
    "subscribePattern",
    "group",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "columns",
)
# Options of earlier versions, with what to do instead.
REMOVED_OPTIONS: Final = {
    "pushdown": (
        "option pushdown was removed: a filter of one query changed others on the same load()",
        "Bound the read by startingOffsets, endingOffsets, startingTimestamp and endingTimestamp",
    )
}
WRITE_OPTIONS: Final = (*COMMON_OPTIONS, "queue", "createOptions", "txnAppId", "txnVersion")
SPARK_OPTIONS: Final = frozenset(
    {"checkpointlocation", "queryname", "path", "outputmode", "triggerinterval"}
)
# Spark gives a source this property of a table in its catalog.
TABLE_PROPERTY: Final = "provider"
# A view in SQL can be read and inserted into, so it has the options of both.
VIEW_OPTIONS: Final = frozenset({"subscribe", "queue"})

MAX_APP_NAME: Final = 256  # of an application, for the broker
# The application name of a job that writes one batch has this prefix; the broker forgets such names
# after a day.
ONE_OFF_PREFIX: Final = "once/"
YEAR_10000: Final = 253_402_300_800.0  # in seconds since 1970

T = TypeVar("T")


@dataclass(frozen=True)
class ReadOptions:
    where: Endpoint
    queues: tuple[str, ...]  # from `subscribe`; empty with a pattern
    pattern: str
    group: str
    starting: str | Positions  # earliest, latest, group, or sequences
    starting_time: float | None
    ending: str | Positions
    ending_time: float | None
    max_offsets: int
    max_bytes: int
    min_offsets: int
    max_delay: float
    min_partitions: int
    fail_on_data_loss: bool
    headers: bool
    columns: tuple[str, ...]  # the only ones to read; empty: all

    def matches(self, queue: str) -> bool:
        """Return whether the options subscribe to this queue."""
        return queue in self.queues or bool(self.pattern and re.fullmatch(self.pattern, queue))


@dataclass(frozen=True)
class WriteOptions:
    where: Endpoint
    queue: str  # empty: each row names its queue
    create: str  # settings of the queue, as JSON, if the write creates it; empty: the defaults
    app: str  # empty: a new name for each write
    version: int

    def transaction_app(self) -> str:
        """Return the broker's name for this job and queue; each queue has its own, like a Delta
        table.
        """
        name = f"{self.app} > {self.queue or '*'}"
        return name if len(name) <= MAX_APP_NAME else f"txn {sha256(name.encode()).hexdigest()}"


class _OptionParser:
    """The options as Spark passes them: strings, under case-insensitive names."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...], action: str) -> None:
        self._values = {name.lower(): value for name, value in given.items()}
        names = {name.lower(): name for name in known}
        if TABLE_PROPERTY in self._values:
            raise InvalidOption(
                "a queue cannot be a table of the catalog:"
                " Spark passes the options of such a table to no Python source",
                "CREATE TEMPORARY VIEW name USING sluice OPTIONS (url ..., subscribe ...);"
                " to write, use save() instead of saveAsTable()",
            )
        if self._values.keys() >= VIEW_OPTIONS:
            names |= {name: name for name in VIEW_OPTIONS}
        for name in self._values:
            if name in names or name in SPARK_OPTIONS:
                continue
            if name in REMOVED_OPTIONS:
                raise InvalidOption(*REMOVED_OPTIONS[name])
            close = difflib.get_close_matches(name, names, 1, 0.7)
            meant = f"Did you mean {names[close[0]]}? " if close else ""
            raise InvalidOption(
                f"there is no option {name!r} for {action} a queue",
                f"{meant}There are {', '.join(known)}",
            )

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name.lower(), default).strip()

    def parse(self, name: str, convert: Callable[[str], T], default: T, remedy: str) -> T:
        text = self.text(name)
        if not text:
            return default
        try:
            return convert(text)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise InvalidOption(f"option {name} is {text[:200]!r}", remedy) from None

    def count(self, name: str, minimum: int = 1) -> int:
        def convert(text: str) -> int:
            number = int(text)
            if number < minimum:
                raise ValueError
            return number

        return self.parse(name, convert, 0, f"Give a whole number from {minimum} on")

    def boolean(self, name: str, default: bool) -> bool:
        def convert(text: str) -> bool:
            # Python users pass `str(True)`.
            return {"true": True, "false": False}[text.lower()]

        return self.parse(name, convert, default, "Give true or false")

    def positions(
        self, name: str, default: str | Positions, keywords: tuple[str, ...]
    ) -> str | Positions:
        """Parse sequences, or one of `keywords`."""

        def convert(text: str) -> str | Positions:
            return text.lower() if text.lower() in keywords else _positions(text)

        return self.parse(
            name, convert, default, f"Give {', '.join(keywords)}, or {_POSITIONS_HELP}"
        )

    def connection(self) -> Endpoint:
        fields: dict[str, Any] = {
            "token": self.text("token"),
            "token_file": self.text("tokenFile"),
            "retry_seconds": self.parse(
                "retrySeconds",
                _seconds,
                RETRY_SECONDS,
                "Give seconds, such as 60, or a duration, such as 5m",
            ),
        }
        if fields["token"] and fields["token_file"]:
            raise InvalidOption(
                "the options token and tokenFile are both given", "Give one of them"
            )
        for name in ("url", "ca"):
            if self.text(name):
                fields[name] = self.text(name)
        return Endpoint(**fields)


def read_options(given: Mapping[str, str], streaming: bool) -> ReadOptions:
    """Parse the options of a reader.

    A stream begins at the cursor of its group by default; without a group, at the earliest
    sequence.
    """
    parser = _OptionParser(given, READ_OPTIONS, "reading")
    if parser.text("path"):
        raise InvalidOption(
            f"load() was given {parser.text('path')!r}",
            'Name the queue by .option("subscribe", ...) and say load()',
        )
    queues = tuple(
        dict.fromkeys(
            one.strip().removeprefix("$queue/")
            for one in parser.text("subscribe").split(",")
            if one.strip()
        )
    )
    pattern = parser.text("subscribePattern")
    if bool(queues) == bool(pattern):
        raise InvalidOption(
            "the options subscribe and subscribePattern are both given"
            if queues
            else "no queue is named",
            "Give subscribe, one queue or several with commas between them,"
            " or subscribePattern, a regular expression."
            " A table of Spark's catalog has no options here: CREATE TEMPORARY VIEW instead",
        )
    parser.parse(
        "subscribePattern",
        _pattern,
        "",
        "Give a regular expression for whole names, such as tasks/.*",
    )
    group = parser.text("group")
    starting = parser.positions(
        "startingOffsets", GROUP if streaming and group else EARLIEST, (EARLIEST, LATEST, GROUP)
    )
    ending = parser.positions("endingOffsets", LATEST, (LATEST,))
    if starting == GROUP and not group:
        raise InvalidOption(
            "option startingOffsets is group, and there is none", "Give the option group"
        )
    for time_option, offsets in (
        ("startingTimestamp", "startingOffsets"),
        ("endingTimestamp", "endingOffsets"),
    ):
        if parser.text(time_option) and parser.text(offsets):
            raise InvalidOption(
                f"the options {offsets} and {time_option} are both given", "Give one of them"
            )
    if streaming and (parser.text("endingOffsets") or parser.text("endingTimestamp")):
        raise InvalidOption(
            "a stream has no end, and endingOffsets or endingTimestamp is given",
            "Use spark.read, or trigger(availableNow=True), which ends at the offsets at its start",
        )
    min_offsets, max_offsets = (
        parser.count("minOffsetsPerTrigger", 0),
        parser.count("maxOffsetsPerTrigger"),
    )
    if max_offsets and min_offsets > max_offsets:
        raise InvalidOption(
            f"option minOffsetsPerTrigger is {min_offsets},"
            f" and maxOffsetsPerTrigger is {max_offsets}",
            "Wait for at most as many as a batch may have",
        )
    return ReadOptions(
        where=parser.connection(),
        queues=queues,
        pattern=pattern,
        group=group,
        starting=starting,
        starting_time=parser.parse("startingTimestamp", _timestamp, None, _TIME_HELP),
        ending=ending,
        ending_time=parser.parse("endingTimestamp", _timestamp, None, _TIME_HELP),
        max_offsets=max_offsets,
        max_bytes=parser.parse(
            "maxBytesPerTrigger", _bytes, 0, "Give bytes, or a size such as 16m"
        ),
        min_offsets=min_offsets,
        max_delay=parser.parse("maxTriggerDelay", _seconds, 900.0, "Give a duration, such as 15m"),
        min_partitions=parser.count("minPartitions"),
        fail_on_data_loss=parser.boolean("failOnDataLoss", True),
        headers=parser.boolean("includeHeaders", False),
        columns=tuple(one.strip() for one in parser.text("columns").split(",") if one.strip()),
    )


def write_options(given: Mapping[str, str], streaming: bool) -> WriteOptions:
    """Parse the options of a writer."""
    parser = _OptionParser(given, WRITE_OPTIONS, "writing to")
    if parser.text("path"):
        raise InvalidOption(
            f"save() or start() was given {parser.text('path')!r}",
            'Name the queue by .option("queue", ...), and say save() or start()',
        )
    if streaming and (parser.text("txnAppId") or parser.text("txnVersion")):
        raise InvalidOption(
            "a stream numbers its batches by itself, and txnAppId or txnVersion is given",
            "Leave them out: its checkpoint knows what was written."
            " They are for df.write, also in foreachBatch",
        )
    app, version = parser.text("txnAppId"), parser.count("txnVersion", 0)
    if bool(app) != bool(parser.text("txnVersion")):
        raise InvalidOption(
            "one of the options txnAppId and txnVersion is missing",
            "Give both, and a higher version for each new batch; or none",
        )
    if app.startswith(ONE_OFF_PREFIX):
        raise InvalidOption(
            f"option txnAppId is {app[:200]!r}, and the broker forgets names that begin with"
            f" {ONE_OFF_PREFIX} after a day",
            "Give another one, so that a batch that is run again later is known",
        )
    queue = parser.text("queue").removeprefix("$queue/")
    create = parser.parse(
        "createOptions", _settings, "", 'Give JSON such as {"limits": {"max_queue_depth": 1000000}}'
    )
    if create and not queue:
        raise InvalidOption(
            "option createOptions is given, and each row names its queue",
            "Give the option queue, or create the queues first",
        )
    return WriteOptions(parser.connection(), queue, create, app, version)


_POSITIONS_HELP: Final = (
    'JSON such as {"tasks/image": {"0": 120, "1": -1}} (-2 earliest, -1 latest)'
)
_TIME_HELP: Final = (
    "Give a time such as 2030-01-31T12:00:00Z (UTC unless it names a zone),"
    " or milliseconds since 1970; from 1970 to 9999"
)


def _positions(text: str) -> Positions:
    return {
        queue.removeprefix("$queue/"): {int(one): _sequence(seq) for one, seq in parts.items()}
        for queue, parts in json.loads(text).items()
    }


def _settings(text: str) -> str:
    """Return the settings of a queue as they were given, if they are a JSON object."""
    if not isinstance(json.loads(text), dict):
        raise ValueError
    return text


def _sequence(value: object) -> int:
    if type(value) is not int or value < -2:  # neither 1.5 nor true is a sequence
        raise ValueError
    return value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error:
        raise ValueError from None
    return text


def _timestamp(text: str) -> float | None:
    """Return seconds since 1970, in the range that the broker accepts."""
    if text.isascii() and text.isdigit():
        seconds = int(text) / 1000.0
    else:
        parsed = datetime.fromisoformat(text)
        seconds = (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()
    if not 0.0 <= seconds < YEAR_10000:
        raise ValueError
    return seconds


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else parse_duration(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(i?b)?", text.lower())
    if found is None or not int(found[1]):
        raise ValueError
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]

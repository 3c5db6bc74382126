"""The options of the format `sluice`, named after those of Spark's Kafka connector where there is one.

They are read once, on the driver, and judged there: one that nobody knows is refused with the name that was probably
meant. What the executors need of them travels as plain values.
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

from sluice.units import parse_duration
from sluice.spark.errors import InvalidOption
from sluice.spark.http.http_connection import RETRY_SECONDS, Where

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
GROUP: Final = "group"
Positions = dict[str, dict[int, int]]  # sequences by queue and partition; -2 is the earliest, -1 the latest

COMMON: Final = ("url", "token", "tokenFile", "ca", "retrySeconds")
READ: Final = (
    *COMMON,
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
    "pushdown",
)
WRITE: Final = (*COMMON, "queue", "txnAppId", "txnVersion")
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "path", "outputmode", "triggerinterval"})

LONGEST_NAME: Final = 256  # of an application, for the broker
# So begins the name of who brings one batch and does not come again: the broker forgets it after a day.
ONCE: Final = "once/"
YEAR_10000: Final = 253_402_300_800.0  # in seconds since 1970

T = TypeVar("T")


@dataclass(frozen=True)
class ReadOptions:
    where: Where
    queues: tuple[str, ...]  # of `subscribe`; empty with a pattern
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
    pushdown: bool

    def takes(self, queue: str) -> bool:
        """Whether this queue is one of those that are subscribed to."""
        return queue in self.queues or bool(self.pattern and re.fullmatch(self.pattern, queue))


@dataclass(frozen=True)
class WriteOptions:
    where: Where
    queue: str  # empty: each row says it
    app: str  # empty: a fresh one for each write
    version: int

    def fence(self) -> str:
        """The name by which the broker knows this job: one of each queue, as a table of Delta has its own."""
        name = f"{self.app} > {self.queue or '*'}"
        return name if len(name) <= LONGEST_NAME else f"txn {sha256(name.encode()).hexdigest()}"


class _Given:
    """The options as Spark hands them over: texts, under names whose case does not count."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        names = {name.lower(): name for name in known}
        for name in self._given:
            if name in names or name in SPARKS_OWN:
                continue
            close = difflib.get_close_matches(name, names, 1, 0.7)
            meant = f"Did you mean {names[close[0]]}? " if close else ""
            raise InvalidOption(
                f"nobody knows the option {name!r} when {doing} a queue",
                f"{meant}There are {', '.join(known)}",
            )

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower(), default).strip()

    def read(self, name: str, reading: Callable[[str], T], default: T, cure: str) -> T:
        text = self.text(name)
        if not text:
            return default
        try:
            return reading(text)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise InvalidOption(f"option {name} is {text[:200]!r}", cure) from None

    def count(self, name: str, least: int = 1) -> int:
        def reading(text: str) -> int:
            number = int(text)
            if number < least:
                raise ValueError
            return number

        return self.read(name, reading, 0, f"Give a whole number from {least} on")

    def switch(self, name: str, default: bool) -> bool:
        def reading(text: str) -> bool:
            return {"true": True, "false": False}[text.lower()]  # `str(True)` is what people write in Python

        return self.read(name, reading, default, "Give true or false")

    def positions(self, name: str, default: str | Positions, words: tuple[str, ...]) -> str | Positions:
        """Sequences, or one of these words."""

        def reading(text: str) -> str | Positions:
            return text.lower() if text.lower() in words else _positions(text)

        return self.read(name, reading, default, f"Give {', '.join(words)}, or {_SEQUENCES}")

    def where(self) -> Where:
        told: dict[str, Any] = {
            "token": self.text("token"),
            "token_file": self.text("tokenFile"),
            "retry_seconds": self.read(
                "retrySeconds", _seconds, RETRY_SECONDS, "Give seconds, such as 60, or a duration, such as 5m"
            ),
        }
        if told["token"] and told["token_file"]:
            raise InvalidOption("the options token and tokenFile are both given", "Give one of them")
        for name in ("url", "ca"):
            if self.text(name):
                told[name] = self.text(name)
        return Where(**told)


def read_options(given: Mapping[str, str], streaming: bool) -> ReadOptions:
    """For a reader. Where a stream begins unless told: at its group's cursor, without a group at the earliest."""
    told = _Given(given, READ, "reading")
    if told.text("path"):
        raise InvalidOption(
            f"load() was given {told.text('path')!r}",
            'Name the queue by .option("subscribe", ...) and say load()',
        )
    queues = tuple(
        dict.fromkeys(
            one.strip().removeprefix("$queue/") for one in told.text("subscribe").split(",") if one.strip()
        )
    )
    pattern = told.text("subscribePattern")
    if bool(queues) == bool(pattern):
        raise InvalidOption(
            "the options subscribe and subscribePattern are both given" if queues else "no queue is named",
            "Give subscribe, one queue or several with commas between them, or subscribePattern, a regular expression",
        )
    told.read("subscribePattern", _pattern, "", "Give a regular expression for whole names, such as tasks/.*")
    group = told.text("group")
    starting = told.positions(
        "startingOffsets", GROUP if streaming and group else EARLIEST, (EARLIEST, LATEST, GROUP)
    )
    ending = told.positions("endingOffsets", LATEST, (LATEST,))
    if starting == GROUP and not group:
        raise InvalidOption("option startingOffsets is group, and there is none", "Give the option group")
    for moment, offsets in (
        ("startingTimestamp", "startingOffsets"),
        ("endingTimestamp", "endingOffsets"),
    ):
        if told.text(moment) and told.text(offsets):
            raise InvalidOption(f"the options {offsets} and {moment} are both given", "Give one of them")
    if streaming and (told.text("endingOffsets") or told.text("endingTimestamp")):
        raise InvalidOption(
            "a stream has no end, and endingOffsets or endingTimestamp is given",
            "Use spark.read, or trigger(availableNow=True), which ends at what is there when it begins",
        )
    fewest, most = told.count("minOffsetsPerTrigger", 0), told.count("maxOffsetsPerTrigger")
    if most and fewest > most:
        raise InvalidOption(
            f"option minOffsetsPerTrigger is {fewest}, and maxOffsetsPerTrigger is {most}",
            "Wait for at most as many as a batch may have",
        )
    return ReadOptions(
        where=told.where(),
        queues=queues,
        pattern=pattern,
        group=group,
        starting=starting,
        starting_time=told.read("startingTimestamp", _moment, None, _TIMES),
        ending=ending,
        ending_time=told.read("endingTimestamp", _moment, None, _TIMES),
        max_offsets=most,
        max_bytes=told.read("maxBytesPerTrigger", _bytes, 0, "Give bytes, or a size such as 16m"),
        min_offsets=fewest,
        max_delay=told.read("maxTriggerDelay", _seconds, 900.0, "Give a duration, such as 15m"),
        min_partitions=told.count("minPartitions"),
        fail_on_data_loss=told.switch("failOnDataLoss", True),
        headers=told.switch("includeHeaders", False),
        pushdown=told.switch("pushdown", False),
    )


def write_options(given: Mapping[str, str], streaming: bool) -> WriteOptions:
    """For a writer."""
    told = _Given(given, WRITE, "writing to")
    if told.text("path"):
        raise InvalidOption(
            f"save() or start() was given {told.text('path')!r}",
            'Name the queue by .option("queue", ...), and say save() or start()',
        )
    if streaming and (told.text("txnAppId") or told.text("txnVersion")):
        raise InvalidOption(
            "a stream numbers its batches by itself, and txnAppId or txnVersion is given",
            "Leave them out: its checkpoint knows what was written. They are for df.write, also in foreachBatch",
        )
    app, version = told.text("txnAppId"), told.count("txnVersion", 0)
    if bool(app) != bool(told.text("txnVersion")):
        raise InvalidOption(
            "one of the options txnAppId and txnVersion is missing",
            "Give both, and a higher version for each new batch; or none",
        )
    if app.startswith(ONCE):
        raise InvalidOption(
            f"option txnAppId is {app[:200]!r}, and the broker forgets names that begin with {ONCE} after a day",
            "Give another one, so that a batch that is run again later is known",
        )
    return WriteOptions(told.where(), told.text("queue").removeprefix("$queue/"), app, version)


_SEQUENCES: Final = 'JSON such as {"tasks/image": {"0": 120, "1": -1}} (-2 earliest, -1 latest)'
_TIMES: Final = (
    "Give a time such as 2030-01-31T12:00:00Z (UTC unless it names a zone), or milliseconds since 1970; from 1970 to"
    " 9999"
)


def _positions(text: str) -> Positions:
    return {
        queue.removeprefix("$queue/"): {int(one): _sequence(seq) for one, seq in parts.items()}
        for queue, parts in json.loads(text).items()
    }


def _sequence(told: object) -> int:
    if type(told) is not int or told < -2:  # 1.5 is no sequence, and true is not 1
        raise ValueError
    return told


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error:
        raise ValueError from None
    return text


def _moment(text: str) -> float | None:
    """Seconds since 1970; the broker knows no others than these."""
    if text.isascii() and text.isdigit():
        seconds = int(text) / 1000.0
    else:
        moment = datetime.fromisoformat(text)
        seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
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

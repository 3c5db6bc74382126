"""Types of parameters in paths, queries and bodies, each with its parser and its OpenAPI schema.

One object is both, so that the documentation matches what is accepted. An error states the whole
range, for any invalid value: `must be a whole number from 1 to 1000`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import unquote

from fastapi import Path
from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from sluice.queues.bulk import parse_iso_time
from sluice.units import format_duration, parse_duration, quote_path_segment

MAX_TIME_SECONDS: Final = 253_402_300_799.0  # the last second of the year 9999
MAX_NAME_BYTES: Final = 1024
TIME_PATTERN: Final = (
    r"@[0-9]{1,10}|(19[7-9][0-9]|2[0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
    r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
)
_DURATION_PARTS: Final = "".join(
    rf"([0-9]+(\.[0-9]+)?{unit})?" for unit in ("d", "h", "m", "s", "ms")
)
DURATION_PATTERN: Final = rf"^(0|(?=[0-9]){_DURATION_PARTS})$"


@dataclass(frozen=True)
class IntegerRange:
    """An integer in a closed range; a query has it as text."""

    low: int
    high: int

    def read(self, value: object) -> int:
        if isinstance(value, str) and len(value) <= 20:
            digits = value.removeprefix("-")
            if digits.isascii() and digits.isdigit():
                value = int(value)
        elif isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one number type: 5.0 is 5
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not self.low <= value <= self.high
        ):
            raise ValueError(f"must be a whole number from {self.low} to {self.high}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class DurationRange:
    """A duration such as "5m", as seconds."""

    low: float
    high: float

    def read(self, value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f'must be a duration such as "5s", from {self._range()}')
        try:
            seconds = parse_duration(value)
        except ValueError as fault:
            raise ValueError(f"{fault}; from {self._range()}") from None
        if not self.low <= seconds <= self.high:
            raise ValueError(f"must be from {self._range()}")
        return seconds

    def _range(self) -> str:
        return f"{format_duration(self.low)} to {format_duration(self.high)}"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": DURATION_PATTERN, "examples": ["5s"]}


@dataclass(frozen=True)
class MqttString:
    """Text that an MQTT packet can contain: no zero character, limited bytes (MQTT 1.5.4)."""

    max_bytes: int = 65_535
    forbidden: str = ""

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be text")
        if any(character in value for character in "\0" + self.forbidden):
            raise ValueError(
                f"must be text without {' '.join(['the zero character', *self.forbidden])}"
            )
        if len(value.encode(errors="replace")) > self.max_bytes:
            raise ValueError(f"must be text of {self.max_bytes} bytes or less")
        return _check_unicode(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "type": "string",
            "maxLength": self.max_bytes,
            "pattern": rf"^[^\x00{self.forbidden}]*$",
        }


def _check_unicode(value: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be text without lone surrogates")
    return value


# JSON can contain text that UTF-8 cannot encode.
UnicodeText = Annotated[str, AfterValidator(_check_unicode)]


class Timestamp:
    """A time, ISO 8601 or `@` and seconds since 1970, as seconds since 1970; 0 if empty."""

    def read(self, value: object) -> float:
        try:
            if not isinstance(value, str):
                raise ValueError
            if value == "":
                return 0.0
            seconds = float(value[1:]) if value.startswith("@") else parse_iso_time(value)
            if not 0.0 <= seconds <= MAX_TIME_SECONDS:
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(
                "must be a time from 1970 to 9999, such as 2030-01-31T12:00:00Z or @1900000000"
            ) from None
        return seconds

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "type": "string",
            "pattern": f"^(|{TIME_PATTERN})$",
            "examples": ["2030-01-31T12:00:00Z"],
        }


def normalize_segment(segment: str) -> str:
    """Normalize a path segment for routing: decode it, and encode the slashes in it again.

    The router splits at slashes, so those that belong to a name stay encoded until
    `decode_segment` reads them.
    """
    return quote_path_segment(unquote(segment, errors="replace")) if "%" in segment else segment


def decode_segment(value: object) -> str:
    return unquote(str(value), errors="replace")


def read_queue_name(value: object) -> str:
    """Read a queue name in a path.

    `tasks%2Fimage`, `tasks$image` and `$queue$tasks$image` are all tasks/image.
    """
    name = parse_queue_name(decode_segment(value))
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"must be a queue's name of at most {MAX_NAME_BYTES} bytes")
    return name


def parse_queue_name(text: str) -> str:
    """Read a queue name in a query, which is decoded already."""
    return text.removeprefix("$queue$").removeprefix("$queue/").replace("$", "/")


def format_iso_time(seconds: float) -> str | None:
    """Format as ISO 8601 in UTC with milliseconds; None for never."""
    if seconds <= 0.0:
        return None
    return (
        datetime.fromtimestamp(min(seconds, MAX_TIME_SECONDS), UTC).isoformat(
            timespec="milliseconds"
        )[:-6]
        + "Z"
    )


QueueName = Annotated[
    str,
    BeforeValidator(read_queue_name),
    Path(
        description="Name of the queue, percent-encoded or with `$` for `/`:"
        " `tasks%2Fimage`, `tasks$image`",
        examples=["tasks$image"],
        json_schema_extra={
            "minLength": 1,
            "maxLength": MAX_NAME_BYTES,
            "pattern": r"^[^/+#$]+(\$[^/+#$]+)*$",
        },
    ),
]
GroupName = Annotated[
    str,
    BeforeValidator(decode_segment),
    Path(description="Name of the consumer group", examples=["workers"]),
]
MessageId = Annotated[
    str,
    BeforeValidator(decode_segment),
    Path(description="Id of the message, the publisher's own or generated", examples=["a-1f"]),
]

"""Models of the bulk API: parameters and bodies of requests, and responses."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sluice.admin.bulk import bulk_views
from sluice.admin.rest.params import TIME_PATTERN, IntegerRange, Timestamp, decode_segment

MAX_WAIT_SECONDS: Final = 300
MAX_SEQUENCE: Final = 2**53
MAX_RANGES: Final = 64  # partitions in one response


# ---- requests


def _parse_sequences(value: object) -> dict[int, int]:
    """Read sequences by partition, from JSON text or a decoded value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, dict):
        with suppress(ValueError):
            return {
                IntegerRange(0, 4095).read(str(number)): IntegerRange(0, MAX_SEQUENCE).read(seq)
                for number, seq in value.items()
            }
    raise ValueError('must be sequences by partition, such as {"0": 120, "1": 95}')


def _parse_ranges(value: object) -> dict[int, tuple[int, int]]:
    """Read start and end by partition, from JSON text."""
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) else None
        if isinstance(found, dict) and 0 < len(found) <= MAX_RANGES:
            sequence = IntegerRange(0, MAX_SEQUENCE)
            pairs = [pair for pair in found.values() if isinstance(pair, list) and len(pair) == 2]
            if len(pairs) == len(found):
                return {
                    IntegerRange(0, 4095).read(number): (sequence.read(start), sequence.read(end))
                    for number, (start, end) in found.items()
                }
    raise ValueError(
        'must be start and end by partition, such as {"0": [0, 120], "1": [95, 200]},'
        f" at most {MAX_RANGES}"
    )


SEQUENCES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE},
    "propertyNames": {"pattern": "^[0-9]{1,3}$"},
    "examples": [{"0": 120, "1": 95}],
}
Sequences = Annotated[dict[int, int], BeforeValidator(_parse_sequences)]
Sequence = Annotated[int, IntegerRange(0, MAX_SEQUENCE)]
PartitionNumber = Annotated[int, BeforeValidator(IntegerRange(0, 4095).read), Path(ge=0, le=4095)]
AppName = Annotated[
    str,
    BeforeValidator(decode_segment),
    Path(
        min_length=1,
        max_length=256,
        description="Name of the application: for Spark, the id of the query",
    ),
]
BatchNumber = Annotated[
    int,
    BeforeValidator(IntegerRange(0, MAX_SEQUENCE).read),
    Path(ge=0, le=MAX_SEQUENCE, description="Number of the batch"),
]


class OffsetsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: Annotated[int, IntegerRange(0, MAX_WAIT_SECONDS)] = Field(
        default=0, description="With `after`: seconds to wait until some partition has passed it"
    )
    after: Annotated[
        dict[int, int] | None, BeforeValidator(lambda given: given and _parse_sequences(given))
    ] = Field(
        default=None,
        description='Sequences by partition, as JSON: `{"0": 120}`',
        json_schema_extra={"type": "string", "examples": ['{"0": 120}']},
    )


class TimeQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    time: Annotated[float, Timestamp()] = Field(
        description="ISO 8601, or @seconds since 1970",
        json_schema_extra={"pattern": f"^({TIME_PATTERN})$"},
    )


class SelectionQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lenient: bool = Field(
        default=False, description="Leave out messages that are no longer stored, do not refuse"
    )
    group: str = Field(
        default="", description="For this group: without messages for other groups alone"
    )
    incarnation: str = Field(
        default="",
        description="From the offsets: refused (409) if the queue was created again since",
    )


class ReadQuery(SelectionQuery):
    columns: str = Field(default="", description="Comma-separated names; all when empty")
    headers: bool = Field(default=False, description="Include the column headers")


class RowsQuery(ReadQuery):
    start: Sequence = Field(description="First sequence")
    end: Sequence = Field(description="The sequence after the last one")


Ranges = Annotated[
    dict[int, tuple[int, int]],
    BeforeValidator(_parse_ranges),
    Field(
        description="First sequence and the one after the last, by partition, as JSON:"
        ' `{"0": [0, 120]}`',
        json_schema_extra={"type": "string", "examples": ['{"0": [0, 120]}']},
    ),
]


class RangesQuery(ReadQuery):
    ranges: Ranges


class CountQuery(SelectionQuery):
    ranges: Ranges


class Progress(BaseModel):
    model_config = ConfigDict(extra="forbid")

    partitions: Sequences = Field(
        description="Everything below is settled for the group", json_schema_extra=SEQUENCES_SCHEMA
    )


class NewProgress(Progress):
    create: bool = Field(
        default=False, strict=True, description="Create the group if it does not exist"
    )
    start: str = Field(
        default="earliest",
        description="Where a new group begins: earliest, latest, a sequence, a time",
        json_schema_extra={"pattern": rf"^(|earliest|latest|[0-9]{{1,18}}|{TIME_PATTERN})$"},
    )
    incarnation: str = Field(
        default="",
        description="Incarnation of the queue with these sequences, from the offsets: refused (409)"
        " if the queue was created again since",
    )
    begin: bool = Field(
        default=False,
        strict=True,
        description="A reader begins here with the stored messages: the group goes back if it is"
        " ahead, and its losses so far are forgotten",
    )


class StageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: str = Field(default="", description="Queue of the rows that name none")


class Commit(BaseModel):
    model_config = ConfigDict(extra="forbid")

    stages: list[str] = Field(
        description="The stages of the batch, in this order", max_length=100_000
    )
    rows: Annotated[int, IntegerRange(0, MAX_SEQUENCE)] | None = Field(
        default=None, description="The number of rows: refused if it is wrong"
    )
    to_all: bool = Field(
        default=False,
        strict=True,
        description="Rows with a column `letter`: to every group, not only to the one that failed",
    )


# ---- responses


class PartitionOffsets(BaseModel):
    partition: int
    earliest: int = Field(description="Oldest stored sequence; `latest` when there is none")
    latest: int = Field(description="Sequence of the next message")
    bytes: int = Field(description="Stored size, approximately")


class Offsets(BaseModel):
    queue: str
    incarnation: str = Field(
        description="Changes when the queue is deleted and created again: its sequences restart"
    )
    dead_letters: bool = Field(description="Its rows have the columns of dead letters")
    compacted: bool = Field(description="Newer messages of a key replace older ones")
    partitions: list[PartitionOffsets]


class PartitionSequences(BaseModel):
    partitions: dict[str, int] = Field(examples=[{"0": 120, "1": 95}])


class RowCounts(BaseModel):
    partitions: dict[str, int] = Field(
        description="Number of stored messages by partition", examples=[{"0": 120, "1": 95}]
    )


class GroupProgress(PartitionSequences):
    lost: dict[str, int] | None = Field(
        default=None,
        examples=[{"0": 97}],
        description="If something is lost: by partition the first sequence, at or after the given"
        " ones, that was removed before the group had settled it",
    )


class Staged(BaseModel):
    stage: str
    rows: int
    bytes: int


class Committed(BaseModel):
    committed: bool
    rows: int
    replayed: bool = Field(description="It was committed before, and is not stored again")
    skipped: int = Field(
        default=0, description="Rows whose dead letter is gone or with a consumer: not stored"
    )


class LastBatch(BaseModel):
    last: int | None = Field(description="The last committed batch; null for none")


class Dropped(BaseModel):
    dropped: int = Field(description="Number of dropped stages")


def build_partition_sequences(found: dict[int, int]) -> PartitionSequences:
    return PartitionSequences(
        partitions={str(number): seq for number, seq in sorted(found.items())}
    )


def build_group_progress(found: bulk_views.GroupProgress) -> GroupProgress:
    lost = {str(number): seq for number, seq in sorted(found.first_lost.items())}
    return GroupProgress(
        partitions=build_partition_sequences(found.low_watermarks).partitions, lost=lost or None
    )

"""The columns of a queue with their Spark types.

Names and types are those of the bulk API (docs/bulk.md); a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sluice.spark.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTITION: Final = "partition"
SEQUENCE: Final = "sequence"
HEADERS: Final = "headers"
BASE_COLUMNS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "queue": StringType(),
    "partition": IntegerType(),
    "sequence": LongType(),
    "timestamp": TimestampType(),
    "message_id": StringType(),
    "attempt": IntegerType(),
    "topic": StringType(),
}
HEADER_COLUMNS: Final[dict[str, DataType]] = {HEADERS: MapType(StringType(), BinaryType())}
DEAD_LETTER_COLUMNS: Final[dict[str, DataType]] = {
    "original_queue": StringType(),
    "original_topic": StringType(),
    "original_partition": IntegerType(),
    "original_sequence": LongType(),
    "original_message_id": StringType(),
    "original_group": StringType(),
    "reason": StringType(),
    "description": StringType(),
    "attempts": IntegerType(),
    "first_attempt": TimestampType(),
    "last_attempt": TimestampType(),
    "dead_at": TimestampType(),
}
ALL_COLUMNS: Final[dict[str, DataType]] = {**BASE_COLUMNS, **HEADER_COLUMNS, **DEAD_LETTER_COLUMNS}

# The types that a writer accepts. The broker converts to the first one.
_TEXT_TYPES: Final = ("binary", "string")
_WRITABLE_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "value": _TEXT_TYPES,
    "key": _TEXT_TYPES,
    "queue": ("string",),
    "headers": ("map<string,binary>", "map<string,string>"),
    "delay": ("string",),
    "priority": ("int", "bigint", "smallint", "tinyint"),
    "message_id": ("string",),
}


def default_schema(headers: bool, dead_letters: bool) -> StructType:
    """Return the schema of a reader that the user gave no schema."""
    names = {
        **BASE_COLUMNS,
        **(HEADER_COLUMNS if headers else {}),
        **(DEAD_LETTER_COLUMNS if dead_letters else {}),
    }
    return StructType([StructField(name, kind) for name, kind in names.items()])


def schema_of_option(columns: tuple[str, ...]) -> StructType:
    """Return the schema that the option `columns` selects."""
    for nth, name in enumerate(columns):
        if name not in ALL_COLUMNS:
            raise InvalidOption(
                f"option columns names {name!r}", f"Choose from {', '.join(ALL_COLUMNS)}"
            )
        if name in columns[:nth]:
            raise InvalidOption(f"option columns names {name!r} twice", "Name each column once")
    return schema_of(columns)


def check_read_schema(schema: StructType, selected: tuple[str, ...] = ()) -> list[str]:
    """Return the columns of a schema given by the user: a selection of ours, with our types.

    Spark does not tell a Python source which columns a query needs, so a schema and the option
    `columns` (`selected`) are the ways to fetch fewer.
    """
    if selected and tuple(schema.names) != selected:
        raise InvalidOption(
            f"schema() and option columns differ: {', '.join(schema.names)}"
            f" and {', '.join(selected)}",
            "Give one of them",
        )
    for column in schema.fields:
        kind = ALL_COLUMNS.get(column.name)
        if kind is None:
            raise InvalidOption(
                f"schema() names a column {column.name!r}", f"Choose from {', '.join(ALL_COLUMNS)}"
            )
        if kind.simpleString() != column.dataType.simpleString():
            raise InvalidOption(
                f"schema() says that {column.name} is {column.dataType.simpleString()}",
                f"It is {kind.simpleString()}; cast it afterwards",
            )
    return list(schema.names)


def check_write_schema(schema: StructType, queue: str) -> list[str]:
    """Return the columns to send. Other columns of our reader are left out, so that rows can be
    written back as they were read.
    """
    names: list[str] = []
    for column in schema.fields:
        accepted_types = _WRITABLE_TYPES.get(column.name)
        if accepted_types is None:
            if column.name in ALL_COLUMNS:
                continue
            raise InvalidOption(
                f"a queue has no place for the column {column.name!r}",
                f"Write {', '.join(_WRITABLE_TYPES)}; drop the others,"
                ' or put them into value: to_json(struct("*"))',
            )
        if column.name == "queue" and queue:
            continue  # the option decides
        kind = column.dataType.simpleString()
        if kind not in accepted_types and kind != "void":
            raise InvalidOption(f"column {column.name} is {kind}", _remedy_for(column.name, kind))
        names.append(column.name)
    if "value" not in names:
        raise InvalidOption(
            "there is no column value",
            'Name it: selectExpr("... AS value"); to_json(struct("*")) for a whole row',
        )
    if not queue and "queue" not in names:
        raise InvalidOption(
            "nothing says which queue the rows are for", "Give the option queue, or a column queue"
        )
    return names


def _remedy_for(name: str, kind: str) -> str:
    """Return a Spark SQL expression that makes the column acceptable.

    Spark casts no number to binary, and a number as text is not a duration.
    """
    if name == "priority":
        return "Make it int: cast(priority AS int)"
    if name == "delay":
        return "Make it a text such as '5m'; a number of seconds: concat(delay, 's')"
    if name == HEADERS:
        if kind.startswith("map<"):
            return "Make it map<string,string>: cast(headers AS map<string,string>)"
        return "Make it map<string,string>: map('colour', colour, 'size', string(size))"
    if kind.startswith(("struct<", "array<", "map<")):
        return f"Make it string: to_json({name})"
    return f"Make it string: cast({name} AS string)"


def schema_of(names: Iterable[str]) -> StructType:
    return StructType([StructField(name, ALL_COLUMNS[name]) for name in names])

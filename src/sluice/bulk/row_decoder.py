"""Decode Arrow rows of bulk writes into messages for queues. Runs in a thread and may block.

A row is checked like a client's PUBLISH: the same options (key, delay, priority, id), the same
limits, the same error texts. A row that cannot become a message refuses the whole batch, and the
error names the row and its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sluice.bulk.ipc_sizes import count_rows, find_message_error, unpacked_size
from sluice.bulk.staging import Stage
from sluice.errors import BatchTooLarge, InvalidBatch, InvalidPayload, MessageTooLarge, TooManyRows
from sluice.message import Message
from sluice.units import parse_duration

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ID_BYTES: Final = 1024
MAX_TEXT_BYTES: Final = 65_535
MAX_DELAY_SECONDS: Final = 36_500 * 86_400.0
MAX_TIMESTAMP_MS: Final = 253_402_300_799_000  # milliseconds since 1970

DEAD_LETTER_COLUMN: Final = "letter"  # words: allowed (a column of the API)
COLUMNS: Final = (
    "value",
    "key",
    "queue",
    "headers",
    "delay",
    "priority",
    "message_id",
    DEAD_LETTER_COLUMN,
)
MAX_FAST_KEY_BYTES: Final = 1000
PARTITION_KEY_PREFIX: Final = b"\x26\x00\x0dpartition-key"  # start of the encoded user property
# Queue options of the original publisher, found among the headers of a message that was read and is
# written back: they are not applied again. Columns set them (key, delay, message_id). A priority
# belongs to the message and is preserved.
QUEUE_OPTION_HEADERS: Final = ("partition-key", "delay", "deliver-at", "message-id")
PRIORITY_HEADER: Final = "priority"
VALID_PRIORITIES: Final = frozenset(b"%d" % level for level in range(10))
_MQTT_PROPERTY_IDS: Final = {"content-type": 0x03, "response-topic": 0x08, "correlation-data": 0x09}


class DeadLetterRepair(NamedTuple):
    """A row that replaces a dead letter."""

    queue: str  # the target queue
    message: Message
    dead_letter_queue: str  # the queue that stores the dead letter
    partition: int
    sequence: int


class QueueTarget(Protocol):
    """The properties of a queue that decoding needs (`admin.bulk.bulk_views.QueueTarget`)."""

    @property
    def max_message_size(self) -> int: ...
    @property
    def fault_of_payload(self) -> Callable[[bytes], str] | None: ...
    @property
    def has_priorities(self) -> bool: ...


def _open_source(stage: Stage) -> Any:
    import pyarrow as pa

    return pa.BufferReader(stage.data) if stage.path is None else pa.memory_map(str(stage.path))


def _open_stream(stage: Stage) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(_open_source(stage))


def _invalid_batch(stage: Stage, problem: str, remedy: str) -> InvalidBatch:
    return InvalidBatch(f"batch {stage.batch} of {stage.app!r} cannot be used: {problem}", remedy)


def inspect_stage(stage: Stage, max_bytes: int, max_rows: int) -> tuple[int, int]:
    """Check that a stage is readable and its columns are known; return its rows and its bytes.

    The bytes are those after decompression. More than `max_bytes` or `max_rows` are refused before
    decompression.
    """
    import pyarrow as pa

    rows = 0
    try:
        stream = _open_stream(stage)
        _check_schema(stage, stream.schema)
        size = _measure_unpacked(stage, max_bytes, max_rows)
        for batch in stream:
            batch.validate(full=True)
            null = _first_null(batch.column("value"))
            if null >= 0:
                raise _invalid_batch(
                    stage,
                    f"value is null in row {rows + null} of a stage",
                    "Leave such rows out, or replace the null: coalesce(value, ...);"
                    " cast('' AS binary) is an empty payload, which deletes its key in a"
                    " compacted queue",
                )
            rows += batch.num_rows
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, ValueError, KeyError) as fault:
        raise _invalid_batch(
            stage, f"the body is not an Arrow stream ({fault})", "Send an Arrow IPC stream"
        ) from None
    return rows, size


def _measure_unpacked(stage: Stage, max_bytes: int, max_rows: int) -> int:
    import pyarrow as pa

    size = rows = 0
    for message in pa.ipc.MessageReader.open_stream(_open_source(stage)):
        error = find_message_error(message)
        if error:
            raise _invalid_batch(
                stage,
                f"{error}, so its size is not known",
                "Send plain columns, written by Arrow 1.0 or later",
            )
        if message.type == "record batch":
            count = count_rows(message)
            if count < 0:
                raise _invalid_batch(
                    stage, f"a batch of it has {count} rows", "Send an Arrow IPC stream"
                )
            rows += count
            if rows > max_rows:
                raise TooManyRows(stage.app, stage.batch, rows, max_rows)
            size += unpacked_size(message)
            if size > max_bytes:
                raise BatchTooLarge(stage.app, stage.batch, size, max_bytes, is_unpacked=True)
    return size


def _first_null(values: Any) -> int:
    """Return the first null row of a column, or -1.

    A column of type null declares its number of rows and needs no bytes for any of them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not values.null_count:
        return -1
    return 0 if pa.types.is_null(values.type) else int(pc.index(values.is_null(), True).as_py())


def _check_schema(stage: Stage, schema: pa.Schema) -> None:
    import pyarrow.types as kinds

    def is_text(kind: pa.DataType) -> bool:
        return bool(
            kinds.is_string(kind)
            or kinds.is_large_string(kind)
            or kinds.is_binary(kind)
            or kinds.is_large_binary(kind)
        )

    for name in schema.names:
        if name not in COLUMNS:
            raise _invalid_batch(
                stage,
                f"column {name!r} is unknown",
                f"Send {', '.join(COLUMNS)}; drop the others",
            )
    if len(set(schema.names)) < len(schema.names) or "value" not in schema.names:
        raise _invalid_batch(
            stage,
            "column value is missing, or there are two of them",
            "Send each column once, and always send value",
        )
    for field in schema:
        kind = field.type
        if field.name == "priority":
            is_valid = kinds.is_integer(kind)
        elif field.name == "headers":
            is_valid = kinds.is_map(kind) and is_text(kind.key_type) and is_text(kind.item_type)
        else:
            is_valid = is_text(kind)
        if not is_valid and not kinds.is_null(kind):
            raise _invalid_batch(
                stage,
                f"column {field.name} is {kind}",
                "Send value and key as binary, headers as map<string, binary>, priority as int,"
                " the rest as string",
            )
    if "queue" not in schema.names and not stage.queue:
        raise _invalid_batch(
            stage, "no row names a queue", "Add a column queue, or add ?queue=NAME"
        )


def list_queues(stages: list[Stage]) -> list[str]:
    """Return the queues that the rows of these stages are for."""
    import pyarrow.compute as pc

    found: dict[str, None] = {}
    for stage in stages:
        for batch in _open_stream(stage):
            if "queue" not in batch.schema.names:
                found[stage.queue] = None
                continue
            for name in pc.unique(batch.column("queue")).to_pylist():
                found[_queue_name(stage, name)] = None
    return list(found)


def _queue_name(stage: Stage, name: Any) -> str:
    if name is None or name in ("", b""):
        if not stage.queue:
            raise _invalid_batch(
                stage, "a row names no queue", "Fill the column queue, or add ?queue=NAME"
            )
        return stage.queue
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    return text.removeprefix("$queue/")


def decode_messages(
    stages: list[Stage], targets: Mapping[str, QueueTarget], now: float
) -> tuple[list[tuple[str, list[Message]]], list[DeadLetterRepair]]:
    """Return all rows as messages, in runs for one queue each, and the repairs of dead letters.

    Rows for queues that are not targets are left out: in a cluster, another node owns those.
    """
    runs: list[tuple[str, list[Message]]] = []
    repairs: list[DeadLetterRepair] = []
    for stage in stages:
        decoder = _RowDecoder(stage, targets, now)
        for batch in _open_stream(stage):
            dead_letters = (
                batch.column(DEAD_LETTER_COLUMN).to_pylist()
                if DEAD_LETTER_COLUMN in batch.schema.names
                else None
            )
            for nth, queue, message in decoder.decode_batch(batch):
                if dead_letters is not None and dead_letters[nth]:
                    repairs.append(
                        DeadLetterRepair(
                            queue,
                            message,
                            *_parse_dead_letter_id(
                                stage, _to_bytes(dead_letters[nth]).decode("utf-8", "replace")
                            ),
                        )
                    )
                    continue
                if not runs or runs[-1][0] != queue:
                    run: list[Message] = []
                    runs.append((queue, run))
                run.append(message)
    return runs, repairs


def _parse_dead_letter_id(stage: Stage, dead_letter: str) -> tuple[str, int, int]:
    queue, _, sequence = dead_letter.rpartition("/")
    queue, _, partition = queue.rpartition("/")
    if not queue or not _is_number(partition) or not _is_number(sequence):
        raise _invalid_batch(
            stage,
            f"{dead_letter[:200]!r} is not the id of a dead letter",
            "Give its position: QUEUE/PARTITION/SEQUENCE, such as dlq/tasks/image/0/120",
        )
    return queue.removeprefix("$queue/"), int(partition), int(sequence)


def _is_number(text: str) -> bool:
    """Return whether the text is a decimal number that fits 64 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


class _RowDecoder:
    def __init__(self, stage: Stage, targets: Mapping[str, QueueTarget], now: float) -> None:
        self._stage = stage
        self._targets = targets
        self._now = now
        self._row = 0
        self._delays: dict[str, int] = {}  # cache: many rows have few different delays

    def decode_batch(self, batch: pa.RecordBatch) -> Iterator[tuple[int, str, Message]]:
        """Yield row number, queue name and message of each row."""
        columns = [
            batch.column(name).to_pylist() if name in batch.schema.names else None
            for name in COLUMNS
        ]
        values, keys, queues, headers, delays, priorities, ids, _ = columns
        assert values is not None
        stage = self._stage
        has_options = any(column is not None for column in (headers, delays, priorities, ids))
        queue, target = "", self._targets.get(stage.queue)
        for nth, value in enumerate(values):
            if queues is not None or not queue:
                name = stage.queue if queues is None else _queue_name(stage, queues[nth])
                if name != queue:
                    queue, target = name, self._targets.get(name)
            if target is None:
                self._row += 1
                continue
            payload = value if type(value) is bytes else _to_bytes(value)
            if len(payload) > target.max_message_size:
                raise MessageTooLarge(queue, len(payload), target.max_message_size)
            if target.fault_of_payload is not None:
                error = target.fault_of_payload(payload)
                if error:
                    raise InvalidPayload(queue, error)
            if not has_options:  # the common case
                key = None if keys is None else keys[nth]
                if not key:
                    message = Message(payload)
                elif (
                    type(key) is bytes
                    and len(key) <= MAX_FAST_KEY_BYTES
                    and key.isascii()
                    and b"\0" not in key
                ):
                    message = Message(
                        payload, PARTITION_KEY_PREFIX + len(key).to_bytes(2, "big") + key, key
                    )
                else:
                    message = Message(payload)
                    self._apply_options(message, {"partition-key": _to_bytes(key)})
                self._row += 1
                yield nth, queue, message
                continue
            message = Message(payload)
            options: dict[str, bytes] = {}
            if headers is not None and headers[nth]:
                has_priority_column = priorities is not None and priorities[nth] is not None
                message.props = self._encode_headers(
                    headers[nth], options, has_priority_column, target.has_priorities
                )
            for name, column in (
                ("partition-key", keys),
                ("delay", delays),
                ("priority", priorities),
                ("message-id", ids),
            ):
                if column is not None and column[nth] is not None:
                    options[name] = (
                        str(column[nth]).encode() if name == "priority" else _to_bytes(column[nth])
                    )
            if options:
                self._apply_options(message, options)
            self._row += 1
            yield nth, queue, message

    def _invalid_row(self, problem: str, remedy: str) -> InvalidBatch:
        return _invalid_batch(
            self._stage, f"row {self._row} of stage {self._stage.name}: {problem}", remedy
        )

    def _encode_headers(
        self, pairs: Any, options: dict[str, bytes], has_priority_column: bool, has_priorities: bool
    ) -> bytes:
        """Encode headers as the properties of a PUBLISH.

        Headers set no queue options except a priority, which goes into `options`, unless the
        column has set one. A value that is not a priority, or a priority for a queue without
        priorities, stays an ordinary property. Of a property that a PUBLISH can have only once,
        the last value counts.
        """
        mqtt_properties: dict[int, bytes] = {}
        parts: list[bytes] = []
        for name, value in pairs:
            text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
            data = _to_bytes(value)
            number = _MQTT_PROPERTY_IDS.get(text)
            if number is not None:
                mqtt_properties[number] = self._encode_mqtt_property(number, text, data)
            elif text == PRIORITY_HEADER and has_priority_column:
                continue
            elif text == PRIORITY_HEADER and has_priorities and data in VALID_PRIORITIES:
                options[text] = data
            elif text not in QUEUE_OPTION_HEADERS:
                parts.append(self._encode_user_property(text.encode("utf-8", "replace"), data))
        return b"".join((*mqtt_properties.values(), *parts))

    def _encode_mqtt_property(self, number: int, name: str, data: bytes) -> bytes:
        if number != 0x09:
            self._check_text(name, data)
        elif len(data) > MAX_TEXT_BYTES:
            raise self._invalid_row(
                f"header {name} has {len(data)} bytes", f"Give at most {MAX_TEXT_BYTES}"
            )
        if number == 0x08 and (not data or b"+" in data or b"#" in data):
            raise self._invalid_row(
                f"header {name} is not a topic", "Give a topic without wildcards"
            )
        return bytes([number]) + len(data).to_bytes(2, "big") + data

    def _encode_user_property(self, name: bytes, data: bytes) -> bytes:
        self._check_text("name", name)
        self._check_text(name.decode(), data)
        return b"\x26" + len(name).to_bytes(2, "big") + name + len(data).to_bytes(2, "big") + data

    def _check_text(self, name: str, data: bytes) -> None:
        try:
            is_text = (
                len(data) <= MAX_TEXT_BYTES and b"\0" not in data and data.decode() is not None
            )
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise self._invalid_row(
                f"header {name} is not a text that MQTT can carry",
                f"Give UTF-8 of at most {MAX_TEXT_BYTES} bytes without null characters;"
                " put the rest into value",
            )

    def _apply_options(self, message: Message, options: dict[str, bytes]) -> None:
        """Apply the queue options of the row; they stay properties, as for clients."""
        encoded: list[bytes] = []
        for name, data in options.items():
            if name == "partition-key":
                if len(data) > MAX_TEXT_BYTES:
                    raise self._invalid_row(
                        f"key has {len(data)} bytes", f"Give at most {MAX_TEXT_BYTES}"
                    )
                message.key = data
                if not _is_text(data):
                    continue  # any bytes can be a key, but only text can be a property
            elif name == "message-id":
                self._check_text(name, data)
                if len(data) > MAX_ID_BYTES:
                    raise self._invalid_row(
                        f"message_id has {len(data)} bytes", f"Give at most {MAX_ID_BYTES}"
                    )
                if data in (b".", b".."):
                    raise self._invalid_row(f"message_id is {data.decode()!r}", "Give another one")
                message.id = data
                continue
            elif name == "priority":
                if data not in VALID_PRIORITIES:
                    raise self._invalid_row(
                        f"priority is {data.decode(errors='replace')}", "Give 0 to 9"
                    )
                message.priority = int(data)
            else:
                if not data:
                    continue
                message.deliver_at_ms = self._deliver_at(data.decode("utf-8", "replace"))
            encoded.append(self._encode_user_property(name.encode(), data))
        message.props = b"".join(encoded) + message.props

    def _deliver_at(self, text: str) -> int:
        found = self._delays.get(text)
        if found is None:
            try:
                seconds = parse_duration(text)
                if not 0.0 <= seconds <= MAX_DELAY_SECONDS:
                    raise ValueError("it is longer than 36500d")
            except ValueError as fault:
                raise self._invalid_row(f"delay: {fault}", 'Give a duration such as "5m"') from None
            found = self._delays[text] = min(int((self._now + seconds) * 1000.0), MAX_TIMESTAMP_MS)
        return found


def _to_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else bytes(value)


def _is_text(data: bytes) -> bool:
    try:
        return b"\0" not in data and data.decode() is not None
    except UnicodeDecodeError:
        return False

"""Parse the options of clients for queues: user properties and payloads as values.

An invalid value is refused with the name of its option.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.queue_topics import MAX_IDS
from sluice.broker.sessions import SubscribeOptions, encode_subscription_ids
from sluice.errors import InvalidQueueConfig, TooManyIds
from sluice.queues.bulk import parse_iso_time
from sluice.queues.flow import DeliveryToken
from sluice.queues.names import group_name_error
from sluice.units import parse_duration
from sluice.wire.packets import V5, Publish, build_publish
from sluice.wire.properties import Properties

if TYPE_CHECKING:
    from sluice.broker.sessions import Session

THEN_CONTENT_TYPE: Final = "application/vnd.sluice.then+json"
THEN_KEYS: Final = frozenset(
    (
        "topic",
        "payload",
        "payload_base64",
        "properties",
        "content_type",
        "response_topic",
        "correlation_data",
        "expiry",
    )
)
THEN_FORM: Final = (
    'Write it as {"topic": "$queue/next", "payload": "text", "properties": {"partition-key": "k"}};'
    f" there are also {', '.join(sorted(THEN_KEYS - {'topic', 'payload', 'properties'}))}"
)
MAX_ID_LIST_BYTES: Final = 262_144  # of a JSON list of message ids
MAX_MESSAGE_ID_BYTES: Final = 1024  # of a publisher's own message id
MAX_DELAY_SECONDS: Final = 36_500 * 86_400.0
MAX_TIMESTAMP_MS: Final = 253_402_300_799_000  # end of the year 9999


class ConsumerOptions:
    """How a subscription consumes queues: the options of its SUBSCRIBE, checked."""

    def __init__(self, session: Session, options: SubscribeOptions) -> None:
        self.group: str = default_group(session.client_id)
        self.prefetch: int = -1  # -1: the queue's setting; 0: none, to drain before a stop
        self.acks_by_puback: bool = session.version != V5
        self.start: str = "earliest"
        self.priority: int = 0
        self.exclusive: bool = False
        self.id_in_topic: bool = False
        self.extra_properties: bytes = encode_subscription_ids(
            [options.identifier] if options.identifier else []
        )
        for name, value in options.user:
            self._set_option(name, value)

    def _set_option(self, name: str, value: str) -> None:
        if name == "consumer-group":
            self.set_group(value)
        elif name == "prefetch":
            self.prefetch = read_number(name, value, 0, 65_535)
        elif name == "ack-mode":
            if value not in ("explicit", "puback"):
                raise InvalidQueueConfig(f"ack-mode is {value!r}", "Use explicit or puback")
            self.acks_by_puback = value == "puback"
        elif name == "start":
            self.start = value
        elif name == "consumer-priority":
            self.priority = read_number(name, value, -1_000_000, 1_000_000)
        elif name == "exclusive":
            if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
                raise InvalidQueueConfig(f"exclusive is {value!r}", "Use true or false")
            self.exclusive = value.lower() in ("true", "1", "yes")

    def set_group(self, name: str) -> None:
        fault = group_name_error(name)
        if fault:
            raise InvalidQueueConfig(f"consumer-group {name!r} cannot be a group", fault)
        self.group = name


def read_number(name: str, value: str, minimum: int, maximum: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise InvalidQueueConfig(
            f"{name} is {value!r}", f"Give a whole number from {minimum} to {maximum}"
        )
    return number


def default_group(client_id: str) -> str:
    """Return the default group: clients images-1 and images-2 are in the group images."""
    return client_id.rpartition("-")[0] or client_id


def read_delay(name: str, text: bytes) -> float:
    try:
        seconds: float = parse_duration(text.decode())
    except ValueError as fault:
        raise InvalidQueueConfig(f"{name}: {fault}") from None
    if seconds > MAX_DELAY_SECONDS:
        raise InvalidQueueConfig(f"{name} is {text.decode()!r}", "Give at most 36500d")
    return seconds


def read_timestamp_ms(text: bytes) -> i64:
    """Return milliseconds since 1970, given as that number or in ISO 8601."""
    value = text.decode()
    try:
        timestamp_ms = int(value) if value.isdecimal() else int(parse_iso_time(value) * 1000.0)
        if timestamp_ms > MAX_TIMESTAMP_MS:
            raise ValueError
        return timestamp_ms
    except (ValueError, OverflowError):
        raise InvalidQueueConfig(
            f"deliver-at is {value!r}",
            "Give milliseconds since 1970, or a time such as 2030-01-31T12:00:00Z",
        ) from None


def read_then(packet: Publish) -> list[Publish]:
    """Return the messages that an ack publishes: its properties `then`, or a payload of that type.

    Each is a JSON object; the payload is a list of them.
    """
    properties = packet.decode_properties()
    texts = [value for name, value in properties.user if name == "then"]
    values: list[object] = []
    if properties.content_type == THEN_CONTENT_TYPE:
        listed = _parse_then_json(packet.payload)
        if not isinstance(listed, list):
            raise InvalidQueueConfig("the payload is no JSON list", THEN_FORM)
        values += listed
    values += [_parse_then_json(text.encode()) for text in texts]
    if len(values) > MAX_IDS:
        raise TooManyIds(MAX_IDS)
    return [_read_then_message(value) for value in values]


def _parse_then_json(text: bytes) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidQueueConfig("a message of then is no valid JSON", THEN_FORM) from None
    return value


def _read_then_message(value: object) -> Publish:
    if not isinstance(value, dict) or not value.keys() <= THEN_KEYS or "topic" not in value:
        raise InvalidQueueConfig("a message of then has unknown keys, or no topic", THEN_FORM)
    for key, one in value.items():
        if not isinstance(one, dict if key == "properties" else str):
            raise InvalidQueueConfig(f"{key} of a message of then has a wrong type", THEN_FORM)
    payload = value.get("payload", "").encode()
    properties = Properties()
    try:
        if "payload_base64" in value:
            payload = b64decode(value["payload_base64"], validate=True)
        if "correlation_data" in value:
            properties.correlation_data = b64decode(value["correlation_data"], validate=True)
    except ValueError:
        raise InvalidQueueConfig("a message of then has invalid base64", THEN_FORM) from None
    properties.content_type = value.get("content_type")
    properties.response_topic = value.get("response_topic")
    for name, text in value.get("properties", {}).items():
        for one in text if isinstance(text, list) else [text]:
            if not isinstance(one, str):
                raise InvalidQueueConfig(f"property {name!r} of then is no text", THEN_FORM)
            properties.user.append((name, one))
    texts = [value["topic"], properties.content_type or "", properties.response_topic or ""]
    for pair in properties.user:
        texts += pair
    for one in texts:
        if "\0" in one or len(one.encode("utf-8", "surrogatepass")) > 65_535 or not _is_utf8(one):
            raise InvalidQueueConfig("a text of then is too long or no UTF-8", THEN_FORM)
    packet = build_publish(value["topic"].encode(), payload, 1, False, properties)
    if "expiry" in value:
        packet.expiry_seconds = i64(read_delay("expiry", value["expiry"].encode()))
    return packet


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_token(text: bytes, token: DeliveryToken) -> None:
    """Read `<counter>-<run><tag>`, up to a dot.

    An invalid text becomes a token that matches nothing.
    """
    token.counter = -1
    end: i64 = text.find(b".")
    if end < 0:
        end = len(text)
    at: i64 = end - 25
    if at < 1 or at > 16 or text[at] != 0x2D:
        return
    counter = _read_hex(text, 0, at)
    run = _read_hex(text, at + 1, at + 9)
    high = _read_hex(text, at + 9, at + 17)
    low = _read_hex(text, at + 17, end)
    if counter <= 0 or run < 0 or high < 0 or low < 0:
        return
    if high >= 0x8000_0000:
        high -= 0x1_0000_0000
    token.counter = counter
    token.run = run
    token.tag = (high << 32) | low


def _read_hex(text: bytes, at: i64, end: i64) -> i64:
    """Return the value of at most 16 hexadecimal digits, or -1."""
    value: i64 = 0
    while at < end:
        byte: i64 = text[at]
        at += 1
        if 0x30 <= byte <= 0x39:
            byte -= 0x30
        elif 0x61 <= byte <= 0x66:
            byte -= 0x57
        else:
            return -1
        if value > 0x07FF_FFFF_FFFF_FFFF:
            return -1
        value = (value << 4) | byte
    return value


def read_message_ids(payload: bytes) -> list[bytes]:
    """Return the message ids in a payload: one id, or a JSON list of ids."""
    if not payload.strip():
        raise InvalidQueueConfig(
            "no message id is given",
            "Give it as user property message-id, in the topic, or in the payload",
        )
    if payload[:1] != b"[":
        return [payload.strip()]
    if len(payload) > MAX_ID_LIST_BYTES:
        raise TooManyIds(MAX_IDS)
    try:
        listed: object = json.loads(payload)
    except (ValueError, RecursionError):
        listed = None
    given = listed if isinstance(listed, list) else []
    if len(given) > MAX_IDS:
        raise TooManyIds(MAX_IDS)
    ids = [str(one).encode("utf-8", "replace") for one in given]
    if not ids:
        raise InvalidQueueConfig(
            "the payload is not a JSON list of message ids", 'Write ["1-0", "1-1"]'
        )
    return ids

"""Feed JSON to the configuration of queues, as REST and `$admin` accept it.

An input is the body of a request. For each one:

* it is accepted or refused with a `SluiceError`, never another exception;
* an accepted configuration can be shown, stored and read back, and stays the same;
* `$admin/queue/create` and `$admin/queue/<name>/config` answer with a reason code;
* reading it, and checking payloads against its schema, takes less than SLOW_SECONDS.

Options: see `harness.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from time import thread_time

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

harness.find_sources()

from sluice.admin.rest.schemas.config_schema import CONFIG_SCHEMA  # that it can be made  # noqa: F401
from sluice.errors import SluiceError
from sluice.json_schema import build_validator, find_schema_error
from sluice.queues.service.queue_config import read_config
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import put

SLOW_SECONDS = 1.0
MAX_QUEUES = 500
SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, "next": {"$ref": "#"}},
    "anyOf": [{"minProperties": 1}, {"items": {"$ref": "#/$defs/a"}}],
    "$defs": {"a": {"enum": [1, "x", None, {"b": []}], "uniqueItems": True, "$anchor": "here"}},
}
CONFIGS: list[object] = [
    {"name": "jobs"},
    {
        "name": "tasks/image",
        "partitions": 4,
        "ordering": "strict",
        "type": "work",
        "bindings": ["a/+/#"],
    },
    {"name": "c", "type": "compacted", "limits": {"retention": "1d", "max_queue_depth": 10}},
    {"name": "b", "bindings": [{"topic": "a/b", "headers": {"tenant": "north"}}]},
    {
        "name": "r",
        "retry_policy": {
            "max_retries": 3,
            "initial_backoff": "5s",
            "max_backoff": "5m",
            "backoff_multiplier": 2.5,
            "total_timeout": "3h",
            "jitter": 0.5,
        },
    },
    {
        "name": "d",
        "dlq_config": {
            "enabled": True,
            "topic": "dlq/d",
            "invalid_topic": "dlq/bad",
            "alert_webhook": "https://example.com/x",
        },
    },
    {
        "name": "l",
        "limits": {
            "max_message_size": 100,
            "message_ttl": "0s",
            "overflow": "dead-letter",
            "on_expiry": "drop",
            "dedup_window": "2m",
        },
    },
    {
        "name": "p",
        "performance": {
            "delivery_timeout": "200ms",
            "batch_size": 2,
            "prefetch": 3,
            "compression": "zstd",
            "durability": "interval",
        },
    },
    {"name": "s", "schema": SCHEMA},
    {
        "name": "s",
        "schema": {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": {"not": {"contains": {"$ref": "#here"}}},
                "u": {"$anchor": "here", "if": {"type": "array"}, "then": {"maxItems": 3}},
            },
        },
    },
]
VALUES: list[object] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.5, 1e-9, "", " ", "0", "1s",
    "-1s", "1e9d", "99999999999999d", "never", "x" * 300, "\u0000", "\ud800", "a/b", "$queue/x",
    "+", "#", "..", "dlq/x", [], {}, [[]], [None], {"": None}, {"$ref": "#"},
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "#/$defs/a", "#/properties/id", "^(a+)+$", "(?=x)",
    "[ab]{99}", "strict", "compacted", "reject", "zstd",
    {"items": {"$ref": "#"}, "unevaluatedItems": {"$ref": "#"}},
    "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#",
]  # fmt: skip
KEYS = [
    "name", "partitions", "ordering", "type", "bindings", "topic", "headers", "retry_policy",
    "max_retries", "dlq_config", "enabled", "invalid_topic", "alert_webhook", "limits", "retention",
    "message_ttl", "overflow", "performance", "prefetch", "schema", "schema_", "$ref", "$id", "id",
    "$anchor", "$dynamicRef", "$dynamicAnchor", "$schema", "$defs", "anyOf", "allOf", "oneOf",
    "not", "if", "then", "else", "items", "prefixItems", "contains", "properties",
    "patternProperties", "additionalProperties", "propertyNames", "dependentSchemas", "enum",
    "const", "unevaluatedProperties", "unevaluatedItems", "pattern", "format", "minimum",
    "multipleOf", "uniqueItems",
]  # fmt: skip
PAYLOADS = [
    b"1",
    b'"a"',
    b"[[[[1]]]]",
    b'{"id": "AB-1", "next": {"id": "x"}}',
    b"[" * 40 + b"]" * 40,
    b"{]",
]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\u0000",
    b"1e999",
    b"NaN",
    b"null",
    b"\xff",
    b"0",
]


def change(pool: list[bytes], draw: Random) -> bytes:
    """Return mostly another JSON document; sometimes invalid JSON."""
    data = draw.choice(pool)
    if draw.random() < 0.1:
        return harness.changed_bytes(data, draw, TOKENS)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return harness.changed_bytes(data, draw, TOKENS)
    for _ in range(draw.choice((1, 1, 2, 4))):
        value = changed(value, draw)
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")[:100_000]
    except RecursionError:
        return data


def changed(value: object, draw: Random) -> object:
    """Descend to some value, and replace it or add a key."""
    if draw.random() < 0.3 or not isinstance(value, list | dict) or not value:
        return another(value, draw)
    if isinstance(value, list):
        copy = list(value)
        at = draw.randrange(len(copy))
        copy[at] = changed(copy[at], draw)
        return copy
    key = draw.choice(list(value))
    return {**value, key: changed(value[key], draw)}


def another(value: object, draw: Random) -> object:
    if isinstance(value, dict) and draw.random() < 0.7:
        copy = dict(value)
        if copy and draw.random() < 0.2:
            del copy[draw.choice(list(copy))]
        else:
            copy[draw.choice(KEYS)] = draw.choice(
                (draw.choice(VALUES), value, draw.choice(list(copy.values()) or [0]))
            )
        return copy
    if isinstance(value, list) and draw.random() < 0.5:
        return [*value, draw.choice((draw.choice(VALUES), *value))]
    return draw.choice((draw.choice(VALUES), [value], {draw.choice(KEYS): value}))


class Broker:
    """A broker in memory, created again when it has many queues."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.queue_harness = BrokerHarness()
        self.client = self.queue_harness.connect("admin")
        assert self.request("create", b'{"name": "changed"}') == 0

    def request(self, verb: str, body: bytes) -> int:
        if len(self.queue_harness.engine.queues) > MAX_QUEUES:
            self.restart()
        reason, _ = put(self.client, f"$admin/queue/{verb}", body)
        return reason


BROKER = Broker()


def check(data: bytes) -> str:
    started = thread_time()
    outcome = check_reply(data)
    spent = thread_time() - started
    assert spent < SLOW_SECONDS, f"it took {spent:.1f} s"
    return outcome


def check_reply(data: bytes) -> str:
    create, update = BROKER.request("create", data), BROKER.request("changed/config", data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return f"not JSON {create}"
    try:
        config = read_config(value, "")
    except SluiceError as refusal:
        return f"{create} {update} {refusal.what.partition('cannot be used')[2][:40]}"
    shown = config.as_dict()
    again = read_config(json.loads(config.as_json()), config.name)
    assert again.as_dict() == shown, f"{shown} was read back as {again.as_dict()}"
    schema = config.rules().schema
    if not schema:
        return f"{create} {update} accepted {sorted(value)}"
    error = find_schema_error(schema)
    if error:
        assert create != 0, "a queue was created with a schema that is refused"
        return f"{create} {update} schema {error[:40]}"
    validate = build_validator(schema)
    return f"{create} {update} checked {[bool(validate(payload)) for payload in PAYLOADS]}"


def seeds() -> list[bytes]:
    return [json.dumps(one).encode() for one in CONFIGS]


if __name__ == "__main__":
    harness.main("Fuzz the configuration of queues.", harness.Fuzzer(seeds, change, check))

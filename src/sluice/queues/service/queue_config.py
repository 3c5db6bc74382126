"""Parse and validate the configuration of a queue: JSON or TOML in, `QueueRules` out.

Missing keys get their defaults. A change names only the keys that change. Unknown keys and invalid
values are refused with the name of the key and the allowed range. This module does not know the
engine or the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from sluice.config.setting_types import (
    ConfigSection,
    Seconds,
    describe_rule,
    duration_between,
    number_between,
)
from sluice.errors import InvalidQueueConfig, StoreError, UnusableStrategy
from sluice.queues.model import (
    ANY_ORDER,
    DEAD_LETTER,
    DROP_OLDEST,
    PER_KEY,
    REJECT_NEW,
    STRICT,
    QueueRules,
)
from sluice.queues.names import DLQ_PREFIX, queue_name_error
from sluice.queues.service.partition_strategies import HASH, find_partition_strategy
from sluice.units import format_duration, parse_rate

YEAR_SECONDS: Final = 31_536_000.0
# Entries of a configuration, and of each section and list in it.
MAX_ENTRIES: Final = 1000
# Size of a configuration that a client publishes.
MAX_CONFIG_BYTES: Final = 262_144
MAX_SHOWN_PROBLEMS: Final = 10
# Retries of messages in a dead-letter queue: they are never dead-lettered again.
UNLIMITED_RETRIES: Final = 2**31
UNLIMITED_TIMEOUT_SECONDS: Final = 100 * YEAR_SECONDS
ORDERINGS: Final = {"none": ANY_ORDER, "partition": PER_KEY, "strict": STRICT}
OVERFLOWS: Final = {"reject": REJECT_NEW, "drop-oldest": DROP_OLDEST, "dead-letter": DEAD_LETTER}


def _validate_queue_name(value: str) -> str:
    error = queue_name_error(value.removeprefix("$queue/"))
    if error:
        raise ValueError(f"is not a valid queue name: {error}")
    return value.removeprefix("$queue/")


def _validate_webhook(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be an http:// or https:// address")
    return value


def _validate_rate(value: str) -> str:
    parse_rate(value)
    return value


# Limit for new bindings, at most `mqtt.max_topic_levels`: routing in a cluster recurses once per
# level.
MAX_BINDING_LEVELS: Final = 512


def _validate_binding_topic(value: str) -> str:
    """Validate a filter for plain topics by MQTT's rules for wildcards, or the topic of a queue."""
    levels = value.split("/")
    if levels[0] == "$queue":
        error = queue_name_error(value.removeprefix("$queue/"))
        if error:
            raise ValueError(f"names a queue that cannot exist: {error}")
        return value
    if not value or len(value.encode()) > 65_535 or "\0" in value:
        raise ValueError("must be a topic filter such as sensors/+/temp")
    if levels[0] in ("$admin", "$share", "$ECQ"):
        raise ValueError(f"cannot bind {levels[0]}/..., only plain topics and queues")
    for nth, level in enumerate(levels):
        if "#" in level and (level != "#" or nth != len(levels) - 1):
            raise ValueError("has a # that is not the whole last level")
        if "+" in level and level != "+":
            raise ValueError("has a + that is not a whole level")
    return value


QueueName = Annotated[str, AfterValidator(_validate_queue_name)]


DEFAULT_PARTITIONS: Final = 10


class Binding(ConfigSection):
    """A plain topic filter or a queue: the queue stores copies of its messages.

    With `headers`, only of messages with all of these user properties, or with any of them.
    """

    topic: Annotated[str, AfterValidator(_validate_binding_topic)]
    headers: dict[str, str] = {}
    match: Literal["all", "any"] = "all"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"topic": value} if isinstance(value, str) else value


class RetryPolicy(ConfigSection):
    max_retries: Annotated[int, number_between(0, 2**31)] = 10
    initial_backoff: Annotated[Seconds, duration_between(0, YEAR_SECONDS)] = 5.0
    max_backoff: Annotated[Seconds, duration_between(0, YEAR_SECONDS)] = 300.0
    backoff_multiplier: Annotated[float, number_between(1, 1000)] = 2.0
    total_timeout: Annotated[Seconds, duration_between(0, 100 * YEAR_SECONDS)] = 10_800.0
    jitter: Annotated[float, number_between(0, 1)] = 0.0


class DeadLetterConfig(ConfigSection):
    enabled: bool = True
    topic: QueueName | None = None  # None: dlq/<name>
    invalid_topic: QueueName | None = None
    alert_webhook: Annotated[str, AfterValidator(_validate_webhook)] | None = None
    on_dead: Literal["continue", "hold-key"] = "continue"
    # 0: until the dead letter is put back or discarded
    hold_timeout: Annotated[Seconds, duration_between(0, 100 * YEAR_SECONDS)] = 86_400.0


class QueueLimits(ConfigSection):
    max_message_size: Annotated[int, number_between(1, 268_435_455)] = 1_048_576
    max_queue_depth: Annotated[int, number_between(1, 2**62)] = 100_000
    # 0: messages do not expire
    message_ttl: Annotated[Seconds, duration_between(0, 50 * YEAR_SECONDS)] = 604_800.0
    retention: Annotated[Seconds, duration_between(0, 100 * YEAR_SECONDS)] = 0.0
    overflow: Literal["reject", "drop-oldest", "dead-letter"] = "reject"
    on_expiry: Literal["drop", "dead-letter"] = "drop"
    dedup_window: Annotated[Seconds, duration_between(0, 86_400)] = 120.0
    # Of each group; None: no limit
    max_inflight: Annotated[int, number_between(1, 2**31)] | None = None
    max_rate: Annotated[str, AfterValidator(_validate_rate)] | None = None
    # Of each partition key in each group
    max_inflight_per_key: Annotated[int, number_between(1, 2**31)] | None = None
    max_rate_per_key: Annotated[str, AfterValidator(_validate_rate)] | None = None


class BreakerConfig(ConfigSection):
    failures: Annotated[int, number_between(0, 10_000)] = 0  # 0: no breaker
    window: Annotated[Seconds, duration_between(0.001, YEAR_SECONDS)] = 60.0
    open_for: Annotated[Seconds, duration_between(0.001, YEAR_SECONDS)] = 30.0


class Performance(ConfigSection):
    delivery_timeout: Annotated[Seconds, duration_between(0.01, YEAR_SECONDS)] = 30.0
    batch_size: Annotated[int, number_between(1, 65_535)] = 1
    prefetch: Annotated[int, number_between(1, 65_535)] = 100
    rebalance_after: Annotated[Seconds, duration_between(0, 3600)] = 1.0
    compression: Literal["none", "zstd"] = "none"
    durability: Literal["sync", "interval"] = "sync"


class QueueConfig(ConfigSection):
    name: QueueName
    partitions: Annotated[int, number_between(1, 4096)] = DEFAULT_PARTITIONS
    ordering: Literal["none", "partition", "strict"] = "partition"
    partition_strategy: str = HASH
    type: Literal["work", "compacted"] = "work"
    bindings: list[Binding] = []
    retry_policy: RetryPolicy = RetryPolicy()
    dlq_config: DeadLetterConfig = DeadLetterConfig()
    limits: QueueLimits = QueueLimits()
    performance: Performance = Performance()
    breaker: BreakerConfig = BreakerConfig()
    schema_: dict[str, object] | None = None

    @model_validator(mode="before")
    @classmethod
    def _schema_key(cls, value: object) -> object:
        """Rename the key `schema`: pydantic's models already have a method of that name."""
        if isinstance(value, Mapping) and "schema" in value:
            value = {**value, "schema_": value["schema"]}
            del value["schema"]
        return value

    @model_validator(mode="before")
    @classmethod
    def _force_single_partition(cls, value: object) -> object:
        """Give a strict queue one partition, so that its configuration shows the real number."""
        if isinstance(value, Mapping) and value.get("ordering") == "strict":
            value = {**value, "partitions": 1}
        return value

    def rules(self) -> QueueRules:
        """Return the configuration as the plain values that the engine uses."""
        rules = QueueRules(self.name)
        rules.partitions = self.partitions
        rules.ordering = ORDERINGS[self.ordering]
        rules.choose_partition = find_partition_strategy(self.partition_strategy)
        rules.is_compacted = self.type == "compacted"
        rules.bindings = [binding.topic for binding in self.bindings]
        retry = self.retry_policy
        rules.max_retries = retry.max_retries
        rules.initial_backoff = retry.initial_backoff
        rules.max_backoff = retry.max_backoff
        rules.backoff_multiplier = retry.backoff_multiplier
        rules.total_timeout = retry.total_timeout
        rules.jitter = retry.jitter
        dlq = self.dlq_config
        rules.dlq_name = dlq.topic or DLQ_PREFIX + self.name
        rules.dlq_enabled = dlq.enabled and rules.dlq_name != self.name
        if dlq.enabled and not rules.dlq_enabled:
            # A template names one dead-letter queue for all queues, and this is that queue. Its
            # messages must neither be dead-lettered into itself forever nor be lost: they are kept,
            # as in dlq/...
            rules.max_retries = UNLIMITED_RETRIES
            rules.total_timeout = UNLIMITED_TIMEOUT_SECONDS
        rules.invalid_queue_name = (
            dlq.invalid_topic if dlq.invalid_topic and dlq.invalid_topic != self.name else ""
        )
        rules.alert_webhook = dlq.alert_webhook or ""
        rules.holds_keys = dlq.on_dead == "hold-key" and rules.dlq_enabled
        rules.hold_timeout = dlq.hold_timeout
        limits = self.limits
        rules.max_message_size = limits.max_message_size
        rules.max_depth = limits.max_queue_depth
        rules.message_ttl = limits.message_ttl
        rules.retention = limits.retention
        rules.overflow = OVERFLOWS[limits.overflow]
        rules.expired_to_dlq = limits.on_expiry == "dead-letter"
        rules.dedup_window = limits.dedup_window
        rules.max_in_flight = limits.max_inflight or 0
        if limits.max_rate is not None:
            rules.max_rate, rules.max_rate_burst = parse_rate(limits.max_rate)
        rules.max_in_flight_per_key = limits.max_inflight_per_key or 0
        if limits.max_rate_per_key is not None:
            rules.max_rate_per_key, rules.max_rate_per_key_burst = parse_rate(
                limits.max_rate_per_key
            )
        rules.breaker_failures = self.breaker.failures
        rules.breaker_window = self.breaker.window
        rules.breaker_open_for = self.breaker.open_for
        performance = self.performance
        rules.delivery_timeout = performance.delivery_timeout
        rules.batch_size = performance.batch_size
        rules.prefetch = performance.prefetch
        rules.rebalance_after = performance.rebalance_after
        rules.compress = performance.compression == "zstd"
        rules.sync = performance.durability == "sync"
        rules.schema = json.dumps(self.schema_) if self.schema_ is not None else ""
        return rules

    def as_dict(self) -> dict[str, object]:
        """Return the configuration as users write it, with units and the key `schema`."""
        values = _as_dict(self)
        schema = values.pop("schema_")
        if schema is not None:
            values["schema"] = schema
        return values

    def as_json(self) -> str:
        """Return the form that is stored with the queue."""
        return json.dumps(self.as_dict(), separators=(",", ":"))


def parse_stored_rules(name: str, text: str) -> QueueRules:
    """Return the rules of a stored queue."""
    try:
        return read_config(json.loads(text), name).rules()
    except UnusableStrategy as error:
        # An invalid record would be skipped by --salvage, with the queue.
        raise StoreError(f"queue {name!r} cannot be opened: {error.what}", error.remedy) from error


def _as_dict(model: BaseModel) -> dict[str, object]:
    """Return a model as JSON values, with durations in their notation."""
    values: dict[str, object] = {}
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        if isinstance(value, BaseModel):
            values[key] = _as_dict(value)
        elif isinstance(value, list):
            values[key] = [
                _as_dict(item) if isinstance(item, BaseModel) else item for item in value
            ]
        elif isinstance(value, float) and any(
            "parse_duration" in repr(check) for check in field.metadata
        ):
            values[key] = format_duration(value)
        else:
            values[key] = value
    return values


# Defaults of dead-letter queues: messages stay until a user removes them, however often they are
# delivered.
DEAD_LETTER_DEFAULTS: Final[dict[str, object]] = {
    "retry_policy": {
        "max_retries": UNLIMITED_RETRIES,
        "total_timeout": format_duration(UNLIMITED_TIMEOUT_SECONDS),
    },
    "dlq_config": {"enabled": False},
    "limits": {"message_ttl": "0s"},
}


# Defaults of compacted queues: the last message of a key does not expire.
COMPACTED_DEFAULTS: Final[dict[str, object]] = {"limits": {"message_ttl": "0s"}}


def read_config(
    given: object,
    name: str = "",
    base: QueueConfig | None = None,
    default_partitions: int = DEFAULT_PARTITIONS,
) -> QueueConfig:
    """Read a configuration and fill in defaults.

    With `base`, missing keys keep their values from there. `default_partitions` is the partition
    count of a new queue that does not give one.
    """
    if not isinstance(given, Mapping):
        raise InvalidQueueConfig(
            "the configuration of a queue must be a JSON object",
            'Write it as {"name": "tasks/image", "partitions": 4}',
        )
    _check_size(given)
    values: dict[str, object] = dict(given)
    if name:
        if values.get("name", name) not in (name, f"$queue/{name}"):
            raise InvalidQueueConfig(
                f"name is {values['name']!r}, but this is queue {name!r}", "Leave name out"
            )
        values["name"] = name
    if base is not None:
        values = merge_config(base.as_dict(), values)
    elif isinstance(values.get("name"), str) and str(values["name"]).removeprefix(
        "$queue/"
    ).startswith(DLQ_PREFIX):
        values = merge_config(DEAD_LETTER_DEFAULTS, values)
    elif values.get("type") == "compacted":
        values = merge_config(COMPACTED_DEFAULTS, values)
    values.setdefault("partitions", default_partitions)
    try:
        return QueueConfig.model_validate(values)
    except ValidationError as invalid:
        errors = invalid.errors()
        problems = "; ".join(
            _describe_problem(error, len(errors) == 1) for error in errors[:MAX_SHOWN_PROBLEMS]
        )
        if len(errors) > MAX_SHOWN_PROBLEMS:
            problems += f"; and {len(errors) - MAX_SHOWN_PROBLEMS} more"
        raise InvalidQueueConfig(
            f"the configuration of queue {values.get('name', '')!r} cannot be used: {problems}"
        ) from None


def check_new_bindings(config: QueueConfig, before: QueueConfig | None) -> None:
    """Refuse bindings with too many levels that are not in `before`.

    `read_config` accepts them: it also reads stored configurations, and older versions had no
    limit.
    """
    known = {binding.topic for binding in before.bindings} if before is not None else set()
    for binding in config.bindings:
        levels = binding.topic.count("/") + 1
        if levels > MAX_BINDING_LEVELS and binding.topic not in known:
            raise InvalidQueueConfig(
                f"a binding of queue {config.name!r} has {levels} levels",
                f"Use a filter of at most {MAX_BINDING_LEVELS} levels, "
                "for instance one that ends with #",
            )


def _check_size(given: Mapping[str, object]) -> None:
    """Refuse a configuration with far too many entries before validating each of them."""
    for key, value in [("", given), *given.items()] if len(given) <= MAX_ENTRIES else [("", given)]:
        if key != "schema" and isinstance(value, Mapping | list) and len(value) > MAX_ENTRIES:
            raise InvalidQueueConfig(
                f"{key or 'the configuration'} has {len(value)} entries",
                f"Give at most {MAX_ENTRIES}",
            )


def merge_config(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    """Return `base` with the keys of `change`, table by table; a list or a schema is replaced."""
    merged = dict(base)
    for key, value in change.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping) and key != "schema"
        merged[key] = merge_config(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, f"{prefix}{name}.")
        else:
            yield prefix + name.removesuffix("_")


def _suggest_setting(key: str, lists_settings: bool) -> str:
    """Return the setting that was probably meant, or those that its table has."""
    known = list(_settings(QueueConfig))
    table = key.rpartition(".")[0]
    by_name = [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]
    close = by_name or get_close_matches(key, known, 1, 0.6)
    if close:
        return f"; did you mean {close[0]}"
    if not lists_settings:
        return ""
    names = [one for one in known if one.rpartition(".")[0] == table]
    if names and table:
        return f"; {table} has {', '.join(names)}"
    return f"; there are {', '.join(known)}"


def _describe_problem(error: object, lists_settings: bool) -> str:
    """Describe one validation error: the key and what is allowed."""
    details: dict[str, object] = dict(error)  # type: ignore[call-overload]
    location = [str(part) for part in details["loc"]]  # type: ignore[attr-defined]
    key = ".".join(location).replace("schema_", "schema")
    if details["type"] == "extra_forbidden":
        return f"{key} is not a setting of a queue{_suggest_setting(key, lists_settings)}"
    if details["type"] == "missing":
        return f"{key} is missing"
    model: type[BaseModel] | None = QueueConfig
    metadata: list[object] = []
    for part in location:
        field = model.model_fields.get(part) if model is not None else None
        if field is None:
            break
        metadata = field.metadata
        kind = field.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return f"{key} {describe_rule(error, metadata)}"  # type: ignore[arg-type]

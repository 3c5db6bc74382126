"""What can be set, in which range, and what it is when nobody sets it.

The models are plain facts: where values come from (flags, environment, file) is `config_sources`, what they lead to is
`app`. Nothing here is read while messages flow: rooms copy what they need when they are built.
"""

from __future__ import annotations

from ipaddress import ip_network
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from sluice.access.settings import AuthSettings
from sluice.broker.net.origins import origin_error
from sluice.cluster.settings import ClusterSettings
from sluice.config_types import ConfigSection, Seconds, duration_between, number_between
from sluice.process.memory_watermark import parse_memory_limit
from sluice.units import Address, parse_address, parse_duration
from sluice.wire.topics import topic_filter_error

SESSION_NEVER_EXPIRES: Final = (
    0xFFFFFFFF  # the session expiry interval that does not expire (MQTT 5.0 section 3.1.2.11.2)
)
MAX_PACKET_BYTES: Final = (
    268_435_460  # the largest remaining length, and its fixed header (section 2.1.4)
)


def _parse_listener_address(value: object) -> object:
    """The word `off` closes a listener that a default or a lower source has opened."""
    if not isinstance(value, str):
        return value
    return None if value == "off" else parse_address(value)


def _parse_session_expiry(value: object) -> int:
    """MQTT counts session expiry in whole seconds, so a part of one rounds up: never less than was asked for."""
    if value == "never":
        return SESSION_NEVER_EXPIRES
    try:
        return ceil(parse_duration(value))
    except ValueError as fault:
        raise ValueError(f'{fault}, or "never"') from None


def _check_file_exists(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not a file that exists; give the path of a PEM file")
    return path


def _check_store_url(value: str) -> str:
    if value not in ("embedded", "memory") and not value.startswith(("redis://", "rediss://")):
        raise ValueError("must be embedded, memory, redis://HOST:PORT or rediss://HOST:PORT")
    return value


def _check_key_prefix(value: str) -> str:
    if not value or not value.isprintable() or any(sign in value for sign in "{} "):
        raise ValueError("must be a word without braces, with which all keys begin")
    return value


def _check_topic_filter(value: str) -> str:
    fault = topic_filter_error(value.encode(), 65535)
    if fault:
        raise ValueError(f"holds {value!r}: {fault}")
    return value


def _check_origin(value: str) -> str:
    fault = origin_error(value)
    if fault:
        raise ValueError(f"holds {value!r}: {fault}")
    return value


def _check_host_or_network(value: str) -> str:
    try:
        ip_network(value, strict=False)
    except ValueError:
        parts = value.rstrip(".").split(".")
        if not all(part.replace("-", "").replace("_", "").isalnum() for part in parts):
            raise ValueError(
                f"holds {value!r}; write a network such as 10.0.0.0/8, an address, or a host name"
            ) from None
    return value


ListenerAddress = Annotated[Address | None, BeforeValidator(_parse_listener_address)]
PemFile = Annotated[Path, AfterValidator(_check_file_exists)]


class ListenSettings(ConfigSection):
    """The doors for MQTT clients; None is a door that is not opened."""

    mqtt: ListenerAddress = Address("127.0.0.1", 1883)
    mqtts: ListenerAddress = None
    ws: ListenerAddress = None
    wss: ListenerAddress = None


class TlsSettings(ConfigSection):
    """Who we are on mqtts, wss and the admin doors, and whose certificates an MQTT client may show."""

    cert: PemFile | None = None
    key: PemFile | None = None
    client_ca: PemFile | None = None  # given: a client must present a certificate that it signed
    http: bool = False  # REST and console over HTTPS, with the same certificate
    grpc: bool = False  # gRPC over TLS, likewise


class LogSettings(ConfigSection):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class QueueTemplate(ConfigSection):
    """What queues get that come into being under a matching name; the first match counts."""

    match: Annotated[str, AfterValidator(_check_topic_filter)]
    config: dict[str, object] = {}


class QueueSettings(ConfigSection):
    enabled: bool = True  # False makes $queue/... an ordinary topic
    templates: list[QueueTemplate] = []
    max_partitions: Annotated[int, number_between(1, 10_000_000)] = (
        200_000  # of all queues together
    )
    cache_bytes: Annotated[int, number_between(0)] = (
        16_777_216  # bodies of young messages kept in memory, all queues together
    )


class DiskSettings(ConfigSection):
    """The disk of the embedded store."""

    min_free: Annotated[int, number_between(0)] = (
        67_108_864  # fewer bytes left: publishers are refused; 0: never
    )


def _number_to_text(value: object) -> object:
    return str(value) if type(value) is int else value


def _check_memory_size(value: str) -> str:
    parse_memory_limit(value, lambda: 1 << 40)  # raises where it stands for nothing
    return value


class LimitSettings(ConfigSection):
    """Limits of the whole process."""

    # A share of the memory of the container or the machine, a size, or "off".
    memory: Annotated[str, BeforeValidator(_number_to_text), AfterValidator(_check_memory_size)] = (
        "80%"
    )


class EcqSettings(ConfigSection):
    """Exclusive compacted queues, all of them alike."""

    retention: Annotated[Seconds, duration_between(0, 100 * 365 * 86400)] = (
        604_800.0  # older values are removed; 0: none is
    )
    sweep_interval: Annotated[Seconds, duration_between(1, 86400)] = (
        60.0  # how often they are looked for
    )
    check_interval: Annotated[Seconds, duration_between(1, 86400)] = (
        30.0  # how often a missed subscribe is looked for
    )
    max_message_size: Annotated[int, number_between(1, 268_435_455)] = 1_048_576
    max_keys: Annotated[int, number_between(1, 500_000)] = 100_000  # of one owner
    durability: Literal["sync", "interval"] = "sync"


class BulkSettings(ConfigSection):
    """The door for programs that read and write in bulk, part of REST."""

    max_batch_bytes: Annotated[int, number_between(1024, 1 << 31)] = (
        33_554_432  # of one commit, sent and unpacked
    )
    max_batch_rows: Annotated[int, number_between(1, 100_000_000)] = 1_000_000  # of one commit
    max_stage_bytes: Annotated[int, number_between(1024)] = (
        1_073_741_824  # of all batches that wait for their commit
    )
    stage_ttl: Annotated[Seconds, duration_between(1, 30 * 86400)] = 3600.0  # how long one waits


class RedisSettings(ConfigSection):
    """The store in Redis; where it is stands in `store`."""

    prefix: Annotated[str, AfterValidator(_check_key_prefix)] = "sluice"
    lease: Annotated[Seconds, duration_between(0.1, 3600)] = (
        15.0  # unrenewed for so long, another broker may take it
    )
    renew: Annotated[Seconds, duration_between(0.02, 1200)] = 3.0
    answer_timeout: Annotated[Seconds, duration_between(0.1, 600)] = (
        5.0  # then the connection is made anew
    )
    wait: Annotated[Seconds, duration_between(0, 3600)] = (
        10.0  # for a Redis that takes no writes; then publishers are refused
    )
    poll: Annotated[Seconds, duration_between(0.01, 3600)] = (
        0.5  # between looks at deliveries, for the pending lists
    )
    batch: Annotated[int, number_between(1, 1000)] = 32  # deliveries that one command adds to them
    pending_scan: Annotated[Seconds, duration_between(0.1, 86400)] = (
        30.0  # between looks for those that nobody has
    )
    claim_idle: Annotated[Seconds, duration_between(1, 86400)] = 300.0  # after so long
    claim_batch: Annotated[int, number_between(1, 10_000)] = (
        100  # and how many one command takes back
    )
    mover_interval: Annotated[Seconds, duration_between(0.01, 3600)] = (
        1.0  # between looks for retries that are due
    )
    mover_batch: Annotated[int, number_between(1, 10_000)] = 100  # and how many one script moves
    partitions: Annotated[int, number_between(1, 4096)] = (
        10  # of a queue whose configuration does not say how many
    )
    max_length: Annotated[int, number_between(0, 2**53)] = 0  # of one stream; 0: as its queue says
    standby: bool = False  # wait for a store that has an owner, however long, instead of giving up
    rebalance: Annotated[Seconds, duration_between(0.1, 3600)] = (
        5.0  # between looks whether it is free
    )


class WebhookSettings(ConfigSection):
    """Where alerts may go besides public addresses."""

    allow: list[
        Annotated[str, AfterValidator(_check_host_or_network)]
    ] = []  # networks, addresses and host names


class MqttSettings(ConfigSection):
    """The limits of one client, and of all of them together."""

    max_packet_size: Annotated[int, number_between(64, MAX_PACKET_BYTES)] = 2_097_152
    receive_maximum: Annotated[int, number_between(1, 65535)] = (
        1024  # unsettled QoS 1 and 2 publishes from one client
    )
    max_inflight: Annotated[int, number_between(1, 65535)] = (
        1024  # the same towards it; its own Receive Maximum may be less
    )
    topic_alias_maximum: Annotated[int, number_between(0, 65535)] = (
        64  # each way; 0 switches aliases off
    )
    max_keep_alive: Annotated[int, number_between(0, 65535)] = (
        0  # seconds; 0 grants whatever the client asks
    )
    connect_timeout: Annotated[Seconds, duration_between(0.01, 3600)] = (
        10.0  # from accept to a complete CONNECT
    )
    max_session_expiry: Annotated[
        int, BeforeValidator(_parse_session_expiry), duration_between(0, SESSION_NEVER_EXPIRES)
    ] = SESSION_NEVER_EXPIRES
    max_queued_messages: Annotated[int, number_between(1)] = (
        10_000  # waiting for one client that is away or slow
    )
    max_queued_bytes: Annotated[int, number_between(1)] = 67_108_864
    max_subscriptions: Annotated[int, number_between(1)] = 10_000  # of one client
    max_subscription_bytes: Annotated[int, number_between(1)] = (
        67_108_864  # filters and levels of one client
    )
    max_connections: Annotated[int, number_between(0)] = 0  # 0: as many as the system gives
    max_connections_per_address: Annotated[int, number_between(0)] = 0
    max_connections_per_user: Annotated[int, number_between(0)] = 0
    max_publish_rate: Annotated[float, number_between(0)] = (
        0.0  # messages of one client per second; 0: any
    )
    max_publish_byte_rate: Annotated[float, number_between(0)] = 0.0  # bytes of payload, likewise
    max_retained: Annotated[int, number_between(0)] = 1_000_000
    max_retained_bytes: Annotated[int, number_between(0)] = (
        268_435_456  # topics with levels, properties and payloads
    )
    max_topic_levels: Annotated[int, number_between(1, 512)] = (
        128  # routing descends them one call deep each
    )
    write_buffer_high: Annotated[int, number_between(1024, 1 << 30)] = (
        1_048_576  # bytes unsent before a client counts as slow
    )
    sys_interval: Annotated[Seconds, duration_between(0, 86400)] = (
        10.0  # between updates of $SYS; 0 switches it off
    )
    refused_filters: list[
        Annotated[str, AfterValidator(_check_topic_filter)]
    ] = []  # nobody may subscribe to these
    wildcard_subscriptions: bool = True
    shared_subscriptions: bool = True
    retain_available: bool = True
    max_qos: Annotated[int, number_between(0, 2)] = 2
    ws_origins: list[
        Annotated[str, AfterValidator(_check_origin)]
    ] = []  # web pages that may open a WebSocket


class Settings(ConfigSection):
    """Everything `sluice serve` can be told."""

    data: Path = Path("sluice-data")
    salvage: bool = False
    store: Annotated[str, AfterValidator(_check_store_url)] = "embedded"
    http: ListenerAddress = Address("127.0.0.1", 8080)
    grpc: ListenerAddress = Address("127.0.0.1", 9090)
    listen: ListenSettings = ListenSettings()
    tls: TlsSettings = TlsSettings()
    log: LogSettings = LogSettings()
    queues: QueueSettings = QueueSettings()
    disk: DiskSettings = DiskSettings()
    limits: LimitSettings = LimitSettings()
    ecq: EcqSettings = EcqSettings()
    bulk: BulkSettings = BulkSettings()
    redis: RedisSettings = RedisSettings()
    cluster: ClusterSettings = ClusterSettings()
    auth: AuthSettings = AuthSettings()
    webhooks: WebhookSettings = WebhookSettings()
    mqtt: MqttSettings = MqttSettings()

    @model_validator(mode="after")
    def _check_lease_renewal(self) -> Settings:
        if self.redis.renew * 3 > self.redis.lease:
            raise ValueError(
                "redis.renew is more than a third of redis.lease, which would lapse too easily"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_store(self) -> Settings:
        if self.cluster.coordinator != "off" and self.store in ("embedded", "memory"):
            raise ValueError(
                f"cluster.coordinator = {self.cluster.coordinator} needs a store that all nodes share; "
                "set store = redis://HOST:PORT"
            )
        return self

    @model_validator(mode="after")
    def _check_tls_files(self) -> Settings:
        """A secure listener without a certificate would only fail at the first client's handshake."""
        if (self.tls.cert is None) != (self.tls.key is None):
            raise ValueError(
                "tls.cert and tls.key belong together; give both (--tls-cert, --tls-key) or neither"
            )
        if (self.listen.mqtts or self.listen.wss) and self.tls.cert is None:
            raise ValueError(
                "listen.mqtts and listen.wss need a certificate; give tls.cert and tls.key as well"
            )
        if (self.tls.http or self.tls.grpc) and self.tls.cert is None:
            raise ValueError(
                "tls.http and tls.grpc need a certificate; give tls.cert and tls.key as well"
            )
        return self

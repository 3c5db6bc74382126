"""The settings of the server with their ranges and defaults.

This module does not know where values come from (flags, environment, file: `config/sources.py`) nor
what they do (`app.py`). No setting is read on the message path: components copy what they need when
they are built.
"""

from __future__ import annotations

from ipaddress import ip_network
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, model_validator

from sluice.access.settings import AuthSettings
from sluice.broker.net import origin_error
from sluice.cluster.settings import ClusterSettings
from sluice.config.setting_types import ConfigSection, Seconds, duration_between, number_between
from sluice.process.memory_watermark import parse_memory_limit
from sluice.processes.cell_directory import MAX_CELLS
from sluice.units import Address, parse_address, parse_duration
from sluice.wire.topics import topic_filter_error

# The session expiry interval that never expires (MQTT 5.0 section 3.1.2.11.2).
SESSION_NEVER_EXPIRES: Final = 0xFFFFFFFF
# The largest remaining length plus its fixed header (section 2.1.4).
MAX_PACKET_BYTES: Final = 268_435_460


def _parse_listener_address(value: object) -> object:
    """Parse an address; `off` closes a listener that a default or a lower source has opened."""
    if not isinstance(value, str):
        return value
    return None if value == "off" else parse_address(value)


def _parse_session_expiry(value: object) -> int:
    """Parse a session expiry; MQTT counts whole seconds, so a fraction is rounded up."""
    if value == "never":
        return SESSION_NEVER_EXPIRES
    try:
        return ceil(parse_duration(value))
    except ValueError as fault:
        raise ValueError(f'{fault}, or "never"') from None


def _parse_process_count(value: object) -> object:
    return 0 if value == "auto" else value


def _check_file_exists(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not an existing file; give the path of a PEM file")
    return path


def _check_store_url(value: str) -> str:
    if value in ("embedded", "memory") or value.startswith(("redis://", "rediss://")):
        return value
    if not value.startswith(("redis+sentinel://", "rediss+sentinel://")):
        raise ValueError(
            "must be embedded, memory, redis://HOST:PORT, rediss://HOST:PORT, or "
            "redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
        )
    if not urlsplit(value).path.strip("/"):
        raise ValueError(
            "has no name of the master; write redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
        )
    return value


def _check_key_prefix(value: str) -> str:
    if not value or not value.isprintable() or any(sign in value for sign in "{} "):
        raise ValueError("must be a prefix for keys without braces")
    return value


def _check_topic_filter(value: str) -> str:
    fault = topic_filter_error(value.encode(), 65535)
    if fault:
        raise ValueError(f"contains {value!r}: {fault}")
    return value


def _check_origin(value: str) -> str:
    fault = origin_error(value)
    if fault:
        raise ValueError(f"contains {value!r}: {fault}")
    return value


def _check_host_or_network(value: str) -> str:
    try:
        ip_network(value, strict=False)
    except ValueError:
        parts = value.rstrip(".").split(".")
        if not all(part.replace("-", "").replace("_", "").isalnum() for part in parts):
            raise ValueError(
                f"contains {value!r}; write a network such as 10.0.0.0/8, an address, or a host "
                "name"
            ) from None
    return value


ListenerAddress = Annotated[Address | None, BeforeValidator(_parse_listener_address)]
PemFile = Annotated[Path, AfterValidator(_check_file_exists)]


class ListenSettings(ConfigSection):
    """The listeners for MQTT clients; None is off."""

    mqtt: ListenerAddress = Address("127.0.0.1", 1883)
    mqtts: ListenerAddress = None
    ws: ListenerAddress = None
    wss: ListenerAddress = None


class TlsSettings(ConfigSection):
    """The certificate of mqtts, wss and the admin APIs, and the CA of client certificates."""

    cert: PemFile | None = None
    key: PemFile | None = None
    client_ca: PemFile | None = None  # if set, clients must present a certificate that it signed
    http: bool = False  # REST and console over HTTPS, with the same certificate
    grpc: bool = False  # gRPC over TLS, with the same certificate


class LogSettings(ConfigSection):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class QueueTemplate(ConfigSection):
    """The configuration of new queues with a matching name; the first match applies."""

    match: Annotated[str, AfterValidator(_check_topic_filter)]
    name: str = ""  # by which the key `template` of a new queue selects it
    auto_create: bool | None = None  # None: as `queues.auto_create`
    config: dict[str, object] = {}


class QueueSettings(ConfigSection):
    enabled: bool = True  # False makes $queue/... an ordinary topic
    auto_create: bool = True  # a publish or a subscription creates a missing queue
    templates: list[QueueTemplate] = []
    # of all queues
    max_partitions: Annotated[int, number_between(1, 10_000_000)] = 200_000
    max_schedules: Annotated[int, number_between(1, 100_000)] = 1000
    min_schedule_interval: Annotated[Seconds, duration_between(0.001, 86_400)] = 1.0
    # bodies of recent messages in memory, of all queues
    cache_bytes: Annotated[int, number_between(0)] = 16_777_216
    # acknowledgements of each queue that are remembered; 0: none
    recent_acks: Annotated[int, number_between(0, 1_000_000)] = 1000


class DiskSettings(ConfigSection):
    """The disk of the embedded store."""

    # free bytes below which publishers are refused; 0: never
    min_free: Annotated[int, number_between(0)] = 67_108_864


def _number_to_text(value: object) -> object:
    return str(value) if type(value) is int else value


def _check_memory_size(value: str) -> str:
    parse_memory_limit(value, lambda: 1 << 40)  # raises ValueError for an invalid value
    return value


class LimitSettings(ConfigSection):
    """Limits of the whole process."""

    # A share of the memory of the container or the machine, a size, or "off".
    memory: Annotated[str, BeforeValidator(_number_to_text), AfterValidator(_check_memory_size)] = (
        "80%"
    )
    # groups without consumers are deleted after this time; 0: never
    group_expiry: Annotated[Seconds, duration_between(0, 100 * 365 * 86400)] = 0.0


class ProcessSettings(ConfigSection):
    """The processes of this node, with the embedded store."""

    # 0 or "auto": one per core, at most one per cell
    count: Annotated[int, BeforeValidator(_parse_process_count), number_between(0, MAX_CELLS)] = 1
    # fixed when the data directory is created; 0: by the number of cores
    cells: Annotated[int, number_between(0, MAX_CELLS)] = 0


class EcqSettings(ConfigSection):
    """Exclusive queues ($ECQ), all with the same settings."""

    # older values are deleted; 0: never
    retention: Annotated[Seconds, duration_between(0, 100 * 365 * 86400)] = 604_800.0
    # interval of deletions
    sweep_interval: Annotated[Seconds, duration_between(1, 86400)] = 60.0
    # interval of checks for missed subscriptions
    check_interval: Annotated[Seconds, duration_between(1, 86400)] = 30.0
    max_message_size: Annotated[int, number_between(1, 268_435_455)] = 1_048_576
    max_keys: Annotated[int, number_between(1, 500_000)] = 100_000  # of one owner
    durability: Literal["sync", "interval"] = "sync"


class BulkSettings(ConfigSection):
    """The bulk API for programs, part of REST."""

    # of one commit, sent and uncompressed
    max_batch_bytes: Annotated[int, number_between(1024, 1 << 31)] = 33_554_432
    max_batch_rows: Annotated[int, number_between(1, 100_000_000)] = 1_000_000  # of one commit
    # of all batches that wait for their commit
    max_stage_bytes: Annotated[int, number_between(1024)] = 1_073_741_824
    stage_ttl: Annotated[Seconds, duration_between(1, 30 * 86400)] = 3600.0  # maximum wait


class RedisSettings(ConfigSection):
    """The Redis store; its address is in `store`."""

    prefix: Annotated[str, AfterValidator(_check_key_prefix)] = "sluice"
    # after this time without renewal another broker may take the store
    lease: Annotated[Seconds, duration_between(0.1, 3600)] = 15.0
    renew: Annotated[Seconds, duration_between(0.02, 1200)] = 3.0
    # reconnect after this time without an answer
    answer_timeout: Annotated[Seconds, duration_between(0.1, 600)] = 5.0
    # wait this long for a Redis that accepts no writes, then refuse publishers
    wait: Annotated[Seconds, duration_between(0, 3600)] = 10.0
    # acknowledge what this many replicas have
    min_replicas: Annotated[int, number_between(0, 100)] = 0
    # where they must have it; on disk: the master too
    replica_ack: Literal["memory", "disk"] = "memory"
    # maximum wait of one commit for them before it is tried again
    replica_timeout: Annotated[Seconds, duration_between(0.01, 600)] = 2.0
    # interval of updates of the pending lists
    poll: Annotated[Seconds, duration_between(0.01, 3600)] = 0.5
    batch: Annotated[int, number_between(1, 1000)] = 32  # deliveries claimed by one command
    # interval of scans for pending deliveries without a consumer
    pending_scan: Annotated[Seconds, duration_between(0.1, 86400)] = 30.0
    claim_idle: Annotated[Seconds, duration_between(1, 86400)] = 300.0  # claim them after this time
    # deliveries claimed back by one command
    claim_batch: Annotated[int, number_between(1, 10_000)] = 100
    # interval of moves of due retries
    mover_interval: Annotated[Seconds, duration_between(0.01, 3600)] = 1.0
    mover_batch: Annotated[int, number_between(1, 10_000)] = 100  # retries moved by one script
    # of a queue whose configuration has no number
    partitions: Annotated[int, number_between(1, 4096)] = 10
    max_length: Annotated[int, number_between(0, 2**53)] = 0  # of one stream; 0: limit of the queue
    standby: bool = False  # wait for a store that has an owner instead of failing
    # interval of checks in standby
    rebalance: Annotated[Seconds, duration_between(0.1, 3600)] = 5.0


class WebhookSettings(ConfigSection):
    """Addresses that alerts may use besides public ones."""

    # networks, addresses and host names
    allow: list[Annotated[str, AfterValidator(_check_host_or_network)]] = []


class MqttSettings(ConfigSection):
    """The limits of one client, and of all clients."""

    max_packet_size: Annotated[int, number_between(64, MAX_PACKET_BYTES)] = 2_097_152
    # unacknowledged QoS 1 and 2 publishes from one client
    receive_maximum: Annotated[int, number_between(1, 65535)] = 1024
    # the same to one client; its own Receive Maximum may be less
    max_inflight: Annotated[int, number_between(1, 65535)] = 1024
    # in each direction; 0: no aliases
    topic_alias_maximum: Annotated[int, number_between(0, 65535)] = 64
    # seconds; 0: no limit
    max_keep_alive: Annotated[int, number_between(0, 65535)] = 0
    # from accept to a complete CONNECT
    connect_timeout: Annotated[Seconds, duration_between(0.01, 3600)] = 10.0
    max_session_expiry: Annotated[
        int, BeforeValidator(_parse_session_expiry), duration_between(0, SESSION_NEVER_EXPIRES)
    ] = SESSION_NEVER_EXPIRES
    # pending for one client that is disconnected or slow
    max_queued_messages: Annotated[int, number_between(1)] = 10_000
    max_queued_bytes: Annotated[int, number_between(1)] = 67_108_864
    max_subscriptions: Annotated[int, number_between(1)] = 10_000  # of one client
    # filters and levels of one client
    max_subscription_bytes: Annotated[int, number_between(1)] = 67_108_864
    max_connections: Annotated[int, number_between(0)] = 0  # 0: as many as the system allows
    max_connections_per_address: Annotated[int, number_between(0)] = 0
    max_connections_per_user: Annotated[int, number_between(0)] = 0
    # messages per second of one client; 0: no limit
    max_publish_rate: Annotated[float, number_between(0)] = 0.0
    # bytes of payload; 0: no limit
    max_publish_byte_rate: Annotated[float, number_between(0)] = 0.0
    max_retained: Annotated[int, number_between(0)] = 1_000_000
    # topics with levels, properties and payloads
    max_retained_bytes: Annotated[int, number_between(0)] = 268_435_456
    # routing needs one recursive call per level
    max_topic_levels: Annotated[int, number_between(1, 512)] = 128
    # unsent bytes above which a client counts as slow
    write_buffer_high: Annotated[int, number_between(1024, 1 << 30)] = 1_048_576
    # between updates of $SYS; 0: off
    sys_interval: Annotated[Seconds, duration_between(0, 86400)] = 10.0
    # no client may subscribe to these
    refused_filters: list[Annotated[str, AfterValidator(_check_topic_filter)]] = []
    wildcard_subscriptions: bool = True
    shared_subscriptions: bool = True
    retain_available: bool = True
    max_qos: Annotated[int, number_between(0, 2)] = 2
    # web pages that may open a WebSocket
    ws_origins: list[Annotated[str, AfterValidator(_check_origin)]] = []


class Settings(ConfigSection):
    """All settings of `sluice serve`."""

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
    processes: ProcessSettings = ProcessSettings()
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
                "redis.renew is more than a third of redis.lease, which would expire too easily"
            )
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Settings:
        redis = self.redis
        if redis.min_replicas and self.store in ("embedded", "memory"):
            raise ValueError(
                f"redis.min_replicas = {redis.min_replicas} needs a store in Redis; "
                "set store = redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
            )
        if redis.replica_ack == "disk" and not redis.min_replicas:
            raise ValueError("redis.replica_ack = disk needs redis.min_replicas of at least 1")
        if redis.min_replicas and redis.replica_timeout >= redis.answer_timeout:
            raise ValueError(
                "redis.replica_timeout is not less than redis.answer_timeout: the broker would "
                "take a Redis that waits for its replicas for one that hangs"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_store(self) -> Settings:
        if self.cluster.coordinator != "off" and self.store in ("embedded", "memory"):
            raise ValueError(
                f"cluster.coordinator = {self.cluster.coordinator} needs a store that all nodes "
                "share; set store = redis://HOST:PORT"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Settings:
        """Refuse several processes where their cells would have no files."""
        processes = self.processes
        if processes.count == 1:
            return self
        count = processes.count or "auto"
        if self.store != "embedded":
            raise ValueError(
                f"processes.count = {count} needs the embedded store; with a store in "
                "Redis start several nodes of a cluster on this machine instead"
            )
        if self.cluster.coordinator != "off":
            raise ValueError(
                f"processes.count = {count} and cluster.coordinator = "
                f"{self.cluster.coordinator} are both given; give one of them"
            )
        if 0 < processes.cells < processes.count:
            raise ValueError(
                f"processes.cells = {processes.cells} is less than processes.count = "
                f"{count}; each process has at least one cell"
            )
        return self

    @model_validator(mode="after")
    def _check_tls_files(self) -> Settings:
        """Refuse a TLS listener without a certificate, which would fail at the first handshake."""
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

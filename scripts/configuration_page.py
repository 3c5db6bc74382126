"""Print docs/configuration.md.

Keys, ranges and defaults come from the models, descriptions from this file. A key without a
description, or a description without a key, is an error, so the page always matches the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from sluice.cluster.settings import LinkAddress
from sluice.config.setting_types import ValueRange
from sluice.config.settings import SESSION_NEVER_EXPIRES, Settings
from sluice.queues.service.queue_config import DEAD_LETTER_DEFAULTS, QueueConfig
from sluice.units import Address, format_duration

SERVER: dict[str, str] = {
    "data": "directory of the embedded store",
    "salvage": "`true`: open a damaged store without its lost records, and log them; for one "
    "start, see [operations.md](operations.md#a-damaged-store)",
    "store": "where messages are stored: `embedded` (on disk, below `data`), `memory` (nothing "
    "survives the process), or `redis://HOST:PORT`, with TLS `rediss://HOST:PORT`, with Sentinel "
    "`redis+sentinel://HOST:PORT,HOST:PORT/MASTER`; see "
    "[redis.md](redis.md)",
    "http": "REST, metrics, health and the console; see [rest.md](rest.md)",
    "grpc": "gRPC; see [grpc.md](grpc.md)",
    "listen.mqtt": "MQTT over TCP",
    "listen.mqtts": "MQTT over TLS",
    "listen.ws": "MQTT over WebSocket, at `/mqtt` and `/`",
    "listen.wss": "MQTT over secure WebSocket",
    "tls.cert": "certificate chain of `mqtts` and `wss`",
    "tls.key": "its private key, without a passphrase",
    "tls.client_ca": "if set, clients must present a certificate that this CA signed",
    "tls.http": "serve REST and console over HTTPS, with the same certificate",
    "tls.grpc": "serve gRPC over TLS, with the same certificate",
    "log.level": "lowest level that is logged, to stderr",
    "log.format": "lines for people, or one JSON object per line",
    "queues.enabled": "`false` makes `$queue/...` and `$admin/...` ordinary topics",
    "queues.auto_create": "`true`: the first publish or subscription creates a queue. `false`: it "
    "is refused with 0x90 (a subscription with 0x8F), and queues are created by an API; "
    "dead-letter queues are still created when needed. A template can decide otherwise",
    "queues.templates": "configuration of new queues with a matching name, see below",
    "disk.min_free": "bytes that must be free on the disk of `data`: with less, the broker "
    "refuses everything that it would have to store until there is space; `0`: no check. See "
    "[reliability.md](reliability.md)",
    "limits.memory": "the most memory that the broker uses, a share of the memory of its "
    "container or machine (`80%`) or a size (`2GiB`): above it, the broker refuses everything "
    "that it would have to store until it is 5 % below; `off`: no check. See "
    "[operations.md](operations.md#memory)",
    "processes.count": "how many processes run this node, on the embedded store: a number, or "
    "`auto` for one per core; see [processes.md](processes.md)",
    "processes.cells": "parts that queues and sessions are divided into, each with a log of its "
    "own; fixed when the data directory is created; 0: as many as cores, at most 8, at least one "
    "per process",
    "limits.group_expiry": "a group that has had no consumer for this long is deleted, with the "
    "messages that only it had not settled, and logged; `0s`: never. Groups that Spark reads are "
    "not deleted. After a restart the time starts again",
    "queues.max_partitions": "partitions of all queues together (in a cluster: of a cell); a "
    "queue that would exceed it is refused, except for dead letters",
    "queues.max_schedules": "[schedules](control.md#schedules) of all queues together (in a "
    "cluster: of a cell)",
    "queues.min_schedule_interval": "the least time between two ticks of a schedule",
    "queues.recent_acks": "acknowledgements of each queue that `sluice explain` knows, in memory "
    "(70 bytes each, at most 500,000 of all queues); 0 for none",
    "queues.cache_bytes": "cache of recent message bodies in memory, all queues together",
    "ecq.retention": "values of exclusive queues that are older are removed, see "
    "[compacted.md](compacted.md); `0s`: none is removed",
    "ecq.sweep_interval": "how often the broker looks for old values and frees disk space",
    "ecq.check_interval": "how often the broker looks for an owner that is subscribed and not "
    "served",
    "ecq.max_message_size": "bytes of a payload",
    "ecq.max_keys": "keys of one owner",
    "ecq.durability": "`sync`: acknowledged when on disk. `interval`: when written, synced within "
    "200 ms",
    "bulk.max_batch_bytes": "largest batch that one commit accepts, as sent and uncompressed; see "
    "[bulk.md](bulk.md)",
    "bulk.max_batch_rows": "most rows of a batch: a row takes some 200 bytes of memory, "
    "regardless of its size",
    "bulk.max_stage_bytes": "stages that wait for their commit, all together",
    "bulk.stage_ttl": "how long a stage waits for its commit",
    "redis.prefix": "prefix of all keys: several brokers with separate stores may share one Redis",
    "redis.lease": "another broker may replace a broker that has not renewed its ownership for "
    "this long",
    "redis.renew": "how often the broker renews its ownership",
    "redis.answer_timeout": "if Redis is silent for this long, the broker reconnects and repeats "
    "the request",
    "redis.wait": "how long publishers wait for a Redis that accepts no writes; then they are "
    "refused until it does",
    "redis.min_replicas": "acknowledge a message only when this many replicas have it; see "
    "[redis.md](redis.md#without-a-single-point-of-loss)",
    "redis.replica_ack": "`disk`: the replicas, and the master, must have it in their append-only "
    "file on disk (Redis 7.2, Valkey); `memory`: received is enough",
    "redis.replica_timeout": "how long one attempt waits for replicas; it is repeated, and after "
    "`redis.wait` publishers are refused",
    "redis.poll": "how far the pending lists in Redis may lag behind deliveries",
    "redis.batch": "deliveries that one command adds to a pending list",
    "redis.pending_scan": "interval of the search for pending deliveries without a consumer",
    "redis.claim_idle": "how long such a delivery must have been pending before the broker claims "
    "it",
    "redis.claim_batch": "how many deliveries one command claims",
    "redis.mover_interval": "interval of the search for retries that are due",
    "redis.mover_batch": "how many retries one script moves",
    "redis.partitions": "partitions of a new queue that does not specify them",
    "redis.max_length": "how many entries a stream may have; at that length the queue's "
    "`limits.overflow` applies; 0: no limit besides the queue's own",
    "redis.standby": "wait without a time limit for a store that has an owner, instead of giving "
    "up",
    "redis.rebalance": "how often a standby checks whether the store is free",
    "cluster.coordinator": "where nodes register: `etcd`, `redis` (the one in `store`), or `off`: "
    "a single node; see [cluster.md](cluster.md)",
    "cluster.name": "nodes with the same name at the same coordinator form one cluster",
    "cluster.node": "the name of this node, which stays the same across restarts; empty: host "
    "name and port of the link",
    "cluster.cells": "number of cells that queues and sessions are divided into, each with one "
    "owner; fixed for the cluster",
    "cluster.listen": "address of the link, for the other nodes",
    "cluster.advertise": "host under which the others reach this node; empty: where it listens",
    "cluster.advertise_link": "whole address of the link, if a port is mapped on the way",
    "cluster.secret": "secret that nodes prove to each other on every link, the same on all "
    "nodes; empty: the coordinator stores one that the first node creates. See "
    "[cluster.md](cluster.md#keeping-unknown-nodes-out)",
    "cluster.secret_file": "the file that contains the secret, instead of `cluster.secret`",
    "cluster.tls_cert": "certificate of this node; its subject alternative names contain the "
    "advertised host",
    "cluster.tls_key": "its private key, without a passphrase",
    "cluster.tls_ca": "CA that signed the certificates of the nodes; not the CA of `tls.client_ca`",
    "cluster.trusted_network": "`true`: the link may go beyond loopback without TLS",
    "cluster.etcd_endpoints": "members of etcd, HOST:PORT; one live member is enough to start",
    "cluster.etcd_lease_ttl": "a node that has not renewed its lease for this long is dead; "
    "applies to leases in Redis as well",
    "cluster.etcd_ca": "if set, TLS to etcd, whose certificates this CA signed",
    "cluster.etcd_cert": "client certificate for etcd",
    "cluster.etcd_key": "its private key",
    "cluster.heartbeat": "interval of heartbeats on the links",
    "cluster.silence": "a node that most others have received nothing from for this long is "
    "evicted before its lease ends",
    "cluster.partition_sync_timeout": "a node that has not loaded a cell of a dead node by then "
    "gives it to another node, if there is one that has not tried; see "
    "[cluster.md](cluster.md#when-something-fails)",
    "cluster.publish_timeout": "a publish, settlement or subscription that a cell has not "
    "answered by then is refused (0x83; the connection of an MQTT 3.1.1 client is closed)",
    "auth.allow_anonymous": "whether clients may connect without a user name: `true`, `false`, or "
    "(not set) on loopback only, as long as there are no users. Not set and a listener beyond "
    "loopback: the start is refused",
    "auth.users": "file of users, created by `sluice user add`; see [security.md](security.md)",
    "auth.tokens": "file of tokens for REST, gRPC and console, created by `sluice token add`",
    "auth.rules": "file of access rules; with it, everything that no rule allows is refused",
    "auth.certificate_user": "which part of a verified client certificate is the user name: "
    "`off`, `cn` or `san`",
    "auth.jwt.secret_file": "secret (32 bytes or more) for JWTs signed with HS256",
    "auth.jwt.key_file": "public keys for JWTs signed with RS256 or ES256: PEM, or a JWKS",
    "auth.jwt.issuer": "required `iss` of a JWT; empty: no check",
    "auth.jwt.audience": "required `aud` of a JWT, or one of its values; empty: no check",
    "auth.jwt.leeway": "by how much clocks may differ",
    "auth.jwt.user_claim": "claim with the user name",
    "auth.jwt.role_claim": "claim with the role: viewer, operator or admin",
    "auth.jwt.client_claim": "claim with the only client id that the token is valid for; empty: "
    "no check",
    "webhooks.allow": "networks, addresses and host names that alerts may go to, besides public "
    "addresses",
    "mqtt.ws_origins": "web pages that may open a WebSocket, such as `https://app.example.org`, "
    "besides those of this machine; `*`: all. Not set: all if clients need credentials, otherwise "
    "only pages of this machine; see [security.md](security.md#web-pages)",
    "mqtt.max_packet_size": "largest packet accepted from a client, in bytes",
    "mqtt.receive_maximum": "unacknowledged QoS 1 and 2 publishes of one client",
    "mqtt.max_inflight": "unacknowledged deliveries to one client; its own Receive Maximum may be "
    "less",
    "mqtt.topic_alias_maximum": "topic aliases, each way; 0 switches them off",
    "mqtt.max_keep_alive": "longest keep-alive in seconds that a 5.0 client gets; 0 grants any "
    "value",
    "mqtt.connect_timeout": "from accepting a connection to its complete CONNECT",
    "mqtt.max_session_expiry": "longest time that a session outlives its connection",
    "mqtt.max_queued_messages": "QoS 1 and 2 messages that wait for one offline or slow client; "
    "more are dropped and counted",
    "mqtt.max_queued_bytes": "the same in bytes",
    "mqtt.max_subscriptions": "subscriptions of one client",
    "mqtt.max_subscription_bytes": "memory of the plain and shared subscriptions of one client: "
    "400 bytes for each, the bytes of its filter, and 400 for each level of it",
    "mqtt.max_connections": "connected clients; 0: as many as the system allows",
    "mqtt.max_connections_per_address": "connections from one address; 0: any number",
    "mqtt.max_connections_per_user": "connections of one user; 0: any number",
    "mqtt.max_publish_rate": "messages of one client per second; the broker pauses reading from a "
    "faster client; 0: any",
    "mqtt.max_publish_byte_rate": "the same in bytes of payload",
    "mqtt.max_retained": "retained messages",
    "mqtt.max_retained_bytes": "bytes of all retained messages: topics, properties, payloads, and "
    "320 for each level of the tree of topics; in a cluster, of each cell",
    "mqtt.max_topic_levels": "levels of a filter, and of a topic that is retained; more are "
    "refused with 0x8F and 0x90",
    "mqtt.write_buffer_high": "unsent bytes from which on a client counts as slow and gets no "
    "more deliveries",
    "mqtt.sys_interval": "interval of updates of `$SYS/broker/...`; 0 switches them off",
    "mqtt.refused_filters": "filters that no client may subscribe to",
    "mqtt.wildcard_subscriptions": "whether `+` and `#` are offered",
    "mqtt.shared_subscriptions": "whether `$share/...` is offered",
    "mqtt.retain_available": "whether retained messages are offered",
    "mqtt.max_qos": "highest QoS offered",
}

QUEUE: dict[str, str] = {
    "name": "its name: levels without `+`, `#` and `$`, none of them empty, 1,024 bytes at most",
    "partitions": "how many consumers of a group can take messages with keys at once; messages "
    "without a key go to any consumer. Can be raised later, not lowered. `strict` always has 1",
    "ordering": "`none`: no order; `partition`: in order per key; `strict`: the whole queue in "
    "order, cannot be changed",
    "partition_strategy": "`hash`, or the name of an installed plug-in that chooses the partition "
    "of a key, see [queues.md](queues.md#partition-strategies). Cannot be changed",
    "type": "`work`: each group settles each message. `compacted`: the queue stores the last "
    "message of each key, see [compacted.md](compacted.md). Cannot be changed",
    "bindings": "plain topic filters whose messages the queue stores a copy of: "
    '`"sensors/+/temp"`, or `{"topic": "alarms/#", "headers": {"site": "north"}}` for messages '
    'with these user properties (with `"match": "any"`, any of them). `"$queue/<name>"` binds '
    "to another queue",
    "schema": "a JSON Schema; a publish whose payload does not match is refused",
    "retry_policy.max_retries": "a message with more failures is dead: `max_retries` + 1 attempts "
    "in all",
    "retry_policy.initial_backoff": "wait after the first failure",
    "retry_policy.max_backoff": "longest wait",
    "retry_policy.backoff_multiplier": "each further wait is this many times the one before",
    "retry_policy.total_timeout": "a failure this long after the first attempt makes the message "
    "dead",
    "retry_policy.jitter": "largest share of each wait that is subtracted at random",
    "dlq_config.enabled": "whether there is a dead-letter queue; without one, dead messages are "
    "logged and settled",
    "dlq_config.topic": "the dead-letter queue; not set: `dlq/<name>`",
    "dlq_config.invalid_topic": "queue for messages that consumers reject as `unacceptable`; not "
    "set: the dead-letter queue",
    "dlq_config.alert_webhook": "gets a POST (JSON) for each dead letter",
    "dlq_config.on_dead": "`hold-key`: after a message died, later ones of its key wait for its "
    "[repair](control.md#hold-a-key-for-repair)",
    "dlq_config.hold_timeout": "how long they wait at most; 0s: until the dead letter is put back "
    "or discarded",
    "limits.max_message_size": "largest payload in bytes",
    "limits.max_queue_depth": "messages that some group has not settled",
    "limits.message_ttl": "longest time to live of a message, from when it is due; its own expiry "
    "may come first; 0: no limit",
    "limits.retention": "above 0, messages are kept for this long after every group has settled "
    "them, for replay",
    "limits.overflow": "what a full queue does with one more message: refuse it, drop the oldest "
    "that is not in flight, or dead-letter the new one",
    "limits.on_expiry": "what happens to an expired message",
    "limits.dedup_window": "how long the broker remembers a publisher's `message-id`; 0 switches "
    "deduplication off",
    "limits.max_inflight": "deliveries of one group that may be in flight at once",
    "limits.max_rate": 'deliveries of one group over time: `"100/s"`, `"30/m"`, `"1000/h"`; with '
    'the number that may be delivered at once: `"100/s burst 20"` (default: those of one second)',
    "limits.max_inflight_per_key": "deliveries of one partition key that may be in flight at once "
    "in one group",
    "limits.max_rate_per_key": "deliveries of one partition key in one group over time, as in "
    "`limits.max_rate`",
    "breaker.failures": "failed deliveries in a row after which a group stops; 0: never",
    "breaker.window": "the failures in a row count if they are within this time",
    "breaker.open_for": "how long a group stops before one message is delivered as a probe",
    "performance.delivery_timeout": "from delivery to settlement; `$extend` restarts it",
    "performance.batch_size": "messages of one key that may be in flight at once; more than 1 "
    "gives up order across retries",
    "performance.prefetch": "unsettled deliveries of one consumer that sets no `prefetch` of its "
    "own",
    "performance.rebalance_after": "how long messages with a key wait for a consumer without "
    "capacity before their partition moves to a member of the group that has capacity",
    "performance.compression": "how payloads from 256 bytes on are stored",
    "performance.durability": "when a publish is acknowledged: after fdatasync, or after the "
    "write with an fdatasync within 200 ms",
}

HEAD = """# Configuration

`scripts/make-docs` generates this page from the models in `src/sluice/config/settings.py` and
`src/sluice/queues/service/queue_config.py` and the texts in `scripts/configuration_page.py`.

`sluice serve` needs no configuration. The first of these that has a setting decides:

1. a flag (`sluice serve --help`), for the settings that have one;
2. an environment variable: `SLUICE_` and the key in capitals, with two underscores for each dot.
   `mqtt.max_qos` is `SLUICE_MQTT__MAX_QOS`;
3. the TOML file named by `--config` or `SLUICE_CONFIG`;
4. the default below.

If a key is unknown or a value out of range, the broker does not start. The error names the key,
the source and the allowed range, and lists all faults at once.

Durations are a number and its unit: `"200ms"`, `"5s"`, `"5m"`, `"3h"`, `"7d"`, or several parts:
`"1m30s"`. A number without a unit is refused, except 0.
"""

EXAMPLE = """
## Templates

A new queue starts from the first template whose `match` covers its name, whether a publish, a
subscription, REST, gRPC or `$admin/queue/create` creates it. An API call overrides the template key
by key, and its key `template` selects a template by `name` instead.

| key of a template | meaning |
|---|---|
| `match` | topic filter over the name of the queue; required |
| `config` | a queue configuration without `name` |
| `name` | for the key `template`; optional |
| `auto_create` | overrides `queues.auto_create` for names that match; optional |

SIGHUP (`systemctl reload`) reads templates and `queues.auto_create` again. An error is logged, and
the former templates stay. Existing queues do not change; other settings need a restart.

```toml
data = "/var/lib/sluice"

[listen]
mqtt = "127.0.0.1:1883"
ws = "127.0.0.1:8083"

[mqtt]
max_packet_size = 4194304

[[queues.templates]]
match = "images/#"
name = "images"
config = { partitions = 32, performance = { delivery_timeout = "5m", prefetch = 1 } }
```
"""

QUEUE_HEAD = """
# Queue configuration

A queue's configuration is JSON on `$admin/queue/create` (with `name`) and
`$admin/queue/<queue>/config` (only the keys to change), and TOML in a template. Keys with a dot are
tables: `retry_policy.max_retries` is `{"retry_policy": {"max_retries": 3}}`. Changes apply at once.
An existing queue refuses fewer partitions, another `type` or `partition_strategy`, and a change of
`ordering` from or to `strict`.
"""

DEAD_LETTERS = """
## Dead-letter queues

A queue below `dlq/` has other defaults for these keys, so that its messages stay there:

| key | default |
|---|---|
"""


def main() -> None:
    print(page(), end="")


def page() -> str:
    parts = [HEAD, "\n# Server\n", *tables(Settings, SERVER, "top"), EXAMPLE, QUEUE_HEAD]
    parts += tables(QueueConfig, QUEUE, "queue")
    parts.append(DEAD_LETTERS)
    for section, changes in DEAD_LETTER_DEFAULTS.items():
        assert isinstance(changes, dict)
        parts += [
            f"| `{section}.{key}` | {str(value).lower()} |\n" for key, value in changes.items()
        ]
    return "".join(parts)


def tables(model: type[BaseModel], meanings: dict[str, str], top: str) -> Iterator[str]:
    """Yield one table for the keys at the top, then one for each section."""
    known = dict(leaves(model))
    if known.keys() != meanings.keys():
        odd = sorted(known.keys() ^ meanings.keys())
        raise SystemExit(f"keys and texts differ: {', '.join(odd)}; fix {Path(__file__).name}")
    for section in dict.fromkeys(key.rpartition(".")[0] for key in known):
        yield (
            f"\n## `[{section}]`\n\n" if section else "\n## Top level\n\n" if top == "top" else "\n"
        )
        yield "| key | allowed | default | meaning |\n|---|---|---|---|\n"
        for key, field in known.items():
            if key.rpartition(".")[0] == section:
                yield f"| `{key}` | {allowed(key, field)} | {default(field)} | {meanings[key]} |\n"


def leaves(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its full name, those without a section first."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            sections.append((f"{above}{name}.", kind))
        else:
            yield above + name.removesuffix("_"), field
    for name, kind in sections:
        yield from leaves(kind, name)


# The allowed values of keys whose type does not say it.
ALLOWED: dict[str, str] = {
    "data": "a directory",
    "store": "`embedded`, `memory`, or a Redis URL",
    "limits.memory": "a share (`80%`), a size (`2GiB`), or `off`",
    "cluster.secret": "16 characters or more",
    "name": "a queue name",
    "dlq_config.topic": "a queue name",
    "dlq_config.invalid_topic": "a queue name",
    "dlq_config.alert_webhook": "an http or https address",
}


def allowed(key: str, field: FieldInfo) -> str:
    if key in ALLOWED:
        return ALLOWED[key]
    between = range_of(field)
    if between is not None:
        return show_range(between)
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(field.annotation))
    kinds = [one for one in get_args(field.annotation) if one is not type(None)] or [
        field.annotation
    ]
    if field.annotation is Address or LinkAddress in kinds:
        return "HOST:PORT"
    if Address in kinds:
        return "HOST:PORT, or `off`; port 0: any free port"
    if bool in kinds:
        return "`true`, `false`"
    if get_origin(field.annotation) is list:
        return "a list"
    if get_origin(kinds[0]) is dict:
        return "an object"
    return "a file" if is_path(kinds[0]) else "text"


def is_path(kind: Any) -> bool:
    return kind is Path or Path in get_args(kind)


def range_of(field: FieldInfo) -> ValueRange | None:
    for check in field.metadata:
        if isinstance(check, AfterValidator) and isinstance(check.func, ValueRange):
            return check.func
    return None


def show_range(between: ValueRange) -> str:
    if between.high == SESSION_NEVER_EXPIRES:
        return "0s or more, or `never`"
    return str(between).removeprefix("from ")


def default(field: FieldInfo) -> str:
    value: Any = field.default
    between = range_of(field)
    if field.is_required():
        return "required"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if between is not None and value == SESSION_NEVER_EXPIRES:
        return "never"
    if between is not None and between.format_value is format_duration:
        return format_duration(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


if __name__ == "__main__":
    main()

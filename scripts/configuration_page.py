"""Prints docs/configuration.md. Keys, ranges and defaults come from the models; what a key is for stands here.

A key without a sentence, or a sentence without a key, is refused: the page cannot fall behind the models unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from sluice.cluster.settings import LinkAddress
from sluice.config.settings import NEVER, Settings
from sluice.config_types import Between
from sluice.queues.config import DEAD_LETTER_DEFAULTS, QueueConfig
from sluice.units import Address, show_duration

SERVER: dict[str, str] = {
    "data": "directory of the embedded store",
    "salvage": "`true`: open a damaged store without what is lost, and log what that is; for one start, see "
    "[operations.md](operations.md#a-damaged-store)",
    "store": "where messages are kept: `embedded` (on disk, below `data`), `memory` (nothing survives the process), or "
    "`redis://HOST:PORT`, with TLS `rediss://HOST:PORT`; see [redis.md](redis.md)",
    "http": "REST, metrics, health and the console; see [rest.md](rest.md)",
    "grpc": "gRPC; see [grpc.md](grpc.md)",
    "listen.mqtt": "MQTT over TCP",
    "listen.mqtts": "MQTT over TLS",
    "listen.ws": "MQTT over WebSocket, at `/mqtt` and `/`",
    "listen.wss": "MQTT over secure WebSocket",
    "tls.cert": "certificate chain of `mqtts` and `wss`",
    "tls.key": "its private key, without a pass phrase",
    "tls.client_ca": "given: clients must show a certificate that this CA signed",
    "tls.http": "serve REST and console over HTTPS, with the same certificate",
    "tls.grpc": "serve gRPC over TLS, with the same certificate",
    "log.level": "what is logged, to stderr",
    "log.format": "lines for people, or one JSON object per line",
    "queues.enabled": "`false` makes `$queue/...` and `$admin/...` ordinary topics",
    "queues.templates": "configuration of queues that come into being under a matching name, see below",
    "disk.min_free": "bytes that must be free on the disk of `data`: with less, what would have to be kept is refused "
    "until there is room; `0`: never looked at. See [reliability.md](reliability.md)",
    "limits.memory": "the most memory that the broker uses, a share of what its container or machine has (`80%`) or a "
    "size (`2GiB`): above it, what would have to be kept is refused until it is 5 % below; `off`: never looked at. See "
    "[operations.md](operations.md#memory)",
    "queues.max_partitions": "partitions of all queues together (in a cluster: of a cell); a queue that would exceed "
    "it is refused, except for dead letters",
    "queues.cache_bytes": "bodies of young messages kept in memory, all queues together",
    "ecq.retention": "older values of exclusive queues are removed, see [compacted.md](compacted.md); `0s`: none is",
    "ecq.sweep_interval": "how often they are looked for, and room on disk is made",
    "ecq.check_interval": "how often an owner is looked for that is subscribed and not served",
    "ecq.max_message_size": "bytes of a payload",
    "ecq.max_keys": "of one owner",
    "ecq.durability": "`sync`: answered when on disk. `interval`: when written, synced within 200 ms",
    "bulk.max_batch_bytes": "largest batch that is committed at once, as sent and unpacked; see [bulk.md](bulk.md)",
    "bulk.max_batch_rows": "most rows of a batch: a row takes some 200 bytes of memory, however small it is",
    "bulk.max_stage_bytes": "batches that wait for their commit, all together",
    "bulk.stage_ttl": "how long one waits",
    "redis.prefix": "what all keys begin with: brokers with a store each may share one Redis",
    "redis.lease": "a broker that has not renewed its ownership for so long may be replaced by another",
    "redis.renew": "how often ownership is renewed",
    "redis.answer_timeout": "a Redis that is silent for so long is connected to anew, and asked again",
    "redis.wait": "how long publishers wait for a Redis that takes no writes; then they are refused until it does",
    "redis.poll": "how far the pending lists in Redis may be behind deliveries",
    "redis.batch": "deliveries that one command adds to a pending list",
    "redis.pending_scan": "between looks for pending deliveries that nobody has",
    "redis.claim_idle": "how long such a one must have been pending to be taken back",
    "redis.claim_batch": "how many one command takes back",
    "redis.mover_interval": "between looks for retries that are due",
    "redis.mover_batch": "how many one script moves",
    "redis.partitions": "how many partitions a new queue gets that does not say",
    "redis.max_length": "how many entries a stream may have; at that length its queue's `limits.overflow` counts; 0: "
    "no limit besides the queue's own",
    "redis.standby": "wait for a store that has an owner, however long, instead of giving up",
    "redis.rebalance": "how often one that stands by looks whether the store is free",
    "cluster.coordinator": "where nodes meet: `etcd`, `redis` (the one in `store`), or `off`: this node is alone; see "
    "[cluster.md](cluster.md)",
    "cluster.name": "nodes with the same one, at the same coordinator, are one cluster",
    "cluster.node": "this node's name, which outlives a restart; empty: host name and port of the link",
    "cluster.cells": "into how many parts queues and sessions fall, each with one owner; for the life of the cluster",
    "cluster.listen": "for the other nodes",
    "cluster.advertise": "host under which the others reach this node; empty: where it listens",
    "cluster.advertise_link": "whole address of the link, where a port is mapped on the way",
    "cluster.secret": "what nodes prove to each other on every link, the same on all of them; empty: the coordinator "
    "holds one that the first node makes. See [cluster.md](cluster.md#keeping-strangers-out)",
    "cluster.secret_file": "the file that holds it, instead of `cluster.secret`",
    "cluster.tls_cert": "certificate of this node; its subject alternative names have the advertised host",
    "cluster.tls_key": "its private key, without a pass phrase",
    "cluster.tls_ca": "who signed the certificates of the nodes; not the CA of `tls.client_ca`",
    "cluster.trusted_network": "`true`: the link may go beyond loopback without TLS",
    "cluster.etcd_endpoints": "members of etcd, HOST:PORT; one that lives is enough to begin",
    "cluster.etcd_lease_ttl": "a node that is not heard of for so long is dead; of leases in Redis as well",
    "cluster.etcd_ca": "given: TLS to etcd, whose certificates this CA signed",
    "cluster.etcd_cert": "certificate that etcd may ask for",
    "cluster.etcd_key": "its private key",
    "cluster.heartbeat": "between signs of life on the links",
    "cluster.silence": "a node that most others have not heard for so long is put out, before its lease ends",
    "cluster.publish_timeout": "a publish, settlement or subscription that a cell has not answered by "
    "then is refused (0x83; the connection of an MQTT 3.1.1 client is closed)",
    "auth.allow_anonymous": "who may connect without a name: everybody, nobody, or (not set) everybody on loopback, "
    "as long as there are no users. Not set and a listener beyond loopback: the start is refused",
    "auth.users": "file of users, made by `sluice user add`; see [security.md](security.md)",
    "auth.tokens": "file of tokens for REST, gRPC and console, made by `sluice token add`",
    "auth.rules": "file of access rules; with it, what no rule allows is refused",
    "auth.certificate_user": "what of a verified client certificate is the user name: `off`, `cn` or `san`",
    "auth.jwt.secret_file": "secret (32 bytes or more) of those who sign JWTs with HS256",
    "auth.jwt.key_file": "public keys of those who sign JWTs with RS256 or ES256: PEM, or a JWKS",
    "auth.jwt.issuer": "what `iss` of a JWT must be; empty: not looked at",
    "auth.jwt.audience": "what `aud` of a JWT must be or hold; empty: not looked at",
    "auth.jwt.leeway": "by how much clocks may differ",
    "auth.jwt.user_claim": "claim with the user name",
    "auth.jwt.role_claim": "claim with the role: viewer, operator or admin",
    "auth.jwt.client_claim": "claim with the only client id that the token is for; empty: not looked at",
    "webhooks.allow": "networks, addresses and host names that alerts may go to, besides public addresses",
    "mqtt.ws_origins": "web pages that may open a WebSocket, such as `https://app.example.org`, besides those of this "
    "machine; `*`: all. Not set: all where clients need credentials, else only pages of this machine; see "
    "[security.md](security.md#web-pages)",
    "mqtt.max_packet_size": "largest packet taken from a client, in bytes",
    "mqtt.receive_maximum": "unanswered QoS 1 and 2 publishes of one client",
    "mqtt.max_inflight": "unacknowledged deliveries to one client; its own Receive Maximum may be less",
    "mqtt.topic_alias_maximum": "topic aliases, each way; 0 switches them off",
    "mqtt.max_keep_alive": "longest keep-alive in seconds that a 5.0 client gets; 0 grants what it asks for",
    "mqtt.connect_timeout": "from accepting a connection to its complete CONNECT",
    "mqtt.max_session_expiry": "longest that a session outlives its connection",
    "mqtt.max_queued_messages": "QoS 1 and 2 messages that wait for one client that is away or slow; "
    "more are dropped and counted",
    "mqtt.max_queued_bytes": "the same in bytes",
    "mqtt.max_subscriptions": "subscriptions of one client",
    "mqtt.max_subscription_bytes": "memory of the plain and shared subscriptions of one client: 400 bytes for "
    "each, the bytes of its filter, and 400 for each level of it",
    "mqtt.max_connections": "connected clients; 0: as many as the system gives",
    "mqtt.max_connections_per_address": "connections from one address; 0: any number",
    "mqtt.max_connections_per_user": "connections of one user; 0: any number",
    "mqtt.max_publish_rate": "messages of one client per second; who is faster is not read for a while; 0: any",
    "mqtt.max_publish_byte_rate": "the same in bytes of payload",
    "mqtt.max_retained": "retained messages",
    "mqtt.max_retained_bytes": "bytes of all retained messages: topics, properties, payloads, and 320 for "
    "each level of the tree of topics; in a cluster, "
    "of each cell",
    "mqtt.max_topic_levels": "levels of a filter, and of a topic that is retained; more are refused with "
    "0x8F and 0x90",
    "mqtt.write_buffer_high": "unsent bytes from which on a client counts as slow and gets no more deliveries",
    "mqtt.sys_interval": "between updates of `$SYS/broker/...`; 0 switches them off",
    "mqtt.refused_filters": "filters that nobody may subscribe to",
    "mqtt.wildcard_subscriptions": "whether `+` and `#` are offered",
    "mqtt.shared_subscriptions": "whether `$share/...` is offered",
    "mqtt.retain_available": "whether retained messages are offered",
    "mqtt.max_qos": "highest QoS offered",
}

QUEUE: dict[str, str] = {
    "name": "its name: levels without `+`, `#` and `$`, none of them empty, 1,024 bytes at most",
    "partitions": "how many consumers of a group can work in parallel; can be raised later, not lowered. "
    "`strict` always has 1",
    "ordering": "`none`: no order; `partition`: in order per key; `strict`: the whole queue in order, for life",
    "type": "`work`: each group settles each message. `compacted`: of each key the last message is kept, see "
    "[compacted.md](compacted.md). For life",
    "bindings": 'plain topic filters whose messages the queue keeps a copy of: `"sensors/+/temp"`, or '
    '`{"topic": "alarms/#", "headers": {"site": "north"}}` for those with these user properties',
    "schema": "a JSON Schema; a payload that does not fit is refused at publish",
    "retry_policy.max_retries": "failures after which a message is dead: `max_retries` + 1 attempts in all",
    "retry_policy.initial_backoff": "wait after the first failure",
    "retry_policy.max_backoff": "longest wait",
    "retry_policy.backoff_multiplier": "each further wait is this many times the one before",
    "retry_policy.total_timeout": "dead at a failure this long after the first attempt",
    "retry_policy.jitter": "share of each wait that is drawn by lot and taken off",
    "dlq_config.enabled": "whether there is a dead-letter queue; without one, dead messages are logged and settled",
    "dlq_config.topic": "the dead-letter queue; not set: `dlq/<name>`",
    "dlq_config.invalid_topic": "queue for what consumers reject as `unacceptable`; not set: the dead-letter queue",
    "dlq_config.alert_webhook": "gets a POST (JSON) for each dead letter",
    "limits.max_message_size": "largest payload in bytes",
    "limits.max_queue_depth": "messages that some group has still to settle",
    "limits.message_ttl": "longest life of a message, from when it is due; its own end may come before; 0 is for ever",
    "limits.retention": "above 0, messages are kept after every group has settled them, for replay",
    "limits.overflow": "what a full queue does with one more message: refuse it, drop the oldest that nobody works on, "
    "or dead-letter the new one",
    "limits.on_expiry": "what becomes of a message whose time has passed",
    "limits.dedup_window": "how long a publisher's `message-id` is remembered; 0 switches it off",
    "performance.delivery_timeout": "from delivery to settlement; `$extend` starts it anew",
    "performance.batch_size": "messages of one key that may be with its consumer at once; more than 1 gives up order "
    "across retries",
    "performance.prefetch": "unsettled deliveries of one consumer that names no `prefetch` of its own",
    "performance.rebalance_after": "how long messages with a key wait for a consumer without room before their "
    "partition moves to a member of the group that has room",
    "performance.compression": "how payloads from 256 bytes on are stored",
    "performance.durability": "when a publish is answered: after fdatasync, or after the write with an fdatasync "
    "within 200 ms",
}

HEAD = """# Configuration

Made by `scripts/make-docs` from the models in `src/sluice/config/settings.py` and `src/sluice/queues/config.py`: change those,
not this page.

`sluice serve` needs no configuration. A setting is taken from the first of these that gives it:

1. a flag (`sluice serve --help`), for the settings that have one;
2. an environment variable: the key in capitals behind `SLUICE_`, with two underscores for each dot. `mqtt.max_qos` is
   `SLUICE_MQTT__MAX_QOS`;
3. the TOML file named by `--config` or `SLUICE_CONFIG`;
4. the default below.

An unknown key, or a value out of its range, stops the start with a message that names the key, the source and the
allowed range. Every fault is told at once.

Durations are a number and its unit: `"200ms"`, `"5s"`, `"5m"`, `"3h"`, `"7d"`. A bare number is refused, except 0.
"""

EXAMPLE = """
## Templates

A queue that comes into being by a publish or a subscribe takes the first template whose `match` covers its name.
`match` is a topic filter over the name, `config` a queue configuration without `name`.

```toml
data = "/var/lib/sluice"

[listen]
mqtt = "127.0.0.1:1883"
ws = "127.0.0.1:8083"

[mqtt]
max_packet_size = 4194304

[[queues.templates]]
match = "images/#"
config = { partitions = 32, performance = { delivery_timeout = "5m", prefetch = 1 } }
```
"""

QUEUE_HEAD = """
# Queue configuration

A queue's configuration is JSON on `$admin/queue/create` (with `name`) and `$admin/queue/<queue>/config` (only what
changes), and TOML in a template. Keys with a dot are tables: `retry_policy.max_retries` is
`{"retry_policy": {"max_retries": 3}}`. Changes apply at once. Refused in a living queue: fewer partitions, another
`type`, and a change of `ordering` from or to `strict`.
"""

DEAD_LETTERS = """
## Dead-letter queues

A queue below `dlq/` has other defaults for these keys, so that what is in it stays there:

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
    """One table for the keys at the top, then one for each section."""
    known = dict(leaves(model))
    if known.keys() != meanings.keys():
        odd = sorted(known.keys() ^ meanings.keys())
        raise SystemExit(f"keys and sentences differ: {', '.join(odd)}; mend {Path(__file__).name}")
    for section in dict.fromkeys(key.rpartition(".")[0] for key in known):
        yield (
            f"\n## `[{section}]`\n\n"
            if section
            else f"\n## At the {top}\n\n"
            if top == "top"
            else "\n"
        )
        yield "| key | allowed | default | meaning |\n|---|---|---|---|\n"
        for key, field in known.items():
            if key.rpartition(".")[0] == section:
                yield f"| `{key}` | {allowed(field)} | {default(field)} | {meanings[key]} |\n"


def leaves(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its full name, those without a section first."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            sections.append((f"{above}{name}.", kind))
        else:
            yield above + name.removesuffix("_"), field
    for name, kind in sections:
        yield from leaves(kind, name)


# What a check of the models allows, in words, by the name of its function.
ALLOWED: dict[str, str] = {
    "_long_enough": "16 characters or more",
    "_file_of_secret": "a file",
    "_memory_size": "a share (`80%`), a size (`2GiB`), or `off`",
    "_existing_file": "a file",
    "_store_url": "`embedded`, `memory`",
    "_webhook": "an http or https address",
    "_queue_name": "a queue name",
}


def allowed(field: FieldInfo) -> str:
    between = range_of(field)
    if between is not None:
        return show_range(between)
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(field.annotation))
    for name in checks_of(field):
        if name in ALLOWED:
            return ALLOWED[name]
    kinds = [one for one in get_args(field.annotation) if one is not type(None)] or [
        field.annotation
    ]
    if field.annotation is Address or LinkAddress in kinds:
        return "HOST:PORT"
    if Address in kinds:
        return "HOST:PORT, or `off`; port 0: any free one"
    if bool in kinds:
        return "`true`, `false`"
    if get_origin(field.annotation) is list:
        return "a list"
    if get_origin(kinds[0]) is dict:
        return "an object"
    return "a path" if kinds[0] is Path else "text"


def checks_of(field: FieldInfo) -> Iterator[str]:
    """The names of the functions that check a value: of the field itself, or of what may stand in it besides None."""
    checks = list(field.metadata)
    for one in get_args(field.annotation):
        checks += getattr(one, "__metadata__", ())
    for check in checks:
        if isinstance(check, AfterValidator):
            yield getattr(check.func, "__name__", "")


def range_of(field: FieldInfo) -> Between | None:
    for check in field.metadata:
        if isinstance(check, AfterValidator) and isinstance(check.func, Between):
            return check.func
    return None


def show_range(between: Between) -> str:
    if between.high == NEVER:
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
    if between is not None and value == NEVER:
        return "never"
    if between is not None and between.show is show_duration:
        return show_duration(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


if __name__ == "__main__":
    main()

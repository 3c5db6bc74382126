"""Statistics of the queues from Redis alone: `XLEN`, `XINFO GROUPS` and the counters, summed up.

They are also available when no broker runs, and can verify the figures of a broker. Reading takes
three round trips for some hundred partitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.store.redis.connection import (
    Command,
    RedisChannel,
    RedisServer,
    durability_warnings,
)
from sluice.store.redis.keys import (
    RedisKeys,
    counters_key,
    entry_sequence,
    queue_of_partition_name,
    retry_schedule_key,
)
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.ownership import owner_name

COUNTER_NAMES = (
    "produced",
    "consumed",
    "acked",
    "retried",
    "dead",
    "expired",
    "purged",
    "cancelled",
)
_BATCH_SIZE = 256  # partitions in one request


@dataclass
class GroupStats:
    pending: int = 0
    consumers: int = 0
    lag: int = 0
    retrying: int = 0


@dataclass
class QueueStats:
    partitions: int = 0
    length: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTER_NAMES, 0))
    groups: dict[str, GroupStats] = field(default_factory=dict)


@dataclass
class StoreStats:
    owner: str  # holder of the lease; empty for none
    frame: int
    queues: dict[str, QueueStats]
    version: str = ""  # of Redis
    is_cluster: bool = False
    warnings: list[str] = field(default_factory=list)  # settings that risk data
    replicas: int = 0  # connected to the master; in a Cluster, to the node that was asked
    replica_timeouts: int = 0  # known to the broker only


def read_store_stats(
    url: str, prefix: str, answer_seconds: float = 5.0, tag: str = "log", min_replicas: int = 0
) -> StoreStats:
    server = RedisServer(url, answer_seconds)
    try:
        server_info = server.detect()
        channel = server.open_channel()
        try:
            stats = collect_stats(channel, RedisKeys(prefix, tag))
        finally:
            channel.close()
        stats.version = server_info["redis_version"]
        stats.is_cluster = server.is_cluster
        stats.replicas = int(server_info.get("connected_slaves", "0"))
        stats.warnings = durability_warnings(server_info, server.read_config(), min_replicas)
        return stats
    finally:
        server.close()


def collect_stats(channel: RedisChannel, keys: RedisKeys) -> StoreStats:
    owner, frame, names, queues = channel.execute(
        [
            (keys.log, ["GET", keys.lease]),
            (keys.log, ["HGET", keys.log, "frame"]),
            (keys.log, ["HGETALL", keys.partitions]),
            (keys.log, ["HKEYS", keys.queues]),
        ]
    )
    queue_stats = {name.decode(): QueueStats() for name in queues}
    partitions: list[tuple[str, QueueStats]] = []
    for pid, name in zip(names[::2], names[1::2]):
        # Partitions without a queue belong to the broker's own state.
        queue = queue_stats.get(queue_of_partition_name(name.decode()))
        if queue is not None:
            partitions.append((keys.base_key(name.decode(), int(pid)), queue))
    consumer_names: dict[int, set[bytes]] = {}  # by identity of the group
    for batch in _batches(partitions):
        _add_partitions(channel, batch, consumer_names)
    name = owner_name((owner or b"").decode(errors="replace"))
    return StoreStats(name, int(frame or 0), queue_stats)


def _batches(partitions: list[tuple[str, QueueStats]]) -> Iterator[list[tuple[str, QueueStats]]]:
    for start in range(0, len(partitions), _BATCH_SIZE):
        yield partitions[start : start + _BATCH_SIZE]


def _add_partitions(
    channel: RedisChannel,
    partitions: list[tuple[str, QueueStats]],
    consumer_names: dict[int, set[bytes]],
) -> None:
    commands: list[tuple[str, Command]] = []
    for base, _ in partitions:
        commands += [(base, ["EXISTS", base]), (base, ["XLEN", base])]
        commands.append((base, ["HMGET", counters_key(base), *COUNTER_NAMES]))
    responses = channel.execute(commands)
    streams: list[tuple[str, QueueStats]] = []  # XINFO refuses a missing stream
    for (base, queue), exists, length, counted in zip(
        partitions, responses[::3], responses[1::3], responses[2::3]
    ):
        queue.partitions += 1
        queue.length += int(length)
        for name, count in zip(COUNTER_NAMES, counted):
            queue.counters[name] += int(count or 0)
        if exists:
            streams.append((base, queue))
    retry_sets: list[tuple[str, GroupStats, str]] = []
    # Groups whose lag Redis does not report: see `_add_lags`.
    unknown_lags: list[tuple[str, GroupStats, int]] = []
    for (base, queue), groups in zip(
        streams, channel.execute([(base, ["XINFO", "GROUPS", base]) for base, _ in streams])
    ):
        for group_info in groups:
            fields: dict[bytes, Any] = dict(zip(group_info[::2], group_info[1::2]))
            name = fields[b"name"].decode()
            group = queue.groups.setdefault(name, GroupStats())
            group.pending += int(fields[b"pending"])
            if fields.get(b"lag") is None:
                last = fields[b"last-delivered-id"]
                unknown_lags.append((base, group, -1 if last == b"0-0" else entry_sequence(last)))
            else:
                group.lag += int(fields[b"lag"])
            retry_sets.append((base, group, name))
    # Redis knows the consumers of each partition, and a client usually serves several.
    for (_, group, _), consumers in zip(
        retry_sets,
        channel.execute(
            [(base, ["XINFO", "CONSUMERS", base, name]) for base, _, name in retry_sets]
        ),
    ):
        names = consumer_names.setdefault(id(group), set())
        for consumer_info in consumers:
            consumer_fields: dict[bytes, Any] = dict(zip(consumer_info[::2], consumer_info[1::2]))
            names.add(consumer_fields[b"name"])
        group.consumers = len(names)
    for (_, group, _), count in zip(
        retry_sets,
        channel.execute(
            [(base, ["ZCARD", retry_schedule_key(base, name)]) for base, _, name in retry_sets]
        ),
    ):
        group.retrying += int(count)
    _add_lags(channel, unknown_lags)


def _add_lags(channel: RedisChannel, unknown_lags: list[tuple[str, GroupStats, int]]) -> None:
    """Estimate lags that Redis does not report: before 7.0, or after deletions inside a stream.

    Ids are sequences, so the lag is at most the distance from the last delivered id to the last id.
    """
    stream_infos = channel.execute(
        [(base, ["XINFO", "STREAM", base]) for base, _, _ in unknown_lags]
    )
    for (_, group, delivered), stream in zip(unknown_lags, stream_infos):
        fields: dict[bytes, Any] = dict(zip(stream[::2], stream[1::2]))
        if fields[b"length"]:
            group.lag += max(0, entry_sequence(fields[b"last-generated-id"]) - delivered)


def main() -> None:
    """Print statistics: `python -m sluice.store.redis.views.stats redis://HOST:PORT [PREFIX]`."""
    url, *rest = sys.argv[1:]
    print(
        json.dumps(
            asdict(read_store_stats(url, rest[0] if rest else RedisOptions().prefix)), indent=2
        )
    )


if __name__ == "__main__":
    main()

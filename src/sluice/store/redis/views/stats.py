"""The queues as Redis itself tells them, added up over partitions: what `XLEN`, `XINFO GROUPS` and the counters say.

Asked of Redis alone, so it also answers for a broker that does not run, and a doubt about the broker's own figures can
be settled by a second witness. It takes three round trips for some hundred partitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.store.redis.server_checks import advice
from sluice.store.redis.keys import Keys, counters, queue_of, retry, sequence_of
from sluice.store.redis.connection import Command, Link, Server
from sluice.store.redis.options import Options

COUNTED = ("produced", "consumed", "acked", "retried", "dead", "expired", "purged")
_AT_ONCE = 256  # partitions asked in one go


@dataclass
class GroupSum:
    pending: int = 0
    consumers: int = 0
    lag: int = 0
    retrying: int = 0


@dataclass
class QueueSum:
    partitions: int = 0
    length: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    groups: dict[str, GroupSum] = field(default_factory=dict)


@dataclass
class StoreSum:
    owner: str  # who holds the lease; empty: nobody
    frame: int
    queues: dict[str, QueueSum]
    version: str = ""  # of Redis
    is_cluster: bool = False
    warnings: list[str] = field(default_factory=list)  # what its settings may lose


def ask_redis(url: str, prefix: str, answer_seconds: float = 5.0, tag: str = "log") -> StoreSum:
    server = Server(url, answer_seconds)
    try:
        told = server.look()
        link = server.link()
        try:
            found = add_up(link, Keys(prefix, tag))
        finally:
            link.close()
        found.version = told["redis_version"]
        found.is_cluster = server.is_cluster
        found.warnings = advice(told, server.settings())
        return found
    finally:
        server.close()


def add_up(link: Link, keys: Keys) -> StoreSum:
    owner, frame, names, queues = link.ask(
        [
            (keys.log, ["GET", keys.lease]),
            (keys.log, ["HGET", keys.log, "frame"]),
            (keys.log, ["HGETALL", keys.partitions]),
            (keys.log, ["HKEYS", keys.queues]),
        ]
    )
    found = {name.decode(): QueueSum() for name in queues}
    partitions: list[tuple[str, QueueSum]] = []
    for pid, name in zip(names[::2], names[1::2]):
        queue = found.get(queue_of(name.decode()))  # what belongs to no queue is the broker's own
        if queue is not None:
            partitions.append((keys.base(name.decode(), int(pid)), queue))
    for some in _portions(partitions):
        _add_partitions(link, some)
    return StoreSum((owner or b"").decode(errors="replace"), int(frame or 0), found)


def _portions(partitions: list[tuple[str, QueueSum]]) -> Iterator[list[tuple[str, QueueSum]]]:
    for start in range(0, len(partitions), _AT_ONCE):
        yield partitions[start : start + _AT_ONCE]


def _add_partitions(link: Link, partitions: list[tuple[str, QueueSum]]) -> None:
    commands: list[tuple[str, Command]] = []
    for base, _ in partitions:
        commands += [(base, ["EXISTS", base]), (base, ["XLEN", base])]
        commands.append((base, ["HMGET", counters(base), *COUNTED]))
    answers = link.ask(commands)
    streams: list[tuple[str, QueueSum]] = []  # XINFO refuses a stream that is not there
    for (base, queue), is_there, length, counted in zip(
        partitions, answers[::3], answers[1::3], answers[2::3]
    ):
        queue.partitions += 1
        queue.length += int(length)
        for name, count in zip(COUNTED, counted):
            queue.counters[name] += int(count or 0)
        if is_there:
            streams.append((base, queue))
    waiting: list[tuple[str, GroupSum, str]] = []
    untold: list[tuple[str, GroupSum, int]] = []  # lags that Redis does not tell: see `_add_lags`
    for (base, queue), groups in zip(
        streams, link.ask([(base, ["XINFO", "GROUPS", base]) for base, _ in streams])
    ):
        for told in groups:
            facts: dict[bytes, Any] = dict(zip(told[::2], told[1::2]))
            name = facts[b"name"].decode()
            group = queue.groups.setdefault(name, GroupSum())
            group.pending += int(facts[b"pending"])
            group.consumers += int(facts[b"consumers"])
            if facts.get(b"lag") is None:
                last = facts[b"last-delivered-id"]
                untold.append((base, group, -1 if last == b"0-0" else sequence_of(last)))
            else:
                group.lag += int(facts[b"lag"])
            waiting.append((base, group, name))
    for (_, group, _), count in zip(
        waiting, link.ask([(base, ["ZCARD", retry(base, name)]) for base, _, name in waiting])
    ):
        group.retrying += int(count)
    _add_lags(link, untold)


def _add_lags(link: Link, untold: list[tuple[str, GroupSum, int]]) -> None:
    """Redis before 7.0 knows no lag, and a later one none where entries were taken out of the middle. Ids are
    sequences, so it is at most the distance from the last one delivered to the last one there is."""
    told = link.ask([(base, ["XINFO", "STREAM", base]) for base, _, _ in untold])
    for (_, group, delivered), stream in zip(untold, told):
        facts: dict[bytes, Any] = dict(zip(stream[::2], stream[1::2]))
        if facts[b"length"]:
            group.lag += max(0, sequence_of(facts[b"last-generated-id"]) - delivered)


def main() -> None:
    """`python -m sluice.store.redis.views.stats redis://HOST:PORT [PREFIX]`: all of it as JSON."""
    url, *rest = sys.argv[1:]
    print(json.dumps(asdict(ask_redis(url, rest[0] if rest else Options().prefix)), indent=2))


if __name__ == "__main__":
    main()

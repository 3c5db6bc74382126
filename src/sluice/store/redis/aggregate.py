"""The queues as Redis itself tells them, added up over partitions: what `XLEN`, `XINFO GROUPS` and the counters say.

Asked of Redis alone, so it also answers for a broker that does not run, and a doubt about the broker's own figures can
be settled by a second witness.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.store.redis.keys import Keys, counters, partition_name, retry
from sluice.store.redis.link import Link, Server
from sluice.store.redis.options import Options

COUNTED = ("produced", "consumed", "acked", "retried", "dead", "expired", "purged")


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


def ask_redis(url: str, prefix: str, answer_seconds: float = 5.0) -> StoreSum:
    server = Server(url, answer_seconds)
    server.look()
    link = server.link()
    try:
        return add_up(link, Keys(prefix))
    finally:
        link.close()
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
    found = StoreSum((owner or b"").decode(errors="replace"), int(frame or 0), {})
    known = {name.decode(): QueueSum() for name in queues}
    for pid, name in zip(names[::2], names[1::2]):
        place = name.decode()
        for queue, so_far in known.items():
            number = place.rpartition(":")[2]
            if number.isdigit() and place == partition_name(queue, int(number)):
                _add_partition(link, keys.base(place, int(pid)), so_far)
    found.queues = known
    return found


def _add_partition(link: Link, base: str, queue: QueueSum) -> None:
    queue.partitions += 1
    there, counted = link.ask([(base, ["EXISTS", base]), (base, ["HMGET", counters(base), *COUNTED])])
    for name, count in zip(COUNTED, counted):
        queue.counters[name] += int(count or 0)
    if not there:
        return
    length, groups = link.ask([(base, ["XLEN", base]), (base, ["XINFO", "GROUPS", base])])
    queue.length += int(length)
    for told in groups:
        facts: dict[bytes, Any] = dict(zip(told[::2], told[1::2]))
        name = facts[b"name"].decode()
        group = queue.groups.setdefault(name, GroupSum())
        group.pending += int(facts[b"pending"])
        group.consumers += int(facts[b"consumers"])
        group.lag += int(facts.get(b"lag") or 0)
        group.retrying += int(link.ask([(base, ["ZCARD", retry(base, name)])])[0])


def main() -> None:
    """`python -m sluice.store.redis.aggregate redis://HOST:PORT [PREFIX]`: all of it as JSON."""
    url, *rest = sys.argv[1:]
    print(json.dumps(asdict(ask_redis(url, rest[0] if rest else Options().prefix)), indent=2))


if __name__ == "__main__":
    main()

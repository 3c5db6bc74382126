"""The store in Redis behind an engine under test, and what Redis says of the queues compared with what they are."""

from __future__ import annotations

from typing import Any

from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, WAITING
from sluice.queues.engine import Engine
from sluice.queues.log.note_decoder import QueueMeaning
from sluice.store.redis.keys import Keys, partition_name, retries, retry, sequence_of
from sluice.store.redis.options import Options
from sluice.store.redis.store import RedisStore
from sluice.store.redis.log.writer import AskJob
from tests.queues.kit import ListenedStore, Loop
from tests.support.redis_process import RedisCluster, RedisProcess


class RedisKeeper:
    def __init__(
        self,
        server: RedisProcess | RedisCluster,
        prefix: str,
        segment_bytes: int = 1 << 20,
        snapshot_bytes: int = 1 << 20,
        url: str = "",
        **options: float,
    ) -> None:
        self.prefix = prefix
        self._server = server
        self._url = url or server.url
        self._options = Options(prefix=prefix, **options)  # type: ignore[arg-type]
        self._sizes = (segment_bytes, snapshot_bytes)
        self._failures: list[Exception] = []
        self._listened: ListenedStore | None = None

    def open(self, loop: Loop, engine: Engine) -> ListenedStore:
        self._loop = loop
        self._engine = engine
        self._meaning = QueueMeaning(engine)
        self.store = RedisStore(
            self._url,
            loop.call_soon,
            self._failures.append,
            meaning=self._meaning,
            options=self._options,
            segment_bytes=self._sizes[0],
            snapshot_bytes=self._sizes[1],
        )
        self._listened = ListenedStore(self.store)
        return self._listened

    def opened(self) -> None:
        self._meaning.learn()
        self.store.begin_showing()
        self.catch_up()

    def crash(self) -> None:
        assert self._listened is not None
        self._listened.close()

    def is_busy(self) -> bool:
        assert self._listened is not None and not self._failures, self._failures
        return self._listened.owed > 0

    def catch_up(self) -> None:
        catch_up(self.store, self._loop)

    def check(self) -> None:
        check_views(self.store, self._loop, self._server, self.prefix, self._engine)
        assert not self._failures, self._failures


def catch_up(store: RedisStore, loop: Loop) -> None:
    """Wait until the writer has done all it was given, and the loop knows."""
    for _ in range(2):  # what is answered may have something more to write
        done: list[object] = []
        writer = store._writer
        assert writer is not None
        writer.put(AskJob(lambda link, token: None, done.append))
        loop.turn(lambda: not done)  # noqa: B023 - waited for at once


def check_views(
    store: RedisStore, loop: Loop, server: RedisProcess | RedisCluster, prefix: str, engine: Engine
) -> None:
    """What Redis says of the queues is what they are, once it has had a look at them."""
    for _ in range(2):
        store.look(loop.now)
        catch_up(store, loop)
    client: Any = server.client()
    keys = Keys(prefix)
    told = client.hkeys(keys.queues)
    assert sorted(name.decode() for name in told) == sorted(engine.queues)
    for queue in engine.queues.values():
        for partition in queue.partitions:
            base = keys.base(partition_name(queue.name, int(partition.number)), int(partition.pid))
            entries = {sequence_of(entry) for entry, _ in client.xrange(base)}
            again = {int(seq) for seq in client.hkeys(f"{base}:again")}
            living = {seq for seq in range(int(partition.next)) if partition.holds(seq)}
            assert living <= entries | again, f"{base} lacks {living - entries}"
            first = min(living, default=int(partition.next))
            assert all(seq >= first for seq in entries), f"{base} keeps what is gone below {first}"
            if queue.rules.compacted:
                assert entries <= living, f"{base} keeps {entries - living}, which were replaced"
            groups = client.xinfo_groups(base) if client.exists(base) else []
            assert sorted(one["name"].decode() for one in groups) == sorted(queue.groups)
            for cursor in partition.cursors:
                _check_group(client, base, cursor, loop.now)
    client.close()


def _check_group(client: Any, base: str, cursor: Cursor, now: float) -> None:
    group = cursor.group.name
    pending = {
        sequence_of(one["message_id"]): one["consumer"].decode()
        for one in client.xpending_range(base, group, "-", "+", 10_000)
    }
    held = {seq: lease.client() for seq, lease in cursor.leases.items() if lease.state == LEASED}
    for seq, holder in held.items():
        assert pending.get(seq) == holder, f"{base} {group} {seq} is with {holder}"
    for seq in pending:
        assert cursor.partition.holds(seq) and not cursor.settled(seq), f"{base} {group} {seq} is done"
    waiting = {
        seq for seq, lease in cursor.leases.items() if lease.state == WAITING and lease.due > now
    }  # what is due is between two chairs, there and here
    due = {int(seq) for seq in client.zrangebyscore(retry(base, group), "-inf", int(now * 1000) + 1)}
    told = {int(seq) for seq in client.zrange(retry(base, group), 0, -1)}
    assert told - due <= waiting <= told, f"{base} {group}: told {told}, due {due}, waiting {waiting}"
    assert {int(seq) for seq in client.hkeys(retries(base, group))} == told
    assert not waiting & pending.keys()

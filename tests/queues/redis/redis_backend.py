"""The Redis store under an engine under test, and a check of its views of the queues."""

from __future__ import annotations

from typing import Any

from sluice.queues.engine import Engine
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import BACKOFF, LEASED
from sluice.queues.recovery.note_decoder import QueueNoteDecoder
from sluice.store.redis.keys import (
    RedisKeys,
    entry_sequence,
    partition_name,
    retry_details_key,
    retry_schedule_key,
)
from sluice.store.redis.log.writer import CommandJob
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore
from tests.queues.kit import Loop, RecordingStore
from tests.support.redis_process import RedisCluster, RedisProcess


class RedisBackend:
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
        self._options = RedisOptions(prefix=prefix, **options)  # type: ignore[arg-type]
        self._sizes = (segment_bytes, snapshot_bytes)
        self._failures: list[Exception] = []
        self._recording: RecordingStore | None = None

    def open(self, loop: Loop, engine: Engine) -> RecordingStore:
        self._loop = loop
        self._engine = engine
        self._note_decoder = QueueNoteDecoder(engine)
        self.store = RedisStore(
            self._url,
            loop.call_soon,
            self._failures.append,
            note_decoder=self._note_decoder,
            options=self._options,
            segment_bytes=self._sizes[0],
            snapshot_bytes=self._sizes[1],
        )
        self._recording = RecordingStore(self.store)
        return self._recording

    def opened(self) -> None:
        self._note_decoder.load_names()
        self.store.start_views()
        self.catch_up()

    def crash(self) -> None:
        assert self._recording is not None
        self._recording.close()

    def is_busy(self) -> bool:
        assert self._recording is not None and not self._failures, self._failures
        return self._recording.pending > 0

    def catch_up(self) -> None:
        catch_up(self.store, self._loop)

    def check(self) -> None:
        check_views(self.store, self._loop, self._server, self.prefix, self._engine)
        assert not self._failures, self._failures


def catch_up(store: RedisStore, loop: Loop) -> None:
    """Wait until the writer has finished its jobs and the loop has the results."""
    for _ in range(2):  # a result may cause another write
        done: list[object] = []
        writer = store._writer
        assert writer is not None
        writer.submit(CommandJob(lambda link, token: None, done.append))
        loop.turn(lambda: not done)  # noqa: B023 (awaited at once)


def check_views(
    store: RedisStore, loop: Loop, server: RedisProcess | RedisCluster, prefix: str, engine: Engine
) -> None:
    """Check that the views in Redis match the queues."""
    for _ in range(2):
        store.poll_views(loop.now)
        catch_up(store, loop)
    client: Any = server.client()
    keys = RedisKeys(prefix)
    reported = client.hkeys(keys.queues)
    assert sorted(name.decode() for name in reported) == sorted(engine.queues)
    for queue in engine.queues.values():
        for partition in queue.partitions:
            base = keys.base_key(
                partition_name(queue.name, int(partition.number)), int(partition.pid)
            )
            entries = {entry_sequence(entry) for entry, _ in client.xrange(base)}
            rewritten = {int(seq) for seq in client.hkeys(f"{base}:again")}
            live = {seq for seq in range(int(partition.next_seq)) if partition.holds(seq)}
            assert live <= entries | rewritten, f"{base} lacks {live - entries}"
            first = min(live, default=int(partition.next_seq))
            assert all(seq >= first for seq in entries), f"{base} has deleted entries below {first}"
            if queue.rules.is_compacted:
                assert entries <= live, f"{base} has {entries - live}, which were replaced"
            groups = client.xinfo_groups(base) if client.exists(base) else []
            assert sorted(one["name"].decode() for one in groups) == sorted(queue.groups)
            for cursor in partition.cursors:
                _check_group(client, base, cursor, loop.now)
    client.close()


def _check_group(client: Any, base: str, cursor: Cursor, now: float) -> None:
    group = cursor.group.name
    pending = {
        entry_sequence(one["message_id"]): one["consumer"].decode()
        for one in client.xpending_range(base, group, "-", "+", 10_000)
    }
    held = {
        seq: lease.holder_client_id()
        for seq, lease in cursor.leases.items()
        if lease.state == LEASED
    }
    for seq, holder in held.items():
        assert pending.get(seq) == holder, f"{base} {group} {seq} is with {holder}"
    for seq in pending:
        assert cursor.partition.holds(seq) and not cursor.is_settled(seq), (
            f"{base} {group} {seq} is done"
        )
    # Retries that are due may be in either set.
    waiting = {
        seq
        for seq, lease in cursor.leases.items()
        if lease.state == BACKOFF and lease.retry_at > now
    }
    due = {
        int(seq)
        for seq in client.zrangebyscore(
            retry_schedule_key(base, group), "-inf", int(now * 1000) + 1
        )
    }
    reported = {int(seq) for seq in client.zrange(retry_schedule_key(base, group), 0, -1)}
    assert reported - due <= waiting <= reported, (
        f"{base} {group}: reported {reported}, due {due}, waiting {waiting}"
    )
    assert {int(seq) for seq in client.hkeys(retry_details_key(base, group))} == reported
    assert not waiting & pending.keys()

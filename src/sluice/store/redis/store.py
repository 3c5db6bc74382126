"""The Redis store: implements `store/protocol` with a Redis that several brokers can reach.

This object belongs to the loop's thread and never waits for Redis after it is open. A writer and a
reader thread do that, and a third thread renews the lease. KEYS.md describes the keys,
docs/decisions/0017-redis-store.md the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from redis.exceptions import RedisClusterException, RedisError

from sluice.errors import StoreError, format_messages_by_queue
from sluice.store.changes import NoteDecoder
from sluice.store.log_position import LogPosition
from sluice.store.protocol import RecoveryLoader, RecoveryReport, check_crc32c
from sluice.store.redis.connection import (
    RedisServer,
    ReplicaAcks,
    RetryingChannel,
    check_acks,
    durability_warnings,
    retry_while_disconnected,
)
from sluice.store.redis.errors import error_text
from sluice.store.redis.keys import PartitionKeys, RedisKeys
from sluice.store.redis.log import (
    FRAME_GAP_BYTES,
    AddressIndex,
    ClusterPlanWriter,
    FrameLosses,
    LogReader,
    LogRecovery,
    LogWriter,
    LossDetector,
    PlanBuilder,
    PlanWriter,
    SinglePlanWriter,
    SplitFrame,
    WriteJob,
    WritePlan,
    queue_or_none,
    raise_fences,
    read_frame_losses,
    remove_torn_entries,
    split_frame,
)
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.ownership import LeaseRenewer, StoreLease
from sluice.store.redis.views import GroupViews, ViewMaintenance
from sluice.store.snapshot_policy import SnapshotPolicy

ENTRIES_READ_VERSION = (7, 0)  # from this version a group stores how many entries it has read
_MAX_SEGMENT_BYTES = 0xF000_0000  # an offset has 32 bits


class RedisStore:
    """A durable store in Redis.

    `on_failure` is called once, in the loop's thread, after a permanent error. `on_stall` is called
    with the reason when Redis has not accepted a write for `wait_seconds`, and with an empty string
    when it accepts writes again.
    """

    def __init__(
        self,
        url: str,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        *,
        on_stall: Callable[[str], None] | None = None,
        note_decoder: NoteDecoder | None = None,
        options: RedisOptions | None = None,
        segment_bytes: int = 64 << 20,
        snapshot_bytes: int = 64 << 20,
    ) -> None:
        self._url = url
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_stall = on_stall if on_stall is not None else _ignore_stall
        self._note_decoder = note_decoder if note_decoder is not None else NoteDecoder()
        self._options = options if options is not None else RedisOptions()
        self._segment_bytes = segment_bytes
        self._snapshot_bytes = snapshot_bytes
        self._acks: ReplicaAcks | None = None
        if self._options.min_replicas:
            self._acks = ReplicaAcks(
                self._options.min_replicas,
                self._options.replicas_on_disk,
                self._options.replica_timeout_seconds,
            )
        self._stalls = {"writer": "", "replicas": ""}  # why no write is acknowledged, by source
        self._keys = RedisKeys(self._options.prefix, self._options.tag)
        self._server: RedisServer | None = None
        self._lease = StoreLease(self._keys, self._options.lease_seconds)
        self._writer: LogWriter | None = None
        self._reader: LogReader | None = None
        self._lease_renewer: LeaseRenewer | None = None
        self._index = AddressIndex()
        self._partition_keys = PartitionKeys(self._keys)
        self._plan_writer: PlanWriter = SinglePlanWriter(self._keys, self._acks)
        self._plan_builder = PlanBuilder(
            self._keys, self._index, self._partition_keys, self._note_decoder, False
        )
        self._views = GroupViews(self._keys, self._partition_keys, self._note_decoder, 1, False)
        self._maintenance: ViewMaintenance | None = None
        self._loss_detector = LossDetector(self._keys, self._queue_of_partition)
        self.losses = FrameLosses()  # as recorded when the store was opened
        self._last_frame = 0
        self._begin_log()
        # The last frame before the snapshot that is being written; -1 if there is none.
        self._snapshot_frame = -1
        self._has_failed = False

    def _begin_log(self) -> None:
        self._snapshot_policy = SnapshotPolicy(self._snapshot_bytes)
        self._log = LogPosition(
            FRAME_GAP_BYTES, self._segment_bytes, _MAX_SEGMENT_BYTES, self._snapshot_policy
        )

    # -- the Store contract

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        check_crc32c()
        if self._writer is not None:
            raise StoreError("the store is open already")
        self._index = AddressIndex()
        self._partition_keys = PartitionKeys(self._keys)
        self._has_failed = False
        self._begin_log()
        self._stalls = {"writer": "", "replicas": ""}
        server = RedisServer(self._url, self._options.answer_seconds)
        try:
            return self._open_server(server, loader)
        except (RedisError, RedisClusterException) as fault:
            server.close()
            raise StoreError(
                f"Redis cannot be used: {error_text(fault)}",
                "Start Redis, or give its address with --store",
            ) from fault
        except BaseException:
            server.close()
            raise

    def _open_server(self, server: RedisServer, loader: RecoveryLoader) -> RecoveryReport:
        server_info = retry_while_disconnected(server.detect, self._options.wait_seconds)
        settings = retry_while_disconnected(server.read_config, self._options.wait_seconds)
        if self._acks is not None:
            check_acks(self._acks, server.version, settings)
        channel = RetryingChannel(server.open_channel(), self._options.wait_seconds)
        if self._options.force_takeover:
            self._lease.force_acquire(channel)
        else:
            self._lease.acquire(channel, "Redis")
        try:
            # Replicas then have the new token too, and every earlier frame: a failover cannot bring
            # back a state from before this owner.
            _, replicas = self._lease.renew(channel, self._acks)
            if server.is_cluster:
                raise_fences(channel, self._keys, self._lease.token)
            recovered = LogRecovery(
                channel,
                self._keys,
                self._index,
                self._partition_keys,
                loader,
                self._snapshot_policy,
            ).run()
            if server.is_cluster:
                remove_torn_entries(
                    channel, self._partition_keys, self._index, self._lease.token, recovered.report
                )
            self.losses = read_frame_losses(channel, self._keys)
        except BaseException:
            self._lease.release(channel)
            raise
        finally:
            channel.close()
        recovered.report.warnings += durability_warnings(
            server_info, settings, self._options.min_replicas
        )
        if self._acks is not None and replicas < self._acks.count:
            recovered.report.warnings.append(self._acks.shortage(replicas))
        unconfirmed = self.losses.unconfirmed
        if unconfirmed is not None:
            recovered.report.warnings.append(
                "Redis has lost frames that it had confirmed, the latest being "
                f"{unconfirmed.first} to {unconfirmed.last} "
                f"({format_messages_by_queue(unconfirmed.queues)}), and no operator has confirmed "
                "the loss yet: find out what was lost, then run `sluice losses confirm`"
            )
        self._loss_detector = LossDetector(
            self._keys, self._queue_of_partition, self._lease.token, recovered.last_frame
        )
        self._last_frame = recovered.last_frame
        self._log.resume(recovered.segment, recovered.segment_sizes)
        self._log.roll_if_full()
        recovered.report.segments = len(self._log.segment_sizes)
        self._plan_builder = PlanBuilder(
            self._keys, self._index, self._partition_keys, self._note_decoder, server.is_cluster
        )
        self._plan_writer = (
            ClusterPlanWriter(self._keys, self._acks)
            if server.is_cluster
            else SinglePlanWriter(self._keys, self._acks)
        )
        self._views = GroupViews(
            self._keys,
            self._partition_keys,
            self._note_decoder,
            self._options.batch,
            server.version >= ENTRIES_READ_VERSION,
            self._options.max_length,
        )
        self._writer = LogWriter(
            server.open_channel(),
            self._lease.token,
            self._loss_detector,
            self._options.wait_seconds,
            self._call_soon_threadsafe,
            self._fail,
            partial(self._set_stall, "writer"),
        )
        self._reader = LogReader(
            server.open_channel(),
            self._keys,
            self._index,
            self._partition_keys,
            self._call_soon_threadsafe,
            self._fail,
        )
        self._lease_renewer = LeaseRenewer(
            server,
            self._lease,
            self._options.renew_seconds,
            self._options.wait_seconds,
            self._acks,
            self._loss_detector,
            self._call_soon_threadsafe,
            self._fail,
            partial(self._set_stall, "replicas"),
        )
        self._maintenance = ViewMaintenance(
            self._keys,
            self._partition_keys,
            self._note_decoder,
            self._views,
            self._plan_writer,
            self._options,
            server.is_cluster,
            self._writer.submit,
        )
        self._server = server
        self._writer.start()
        self._reader.start()
        self._lease_renewer.start()
        return recovered.report

    def next_frame_address(self) -> int:
        return self._log.next_address()

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        """Persist a frame.

        The `appendfsync` of Redis decides its durability; `sync` adds nothing.
        """
        writer = self._require_writer()
        split = split_frame(frame, count)
        address, is_first_of_segment = self._log.next_address(), self._log.offset == 0
        self._log.append(len(frame))
        self._last_frame += 1
        plan = WritePlan(self._last_frame)
        self._count_produced(split)
        if split.messages_by_partition:
            self._loss_detector.remember_frame(self._last_frame, split.messages_by_partition)
        deleted_pids = self._views.apply_notes(split.notes, plan)
        plan_builder = self._plan_builder
        plan_builder.add_partition_names(plan)
        arguments = (plan, split, address, len(frame), is_first_of_segment, deleted_pids)
        writer.submit(
            WriteJob(self._plan_writer, partial(plan_builder.build_frame, *arguments), done)
        )
        return self._log.next_address()

    def _count_produced(self, split: SplitFrame) -> None:
        for pid, count in split.messages_by_partition.items():
            self._views.ensure_named(pid)
            self._views.add_count(pid, "produced", count)

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.read(list(addresses), done)

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.scan(segment, done)

    def is_snapshot_due(self) -> bool:
        return self._snapshot_policy.is_due()

    def begin_snapshot(self) -> None:
        self._snapshot_frame = self._last_frame
        self._snapshot_policy.begin_snapshot()

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        writer = self._require_writer()
        if self._snapshot_frame < 0:
            self.begin_snapshot()
        self._snapshot_policy.record_snapshot_size(state)
        deleted = self._log.delete_segments(freed_segments)
        covered_frame, self._snapshot_frame = self._snapshot_frame, -1
        build_plan = partial(
            self._plan_builder.build_snapshot, state, deleted, covered_frame, int(self._log.segment)
        )
        writer.submit(WriteJob(self._plan_writer, build_plan, partial(self._finish_snapshot, done)))

    def _finish_snapshot(self, done: Callable[[], None]) -> None:
        self._snapshot_policy.finish_snapshot()
        done()

    def seal_segment(self) -> bool:
        return False  # Redis knows its free memory and refuses writes by itself

    def segment_sizes(self) -> dict[int, int]:
        return dict(self._log.segment_sizes)

    def start_views(self) -> None:
        """Repair the views after recovery, before the first commit; needs the note decoder."""
        if self._maintenance is not None:
            self._maintenance.restore_views()

    def poll_views(self, now: float) -> None:
        """Update pending lists and move due retries; called every `poll_seconds`."""
        if self._maintenance is not None and not self._has_failed:
            self._maintenance.poll(now)

    def close(self) -> None:
        self._maintenance = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        if self._lease_renewer is not None:
            self._lease_renewer.stop()
            self._lease_renewer = None
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- internals

    def _require_writer(self) -> LogWriter:
        if self._writer is None:
            raise StoreError("the store is not open")
        return self._writer

    def _queue_of_partition(self, pid: int) -> str | None:
        if not self._note_decoder.is_queue_partition(pid) or not self._partition_keys.has_name(pid):
            return None
        return queue_or_none(self._partition_keys.partition_name(pid))

    @property
    def replica_timeouts(self) -> int:
        """How often replicas did not acknowledge a write in time, since the store was opened."""
        return 0 if self._writer is None else self._writer.replica_timeouts

    def _set_stall(self, source: str, reason: str) -> None:
        """Report why no write is acknowledged; both threads may have a reason."""
        before = self._stalls["writer"] or self._stalls["replicas"]
        self._stalls[source] = reason
        after = self._stalls["writer"] or self._stalls["replicas"]
        if after != before:
            self._on_stall(after)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)


def _ignore_stall(reason: str) -> None:
    """Do nothing: without `on_stall` publishers wait."""

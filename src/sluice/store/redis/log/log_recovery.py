"""Recovery from Redis: the snapshot, rows of the frames it covers, records of later frames."""

from __future__ import annotations

from librt.strings import BytesWriter

from sluice.store.protocol import MESSAGE, RecoveryLoader, RecoveryReport, read_record, write_row
from sluice.store.redis.connection import RedisChannel
from sluice.store.redis.keys import PartitionKeys, RedisKeys
from sluice.store.redis.log.address_index import AddressIndex
from sluice.store.redis.log.log_entries import read_log_entry
from sluice.store.redis.log.stream_reads import (
    FRAME_GAP_BYTES,
    LoggedFrame,
    StreamPosition,
    fetch_records,
    read_frames,
)
from sluice.store.snapshot_policy import SnapshotPolicy


class RecoveredLog:
    """The end of the recovered log."""

    def __init__(self) -> None:
        self.last_frame = 0
        self.covered_frame = 0
        self.segment = 1
        self.segment_sizes: dict[int, int] = {}
        self.report = RecoveryReport()


class LogRecovery:
    def __init__(
        self,
        channel: RedisChannel,
        keys: RedisKeys,
        index: AddressIndex,
        partition_keys: PartitionKeys,
        loader: RecoveryLoader,
        snapshot_policy: SnapshotPolicy,
    ) -> None:
        self._channel = channel
        self._keys = keys
        self._index = index
        self._partition_keys = partition_keys
        self._loader = loader
        self._snapshot_policy = snapshot_policy
        self._log = RecoveredLog()

    def run(self) -> RecoveredLog:
        log = self._log
        keys = self._keys
        end, names, numbers, snapshot = self._channel.execute(
            [
                (keys.log, ["HMGET", keys.log, "frame", "segment"]),
                (keys.log, ["HGETALL", keys.partitions]),
                (keys.log, ["ZRANGE", keys.segments, 0, -1]),
                (keys.log, ["HMGET", keys.snapshot, "covered", "state"]),
            ]
        )
        log.last_frame = int(end[0] or 0)
        log.segment = int(end[1] or 1)
        for pid, name in zip(names[::2], names[1::2]):
            self._partition_keys.restore_name(int(pid), bytes(name).decode())
        if snapshot[1] is not None:
            log.covered_frame = int(snapshot[0])
            self._loader.load_snapshot(bytes(snapshot[1]))
            self._snapshot_policy.record_loaded_snapshot(len(snapshot[1]))
        segments = [int(number) for number in numbers]
        for segment in segments:
            for frames in read_frames(self._channel, keys, segment):
                self._load_frames(frames)
            log.segment_sizes.setdefault(segment, 0)
        log.segment_sizes.setdefault(log.segment, 0)
        log.report.segments = len(log.segment_sizes)
        return log

    def _load_frames(self, frames: list[LoggedFrame]) -> None:
        log = self._log
        rows = BytesWriter()
        after_snapshot: list[LoggedFrame] = []
        for frame in frames:
            segment = frame.address >> 32
            log.segment_sizes[segment] = (frame.address & 0xFFFF_FFFF) + frame.size
            if frame.number > log.covered_frame:
                self._snapshot_policy.log_bytes += FRAME_GAP_BYTES + frame.size
                self._snapshot_policy.has_sealed_segment = (
                    self._snapshot_policy.has_sealed_segment or segment < log.segment
                )
                after_snapshot.append(frame)
                continue
            for record in read_log_entry(frame.log_entry, frame.address):
                if record.kind == MESSAGE:
                    self._index.add(int(record.address), int(record.pid), int(record.seq))
                    write_row(rows, record.address, record)
                    log.report.messages += 1
        if len(rows):
            self._loader.load_rows(rows.getvalue())
        if after_snapshot:
            self._replay_frames(after_snapshot)

    def _replay_frames(self, frames: list[LoggedFrame]) -> None:
        """Replay frames; of a settled and deleted message only the beginning is available."""
        report = self._log.report
        records = [
            record for frame in frames for record in read_log_entry(frame.log_entry, frame.address)
        ]
        report.frames += len(frames)
        positions: list[StreamPosition] = [
            (self._partition_keys.base_key(int(record.pid)), int(record.seq))
            for record in records
            if record.kind == MESSAGE
        ]
        bodies = fetch_records(self._channel, positions)
        for record in records:
            report.records += 1
            if record.kind == MESSAGE:
                report.messages += 1
                self._index.add(int(record.address), int(record.pid), int(record.seq))
                data = bodies.get((self._partition_keys.base_key(int(record.pid)), int(record.seq)))
                whole = None if data is None else read_record(data, 0, len(data), record.address)
                if whole is not None:
                    record.body = whole.body
            self._loader.load_record(record)

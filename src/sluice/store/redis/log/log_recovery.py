"""Bringing back what Redis holds: the snapshot, rows of the frames it covers, records of those behind it."""

from __future__ import annotations

from librt.strings import BytesWriter

from sluice.store.snapshot_policy import Pace
from sluice.store.protocol import MESSAGE, Loader, Recovery, read_record, write_row
from sluice.store.redis.log.stream_reads import Place, fetch
from sluice.store.redis.log.log_entries import read_log
from sluice.store.redis.log.address_index import Index
from sluice.store.redis.keys import Keys
from sluice.store.redis.connection import Link
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.log_segments import FRAME_GAP, LoggedFrame, frames_of


class Log:
    """How far the log has come."""

    def __init__(self) -> None:
        self.frame = 0
        self.covered = 0
        self.segment = 1
        self.sizes: dict[int, int] = {}
        self.report = Recovery()


class Recoverer:
    def __init__(
        self, link: Link, keys: Keys, index: Index, places: Places, loader: Loader, pace: Pace
    ) -> None:
        self._link = link
        self._keys = keys
        self._index = index
        self._places = places
        self._loader = loader
        self._pace = pace
        self._log = Log()

    def run(self) -> Log:
        log = self._log
        keys = self._keys
        end, names, numbers, snapshot = self._link.ask(
            [
                (keys.log, ["HMGET", keys.log, "frame", "segment"]),
                (keys.log, ["HGETALL", keys.partitions]),
                (keys.log, ["ZRANGE", keys.segments, 0, -1]),
                (keys.log, ["HMGET", keys.snapshot, "covered", "state"]),
            ]
        )
        log.frame = int(end[0] or 0)
        log.segment = int(end[1] or 1)
        for pid, name in zip(names[::2], names[1::2]):
            self._places.load(int(pid), bytes(name).decode())
        if snapshot[1] is not None:
            log.covered = int(snapshot[0])
            self._loader.load_snapshot(bytes(snapshot[1]))
            self._pace.loaded(len(snapshot[1]))
        segments = [int(number) for number in numbers]
        for segment in segments:
            for frames in frames_of(self._link, keys, segment):
                self._load(frames)
            log.sizes.setdefault(segment, 0)
        log.sizes.setdefault(log.segment, 0)
        log.report.segments = len(log.sizes)
        return log

    def _load(self, frames: list[LoggedFrame]) -> None:
        log = self._log
        rows = BytesWriter()
        behind: list[LoggedFrame] = []
        for frame in frames:
            segment = frame.address >> 32
            log.sizes[segment] = (frame.address & 0xFFFF_FFFF) + frame.size
            if frame.number > log.covered:
                self._pace.written += FRAME_GAP + frame.size
                self._pace.sealed = self._pace.sealed or segment < log.segment
                behind.append(frame)
                continue
            for record in read_log(frame.log, frame.address):
                if record.kind == MESSAGE:
                    self._index.add(int(record.address), int(record.pid), int(record.seq))
                    write_row(rows, record.address, record)
                    log.report.messages += 1
        if len(rows):
            self._loader.load_rows(rows.getvalue())
        if behind:
            self._replay(behind)

    def _replay(self, frames: list[LoggedFrame]) -> None:
        """Messages come whole as far as they are there; of one that is settled and gone the log has the beginning."""
        report = self._log.report
        records = [record for frame in frames for record in read_log(frame.log, frame.address)]
        report.frames += len(frames)
        places: list[Place] = [
            (self._places.base(int(record.pid)), int(record.seq))
            for record in records
            if record.kind == MESSAGE
        ]
        bodies = fetch(self._link, places)
        for record in records:
            report.records += 1
            if record.kind == MESSAGE:
                report.messages += 1
                self._index.add(int(record.address), int(record.pid), int(record.seq))
                data = bodies.get((self._places.base(int(record.pid)), int(record.seq)))
                whole = None if data is None else read_record(data, 0, len(data), record.address)
                if whole is not None:
                    record.body = whole.body
            self._loader.load_record(record)

"""Recovery of the log when the store is opened.

    1  the newest valid snapshot goes to the loader
    2  each sealed segment before it: rows from its index, or from its log if the index is missing
       or damaged
    3  the part of the snapshot's own segment that it covers: rows, from the log
    4  every frame after it: records. The number of a frame (lsn) is one more than the last
    5  a broken frame that is proven to have been synced is damage: the store does not open (with
       `salvage` it continues after the frame and lists what is lost). Any other broken frame was
       torn by a crash and never acknowledged: recovery truncates the log before it
    6  the last segment is synced, in case the previous process did not, and sealed if it is full

A crash during recovery is safe: each step removes only what no step of another start needs. The
loader applies acknowledgements to messages and counts live messages; this module does not.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import StoreDamaged, UnusableRecord
from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.frame_format import FRAME_HEADER_BYTES, MAX_U32, collect_lost_messages
from sluice.store.embedded.layout import DirectoryListing, index_name, log_name
from sluice.store.embedded.segment_index import SegmentIndex, read_index, split_rows, write_index
from sluice.store.embedded.segment_scan import ScannedFrame, SegmentScan
from sluice.store.embedded.snapshot_file import StoredSnapshot, read_snapshot
from sluice.store.protocol import (
    MESSAGE,
    ROW_BYTES,
    Record,
    RecoveryLoader,
    RecoveryReport,
    read_row,
    write_row,
)
from sluice.store.snapshot_policy import SnapshotPolicy

_UNKNOWN_LSN: Final = -1  # any lsn is accepted
_NO_MORE_FRAMES: Final = -1  # end of the segment
_SECTOR_BYTES: Final = 512


class RecoveredLog:
    """The open segment, and what is known of the segments before it."""

    def __init__(self, report: RecoveryReport) -> None:
        self.report = report
        self.fd: int = -1
        self.segment: i64 = 1
        self.offset: i64 = 0
        self.lsn: i64 = 0  # number of the last frame
        self.rows: BytesWriter = BytesWriter()  # rows of the messages in the open segment
        self.segment_sizes: dict[int, int] = {}


class LogRecovery:
    def __init__(
        self,
        files: FileSystem,
        directory: str,
        salt: int,
        segment_bytes: int,
        salvage: bool,
        loader: RecoveryLoader,
        snapshot_policy: SnapshotPolicy,
        read_only: bool = False,
    ) -> None:
        self._files = files
        self._directory = directory
        self._salt: i64 = salt
        self._segment_bytes: i64 = segment_bytes
        self._salvage = salvage
        self._loader = loader
        self._snapshot_policy = snapshot_policy
        self._read_only = read_only
        self._has_damage = False
        self._report = RecoveryReport()
        self._log = RecoveredLog(self._report)

    def run(self) -> RecoveredLog:
        if not self._read_only:
            # After kill -9, names may be in the page cache only. Deletions below and
            # acknowledgements later depend on them.
            self._files.sync_directory(self._directory)
        listing = DirectoryListing(self._files.list_names(self._directory))
        if not self._read_only:
            self._remove_leftovers(listing)
        snapshot = self._choose_snapshot(listing)
        first_segment = 1
        covered_bytes = 0
        if snapshot is not None:
            first_segment, covered_bytes = snapshot.segment, snapshot.offset
            self._log.lsn = snapshot.lsn
            try:
                self._loader.load_snapshot(snapshot.state)
            except UnusableRecord as error:
                raise StoreDamaged(
                    f"{self._directory}/{snapshot.name}",
                    0,
                    error.what,
                    "Restore it from a backup, or move this file away and start once with "
                    "--salvage: Sluice then reads the log without it, and settled messages may "
                    "come back",
                ) from error
            self._snapshot_policy.record_loaded_snapshot(len(snapshot.state))
            for segment in listing.segments:
                if segment < first_segment:
                    self._load_sealed_segment(segment, snapshot)
        elif listing.segments and listing.segments[0] != 1:
            self._report_missing_start(listing)
            first_segment = listing.segments[0]
            self._log.lsn = _UNKNOWN_LSN
        tail = [segment for segment in listing.segments if segment >= first_segment]
        self._check_no_gaps(tail, first_segment, snapshot is not None)
        for segment in tail:
            self._read_segment(
                segment, covered_bytes if segment == first_segment else 0, segment == tail[-1]
            )
        if self._log.lsn == _UNKNOWN_LSN:
            self._log.lsn = 0
        if self._read_only:
            self._log.segment = tail[-1] if tail else first_segment
        else:
            self._open_for_writing(tail, first_segment)
        self._snapshot_policy.has_sealed_segment = int(self._log.segment) != first_segment
        if self._has_damage:
            # Due at any cost: after the next snapshot a start no longer reads the damaged part.
            self._snapshot_policy.record_loaded_snapshot(0)
        self._report.segments = len(self._log.segment_sizes)
        return self._log

    def _remove_leftovers(self, listing: DirectoryListing) -> None:
        for name in listing.temporary:
            self._files.unlink(f"{self._directory}/{name}")
        for number in listing.indexes:
            # A crash interrupted the deletion of the segment after its log was removed.
            if number not in listing.segments:
                self._files.unlink(f"{self._directory}/{index_name(number)}")

    # -- snapshots and sealed segments

    def _choose_snapshot(self, listing: DirectoryListing) -> StoredSnapshot | None:
        """Return the newest valid snapshot.

        An older snapshot exists only if a crash prevented its deletion. If the segments that it
        needs exist too, recovery from it leads to the same state.
        """
        damaged_newer = ""
        for name in reversed(listing.snapshots):
            snapshot = read_snapshot(self._files, self._directory, name)
            if snapshot is None:
                self._report.warnings.append(f"snapshot {name} is damaged")
                damaged_newer = name
                continue
            for segment in snapshot.segments:
                if segment not in listing.segments:
                    problem = (
                        "it cannot be read, and the snapshot before it needs segments that no "
                        "longer exist"
                    )
                    self._report_damage(
                        damaged_newer or log_name(segment),
                        0,
                        problem if damaged_newer else "the segment is missing",
                    )
            return snapshot
        return None

    def _report_missing_start(self, listing: DirectoryListing) -> None:
        name = listing.snapshots[-1] if listing.snapshots else log_name(1)
        self._report_damage(
            name, 0, "no snapshot is readable, and without one the log begins too late"
        )
        self._report.warnings.append(
            "without the snapshot, messages that were settled long ago may come back"
        )

    def _load_sealed_segment(self, segment: int, snapshot: StoredSnapshot) -> None:
        """Load the messages of a sealed segment before the snapshot's segment as rows."""
        if segment not in snapshot.segments:
            if not self._read_only:
                self._files.unlink(f"{self._directory}/{log_name(segment)}")
                self._files.unlink(f"{self._directory}/{index_name(segment)}")
            return
        index = read_index(self._files, self._directory, segment)
        if index is None:
            self._read_segment(segment, MAX_U32, False)
            return
        fd = self._files.open_to_read(f"{self._directory}/{log_name(segment)}")
        size = self._files.size(fd)
        self._files.close(fd)
        self._log.segment_sizes[segment] = size
        rows = index.rows
        if size < index.log_bytes:
            rows = self._handle_truncated_segment(segment, size, index)
        self._load_rows(segment, rows)

    def _handle_truncated_segment(self, segment: int, size: int, index: SegmentIndex) -> bytes:
        """Handle a sealed segment that lost its end; return the rows of the remaining messages."""
        kept_rows = BytesWriter()
        lost = 0
        for at in range(0, len(index.rows), ROW_BYTES):
            row = read_row(index.rows, at)
            if int(row.address & MAX_U32) + int(row.size) <= size:
                kept_rows.write(index.rows[at : at + ROW_BYTES])
            else:
                lost += 1
                self._report.lost_messages.append((int(row.pid), int(row.seq)))
        self._report_damage(
            log_name(segment),
            size,
            f"the file ends here; when the segment was full it had {index.log_bytes - size} bytes "
            f"more, with {lost} messages in them",
        )
        rows = kept_rows.getvalue()
        if not self._read_only:  # so that the next start needs no salvage
            write_index(self._files, self._directory, segment, size, rows)
        return rows

    def _check_no_gaps(self, tail: list[int], start: int, has_snapshot: bool) -> None:
        """Check that no segment is missing from the snapshot's segment on."""
        if has_snapshot and (not tail or tail[0] != start):
            self._report_damage(log_name(start), 0, "the segment is missing")
        for nth in range(1, len(tail)):
            if tail[nth] != tail[nth - 1] + 1:
                self._report_damage(log_name(tail[nth - 1] + 1), 0, "the segment is missing")

    # -- frames

    def _read_segment(self, segment: int, covered_bytes: i64, is_last: bool) -> None:
        """Read one log: frames before `covered_bytes` give rows, frames after it give records.

        If a sealed segment has no index, write it.
        """
        fd = self._files.open_to_read(f"{self._directory}/{log_name(segment)}")
        try:
            scan = SegmentScan(self._files, fd, segment, self._salt)
            end = self._read_frames(scan, covered_bytes, is_last)
            self._log.segment_sizes[segment] = int(scan.size)
        finally:
            self._files.close(fd)
        if is_last:
            self._log.offset = end
        elif not self._read_only and read_index(self._files, self._directory, segment) is None:
            write_index(self._files, self._directory, segment, scan.size, self._log.rows.getvalue())
            self._files.sync_directory(self._directory)
            self._report.rebuilt_indexes += 1

    def _read_frames(self, scan: SegmentScan, covered_bytes: i64, is_last: bool) -> i64:
        rows = BytesWriter()
        self._log.rows = rows
        offset: i64 = 0
        lsn: i64 = _UNKNOWN_LSN
        after_snapshot = covered_bytes == 0
        if after_snapshot:
            lsn = self._log.lsn
        while offset < scan.size:
            if not after_snapshot and offset >= covered_bytes:
                after_snapshot = True
                lsn = self._log.lsn
                self._load_rows(int(scan.segment), rows.getvalue())
            frame = scan.read_frame(offset)
            if frame is None:
                resume = self._handle_broken_frame(scan, offset, lsn, is_last and after_snapshot)
                if resume == _NO_MORE_FRAMES:
                    break
                offset = resume
                lsn = _UNKNOWN_LSN
                continue
            if lsn != _UNKNOWN_LSN and frame.header.lsn != lsn + 1:
                problem = f"frame {frame.header.lsn} is where frame {lsn + 1} should be"
                self._report_damage(log_name(int(scan.segment)), offset, problem)
            lsn = frame.header.lsn
            self._load_frame(frame, rows, after_snapshot)
            if after_snapshot:
                self._log.lsn = lsn
                self._snapshot_policy.log_bytes += frame.end - offset
            offset = frame.end
        if not after_snapshot:
            self._load_rows(int(scan.segment), rows.getvalue())
        if offset < covered_bytes and covered_bytes != MAX_U32:
            self._report_damage(
                log_name(int(scan.segment)),
                offset,
                "the log ends before the position of the snapshot",
            )
        return offset

    def _load_frame(self, frame: ScannedFrame, rows: BytesWriter, after_snapshot: bool) -> None:
        for record in frame.records:
            if record.kind == MESSAGE:
                write_row(rows, record.address, record)
                if after_snapshot:
                    self._report.messages += 1
            if after_snapshot:
                self._load_record(record)
        if after_snapshot:
            self._report.frames += 1
            self._report.records += len(frame.records)

    def _load_record(self, record: Record) -> None:
        try:
            self._loader.load_record(record)
        except UnusableRecord as error:
            self._report_damage(
                log_name(int(record.address >> 32)), record.address & MAX_U32, error.what
            )
            if record.kind == MESSAGE:
                self._report.lost_messages.append((int(record.pid), int(record.seq)))

    def _load_rows(self, segment: int, rows: bytes) -> None:
        self._report.messages += len(rows) // ROW_BYTES
        try:
            for piece in split_rows(rows):
                self._loader.load_rows(piece)
        except UnusableRecord as error:
            raise StoreDamaged(
                f"{self._directory}/{index_name(segment)}",
                0,
                error.what,
                "Move this file away and start again: Sluice rebuilds it from the log",
            ) from error

    # -- damage

    def _handle_broken_frame(
        self, scan: SegmentScan, offset: i64, lsn: i64, may_be_torn: bool
    ) -> i64:
        """Handle a broken frame at `offset`; return where to continue, or _NO_MORE_FRAMES."""
        name = log_name(int(scan.segment))
        if may_be_torn and not self._was_synced(scan, offset, lsn):
            torn = len(_strip_preallocated(scan.read_bytes(offset, scan.size)))
            if torn == 0:
                return _NO_MORE_FRAMES
            self._report.torn_bytes += torn
            self._report.warnings.append(
                f"the end of {name} "
                + (f"is torn by {torn} B" if self._read_only else f"was cut by {torn} B")
                + ": a write that a crash interrupted"
                + (". The next start truncates it" if self._read_only else "")
            )
            return _NO_MORE_FRAMES
        self._report_damage(name, offset, "a frame that had been synced is broken")
        resume = scan.find_frame(offset + 1)
        end = resume if resume >= 0 else scan.size
        collect_lost_messages(
            scan.read_bytes(offset, end),
            FRAME_HEADER_BYTES,
            end - offset,
            self._report.lost_messages,
        )
        return resume if resume >= 0 else _NO_MORE_FRAMES

    def _was_synced(self, scan: SegmentScan, offset: i64, lsn: i64) -> bool:
        """Return whether a later frame proves that the broken frame after `lsn` had been synced.

        Later segments are irrelevant: a segment with a possibly torn frame has no successor.
        """
        at = scan.find_frame(offset + 1)
        while at >= 0:
            frame = scan.read_frame(at)
            if frame is None:
                at = scan.find_frame(at + 1)
                continue
            if lsn == _UNKNOWN_LSN or frame.header.lsn - 1 - frame.header.unsynced > lsn:
                return True
            at = scan.find_frame(frame.end)
        return False

    def _report_damage(self, name: str, offset: i64, problem: str) -> None:
        """Refuse to open, or in salvage mode add the damage to the report."""
        if not self._salvage:
            raise StoreDamaged(f"{self._directory}/{name}", int(offset), problem)
        self._has_damage = True
        self._report.warnings.append(f"{name} is damaged at byte {offset}: {problem}")

    # -- continuing the log

    def _open_for_writing(self, tail: list[int], start: int) -> None:
        """Open the last segment for writing.

        A full segment is sealed first. So is a salvaged one: the next snapshot then starts after
        the damage, and later starts do not read it again.
        """
        log = self._log
        files = self._files
        if not tail:
            known_segments = list(log.segment_sizes)
            log.segment = max([start, *[number + 1 for number in known_segments]])
            log.rows = BytesWriter()
            log.fd = files.create(f"{self._directory}/{log_name(int(log.segment))}")
            files.sync_directory(self._directory)
            log.segment_sizes[int(log.segment)] = 0
            return
        log.segment = tail[-1]
        log.fd = files.open_to_write(f"{self._directory}/{log_name(int(log.segment))}")
        if files.size(log.fd) > log.offset and not self._has_damage:
            files.truncate(log.fd, int(log.offset))
        # After kill -9 the last frames may be in the page cache only, and later frames will prove
        # them synced.
        files.sync(log.fd)
        log.segment_sizes[int(log.segment)] = int(log.offset)
        if log.offset < self._segment_bytes and not self._has_damage:
            return
        files.close(log.fd)
        log.fd = -1
        write_index(files, self._directory, log.segment, log.offset, log.rows.getvalue())
        log.segment += 1
        log.offset = 0
        log.rows = BytesWriter()
        log.fd = files.create(f"{self._directory}/{log_name(int(log.segment))}")
        files.sync_directory(self._directory)
        log.segment_sizes[int(log.segment)] = 0


def _strip_preallocated(tail: bytes) -> bytes:
    """Return the bytes after the last whole frame without the zeros of preallocated space.

    A few zeros may be the end of a torn frame.
    """
    written = tail.rstrip(b"\0")
    return written if not written or len(tail) - len(written) >= _SECTOR_BYTES else tail

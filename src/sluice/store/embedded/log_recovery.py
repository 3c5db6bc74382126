"""What a start finds in the directory, and how it becomes the past of the queues again.

    1  the newest snapshot that is sound goes to the loader
    2  each full segment before it: rows from its index, or from its log if the index is missing or damaged
    3  the part of the snapshot's own segment that it covers: rows, from the log
    4  every frame behind it: records. Each frame's lsn is one more than the last
    5  a broken frame: proven to have been synced, it is damage, and the store does not open (or, with `salvage`, goes
       on behind it and lists what is lost). Otherwise a crash tore it, nobody was ever told of it, and it is cut off
    6  the last segment is synced, whoever wrote it, and sealed if it is full

A crash anywhere in here is legal: each step only removes what no later step of another start would need. Applying
acknowledgements to messages and counting what lives is the loader's.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import StoreDamaged, UnusableRecord
from sluice.store.embedded.files import Files
from sluice.store.embedded.frame_format import FRAME_BYTES, LIMIT, guess_lost
from sluice.store.embedded.segment_index import Index, pieces, read_index, write_index
from sluice.store.embedded.layout import Listing, index_name, log_name
from sluice.store.embedded.segment_scan import Frame, SegmentScan
from sluice.store.embedded.snapshot_file import Snapshot, read_snapshot
from sluice.store.snapshot_policy import Pace
from sluice.store.protocol import MESSAGE, ROW_BYTES, Loader, Record, Recovery, read_row, write_row

_UNKNOWN: Final = -1  # an lsn that cannot be foretold
_END: Final = -1  # no more frames in this segment
_SECTOR_BYTES: Final = 512


class Recovered:
    """Where the log goes on: the segment that is open for writing, and what is known of those before it."""

    def __init__(self, report: Recovery) -> None:
        self.report = report
        self.fd: int = -1
        self.segment: i64 = 1
        self.offset: i64 = 0
        self.lsn: i64 = 0  # of the last frame
        self.rows: BytesWriter = BytesWriter()  # of the messages in the open segment
        self.sizes: dict[int, int] = {}


class Recoverer:
    def __init__(
        self,
        files: Files,
        directory: str,
        salt: int,
        segment_bytes: int,
        salvage: bool,
        loader: Loader,
        pace: Pace,
        read_only: bool = False,
    ) -> None:
        self._files = files
        self._directory = directory
        self._salt: i64 = salt
        self._segment_bytes: i64 = segment_bytes
        self._salvage = salvage
        self._loader = loader
        self._pace = pace
        self._read_only = read_only
        self._damaged = False
        self._report = Recovery()
        self._log = Recovered(self._report)

    def run(self) -> Recovered:
        if not self._read_only:
            # After kill -9 the names may be in the cache only; what is removed below, or
            # acknowledged later, rests on
            # them.
            self._files.sync_directory(self._directory)
        listing = Listing(self._files.names(self._directory))
        if not self._read_only:
            self._remove_leftovers(listing)
        snapshot = self._choose_snapshot(listing)
        start = 1
        covered = 0
        if snapshot is not None:
            start, covered = snapshot.segment, snapshot.offset
            self._log.lsn = snapshot.lsn
            try:
                self._loader.load_snapshot(snapshot.state)
            except UnusableRecord as error:
                raise StoreDamaged(
                    f"{self._directory}/{snapshot.name}",
                    0,
                    error.what,
                    "Restore it from a backup, or move this file away and start once with --salvage: "
                    "the log is read without it then, and settled messages may come back",
                ) from error
            self._pace.loaded(len(snapshot.state))
            for segment in listing.segments:
                if segment < start:
                    self._load_old(segment, snapshot)
        elif listing.segments and listing.segments[0] != 1:
            self._lost_beginning(listing)
            start = listing.segments[0]
            self._log.lsn = _UNKNOWN
        tail = [segment for segment in listing.segments if segment >= start]
        self._check_row_of(tail, start, snapshot is not None)
        for segment in tail:
            self._walk(segment, covered if segment == start else 0, segment == tail[-1])
        if self._log.lsn == _UNKNOWN:
            self._log.lsn = 0
        if self._read_only:
            self._log.segment = tail[-1] if tail else start
        else:
            self._go_on(tail, start)
        self._pace.sealed = int(self._log.segment) != start
        if self._damaged:  # whatever the next snapshot costs: with it a start needs nothing of what is broken
            self._pace.loaded(0)
        self._report.segments = len(self._log.sizes)
        return self._log

    def _remove_leftovers(self, listing: Listing) -> None:
        for name in listing.temporary:
            self._files.unlink(f"{self._directory}/{name}")
        for number in listing.indexes:
            if number not in listing.segments:  # its log was given back, and then the power went
                self._files.unlink(f"{self._directory}/{index_name(number)}")

    # -- snapshots and full segments

    def _choose_snapshot(self, listing: Listing) -> Snapshot | None:
        """The newest that is sound. The one before it is there only if the power went before it was removed; if the
        segments it relies on are there too, the log leads from it to the same end."""
        newer = ""
        for name in reversed(listing.snapshots):
            snapshot = read_snapshot(self._files, self._directory, name)
            if snapshot is None:
                self._report.notes.append(f"snapshot {name} is damaged")
                newer = name
                continue
            for segment in snapshot.kept:
                if segment not in listing.segments:
                    what = "it cannot be read, and the one before it needs segments that are gone"
                    self._damage(newer or log_name(segment), 0, what if newer else "the segment is missing")
            return snapshot
        return None

    def _lost_beginning(self, listing: Listing) -> None:
        name = listing.snapshots[-1] if listing.snapshots else log_name(1)
        self._damage(name, 0, "no snapshot is readable, and the log without one begins too late")
        self._report.notes.append("without the snapshot, messages that were settled long ago may come back")

    def _load_old(self, segment: int, snapshot: Snapshot) -> None:
        """A full segment before the snapshot's: its messages as rows."""
        if segment not in snapshot.kept:
            if not self._read_only:
                self._files.unlink(f"{self._directory}/{log_name(segment)}")
                self._files.unlink(f"{self._directory}/{index_name(segment)}")
            return
        index = read_index(self._files, self._directory, segment)
        if index is None:
            self._walk(segment, LIMIT, False)
            return
        fd = self._files.open_to_read(f"{self._directory}/{log_name(segment)}")
        size = self._files.size(fd)
        self._files.close(fd)
        self._log.sizes[segment] = size
        rows = index.rows
        if size < index.log_bytes:
            rows = self._cut_short(segment, size, index)
        self._load_rows(segment, rows)

    def _cut_short(self, segment: int, size: int, index: Index) -> bytes:
        """A full segment has lost its end. Returns the rows of the messages that are left."""
        kept = BytesWriter()
        lost = 0
        for at in range(0, len(index.rows), ROW_BYTES):
            row = read_row(index.rows, at)
            if int(row.address & LIMIT) + int(row.size) <= size:
                kept.write(index.rows[at : at + ROW_BYTES])
            else:
                lost += 1
                self._report.lost.append((int(row.pid), int(row.seq)))
        self._damage(
            log_name(segment),
            size,
            f"the file ends here, and had {index.log_bytes - size} bytes more when it was full, "
            f"with {lost} messages in them",
        )
        rows = kept.getvalue()
        if not self._read_only:  # so that the next start needs no salvage
            write_index(self._files, self._directory, segment, size, rows)
        return rows

    def _check_row_of(self, tail: list[int], start: int, needed: bool) -> None:
        """The segments from the snapshot on follow each other without a gap."""
        if needed and (not tail or tail[0] != start):
            self._damage(log_name(start), 0, "the segment is missing")
        for nth in range(1, len(tail)):
            if tail[nth] != tail[nth - 1] + 1:
                self._damage(log_name(tail[nth - 1] + 1), 0, "the segment is missing")

    # -- frames

    def _walk(self, segment: int, covered: i64, last: bool) -> None:
        """Go through one log: frames before `covered` give rows, those behind it records. An index that a full
        segment should have and has not is written on the way."""
        fd = self._files.open_to_read(f"{self._directory}/{log_name(segment)}")
        try:
            scan = SegmentScan(self._files, fd, segment, self._salt)
            end = self._walk_frames(scan, covered, last)
            self._log.sizes[segment] = int(scan.size)
        finally:
            self._files.close(fd)
        if last:
            self._log.offset = end
        elif not self._read_only and read_index(self._files, self._directory, segment) is None:
            write_index(self._files, self._directory, segment, scan.size, self._log.rows.getvalue())
            self._files.sync_directory(self._directory)
            self._report.rebuilt_indexes += 1

    def _walk_frames(self, scan: SegmentScan, covered: i64, last: bool) -> i64:
        rows = BytesWriter()
        self._log.rows = rows
        offset: i64 = 0
        lsn: i64 = _UNKNOWN
        behind = covered == 0
        if behind:
            lsn = self._log.lsn
        while offset < scan.size:
            if not behind and offset >= covered:
                behind = True
                lsn = self._log.lsn
                self._load_rows(int(scan.segment), rows.getvalue())
            frame = scan.frame_at(offset)
            if frame is None:
                resume = self._broken(scan, offset, lsn, last and behind)
                if resume == _END:
                    break
                offset = resume
                lsn = _UNKNOWN
                continue
            if lsn != _UNKNOWN and frame.head.lsn != lsn + 1:
                what = f"frame {frame.head.lsn} stands where {lsn + 1} should"
                self._damage(log_name(int(scan.segment)), offset, what)
            lsn = frame.head.lsn
            self._take(frame, rows, behind)
            if behind:
                self._log.lsn = lsn
                self._pace.written += frame.end - offset
            offset = frame.end
        if not behind:
            self._load_rows(int(scan.segment), rows.getvalue())
        if offset < covered and covered != LIMIT:
            self._damage(
                log_name(int(scan.segment)), offset, "the log ends before the snapshot's place in it"
            )
        return offset

    def _take(self, frame: Frame, rows: BytesWriter, behind: bool) -> None:
        for record in frame.records:
            if record.kind == MESSAGE:
                write_row(rows, record.address, record)
                if behind:
                    self._report.messages += 1
            if behind:
                self._load_record(record)
        if behind:
            self._report.frames += 1
            self._report.records += len(frame.records)

    def _load_record(self, record: Record) -> None:
        try:
            self._loader.load_record(record)
        except UnusableRecord as error:
            self._damage(log_name(int(record.address >> 32)), record.address & LIMIT, error.what)
            if record.kind == MESSAGE:
                self._report.lost.append((int(record.pid), int(record.seq)))

    def _load_rows(self, segment: int, rows: bytes) -> None:
        self._report.messages += len(rows) // ROW_BYTES
        try:
            for piece in pieces(rows):
                self._loader.load_rows(piece)
        except UnusableRecord as error:
            raise StoreDamaged(
                f"{self._directory}/{index_name(segment)}",
                0,
                error.what,
                "Move this file away and start again: it is made anew from the log",
            ) from error

    # -- what is broken

    def _broken(self, scan: SegmentScan, offset: i64, lsn: i64, may_be_torn: bool) -> i64:
        """A frame that should begin at `offset` is not whole. Returns where to go on, or _END."""
        name = log_name(int(scan.segment))
        if may_be_torn and not self._was_synced(scan, offset, lsn):
            torn = len(_without_laid_out(scan.raw(offset, scan.size)))
            if torn == 0:
                return _END
            self._report.torn_bytes += torn
            self._report.notes.append(
                f"the end of {name} "
                + (f"is torn by {torn} B" if self._read_only else f"was cut by {torn} B")
                + ": a write that a crash interrupted"
                + (". The next start cuts it off" if self._read_only else "")
            )
            return _END
        self._damage(name, offset, "a frame that had been synced is broken")
        resume = scan.search(offset + 1)
        end = resume if resume >= 0 else scan.size
        guess_lost(scan.raw(offset, end), FRAME_BYTES, end - offset, self._report.lost)
        return resume if resume >= 0 else _END

    def _was_synced(self, scan: SegmentScan, offset: i64, lsn: i64) -> bool:
        """Whether a later frame proves that the frame behind `lsn`, broken now, had been synced. Later segments need
        not be asked: there are none behind a frame that may be torn."""
        at = scan.search(offset + 1)
        while at >= 0:
            frame = scan.frame_at(at)
            if frame is None:
                at = scan.search(at + 1)
                continue
            if lsn == _UNKNOWN or frame.head.lsn - 1 - frame.head.unsynced > lsn:
                return True
            at = scan.search(frame.end)
        return False

    def _damage(self, name: str, offset: i64, what: str) -> None:
        """Refuse to open; or, when asked to salvage, remember it for the report and return."""
        if not self._salvage:
            raise StoreDamaged(f"{self._directory}/{name}", int(offset), what)
        self._damaged = True
        self._report.notes.append(f"{name} is damaged at byte {offset}: {what}")

    # -- and on

    def _go_on(self, tail: list[int], start: int) -> None:
        """Open the last segment for writing. A full one is sealed first. So is one that was salvaged: the next
        snapshot then begins behind the damage, and the start after that does not meet it again."""
        log = self._log
        files = self._files
        if not tail:
            known = list(log.sizes)
            log.segment = max([start, *[number + 1 for number in known]])
            log.rows = BytesWriter()
            log.fd = files.create(f"{self._directory}/{log_name(int(log.segment))}")
            files.sync_directory(self._directory)
            log.sizes[int(log.segment)] = 0
            return
        log.segment = tail[-1]
        log.fd = files.open_to_write(f"{self._directory}/{log_name(int(log.segment))}")
        if files.size(log.fd) > log.offset and not self._damaged:
            files.truncate(log.fd, int(log.offset))
        # After kill -9 the last frames may be in the page cache only, and the frames to come will vouch for them.
        files.sync(log.fd)
        log.sizes[int(log.segment)] = int(log.offset)
        if log.offset < self._segment_bytes and not self._damaged:
            return
        files.close(log.fd)
        log.fd = -1
        write_index(files, self._directory, log.segment, log.offset, log.rows.getvalue())
        log.segment += 1
        log.offset = 0
        log.rows = BytesWriter()
        log.fd = files.create(f"{self._directory}/{log_name(int(log.segment))}")
        files.sync_directory(self._directory)
        log.sizes[int(log.segment)] = 0


def _without_laid_out(rest: bytes) -> bytes:
    """What stands behind the last whole frame, less the zeros that the writer had laid out for the next ones. A few
    zeros may be the end of a frame that was torn."""
    written = rest.rstrip(b"\0")
    return written if not written or len(rest) - len(written) >= _SECTOR_BYTES else rest

"""Tests of starts with torn, truncated, changed or missing files: no loss is silent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.errors import StoreDamaged, StoreError, StoreUnknown
from sluice.store.embedded.frame_format import FRAME_HEADER_BYTES, encode_frame_header
from sluice.store.snapshot_policy import SMALL_SNAPSHOT_BYTES
from tests.store.kit import StoreUnderTest, frame_of, message, note


class StoreDirectory:
    """A closed store whose files a test can damage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self, work: Callable[[StoreUnderTest], object]) -> None:
        store = StoreUnderTest(self.directory).open()
        work(store)
        store.store.close()

    def path(self, name: str) -> Path:
        return self.directory / name

    def flip(self, name: str, at: int) -> None:
        data = bytearray(self.path(name).read_bytes())
        data[at] ^= 0x10
        self.path(name).write_bytes(data)

    def snapshots(self) -> list[Path]:
        return sorted(self.directory.glob("*.state"))

    def open(self, salvage: bool = False) -> StoreUnderTest:
        return StoreUnderTest(self.directory, salvage=salvage).open()

    def seqs(self, salvage: bool = False) -> list[int]:
        """Return the messages that a start restores and that are readable; set `self.report`."""
        store = self.open(salvage)
        self.report = store.report
        found = store.loaded.addresses()
        assert None not in store.read(list(found.values()))
        store.store.close()
        return sorted(seq for _, seq in found)


@pytest.fixture
def store_directory(tmp_path: Path) -> StoreDirectory:
    return StoreDirectory(tmp_path / "store")


def ten_frames(store: StoreUnderTest) -> None:
    for seq in range(10):
        store.commit(message(seq, b"body %d" % seq), note(seq))


def full_segments(store: StoreUnderTest) -> None:
    """Segments 1 and 2 full, a snapshot, 3 full, 4 begun."""
    store.fill_segment(0)
    store.fill_segment(1000)
    store.snapshot(b"state")
    store.fill_segment(2000)
    store.commit(message(3000))


def frame_starts(path: Path) -> list[int]:
    """Return the offsets of frames in a log, by their lengths."""
    data, at, starts = path.read_bytes(), 0, []
    while at < len(data):
        starts.append(at)
        at += FRAME_HEADER_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
    return starts


# -- the end of the log


def test_log_that_ends_at_any_byte_of_its_last_frame_opens_without_that_frame(
    store_directory: StoreDirectory, tmp_path: Path
) -> None:
    store_directory.fill(ten_frames)
    whole = store_directory.path("00000001.log").read_bytes()
    last = frame_starts(store_directory.path("00000001.log"))[-1]
    for length in range(last, len(whole) + 1):
        copy = StoreDirectory(tmp_path / "copy")
        shutil.copytree(store_directory.directory, copy.directory)
        copy.path("00000001.log").write_bytes(whole[:length])
        expected = list(range(10 if length == len(whole) else 9))
        assert copy.seqs() == expected
        assert copy.report.torn_bytes == (length - last if length < len(whole) else 0)
        assert len(copy.path("00000001.log").read_bytes()) == (
            last if length < len(whole) else length
        )
        copy.fill(lambda store: store.commit(message(77)))
        assert copy.seqs() == [*expected, 77], "the log continues where it was truncated"
        assert copy.report.torn_bytes == 0 and copy.report.warnings == []
        shutil.rmtree(copy.directory)


def test_flipped_byte_in_the_last_frame_reads_as_a_torn_write_and_is_reported(
    store_directory: StoreDirectory, tmp_path: Path
) -> None:
    store_directory.fill(ten_frames)
    last = frame_starts(store_directory.path("00000001.log"))[-1]
    size = store_directory.path("00000001.log").stat().st_size
    for at in range(last, size):
        copy = StoreDirectory(tmp_path / "copy")
        shutil.copytree(store_directory.directory, copy.directory)
        copy.flip("00000001.log", at)
        assert copy.seqs() == list(range(9))
        assert copy.report.torn_bytes == size - last
        assert "was cut by" in copy.report.warnings[0]
        shutil.rmtree(copy.directory)


@pytest.mark.parametrize("rest", [b"\0" * 5000, b"SLF1" * 300, b"\xff" * 3])
def test_garbage_after_the_last_frame_is_truncated(
    store_directory: StoreDirectory, rest: bytes
) -> None:
    store_directory.fill(ten_frames)
    with store_directory.path("00000001.log").open("ab") as log:
        log.write(rest)
    assert store_directory.seqs() == list(range(10))
    # Zeros are preallocated, not torn.
    assert store_directory.report.torn_bytes == len(rest.strip(b"\0"))
    assert store_directory.seqs() == list(range(10)) and store_directory.report.torn_bytes == 0


def test_unsynced_frames_may_be_torn_in_the_middle_and_are_truncated_there(
    store_directory: StoreDirectory,
) -> None:
    def work(store: StoreUnderTest) -> None:
        store.commit(message(1))
        for seq in range(2, 6):
            store.commit(message(seq, b"x" * 100), sync=False)

    store_directory.fill(work)
    starts = frame_starts(store_directory.path("00000001.log"))
    store_directory.flip("00000001.log", starts[2] + 50)
    assert store_directory.seqs() == [1, 2]
    assert store_directory.report.torn_bytes > 0


# -- damage


@pytest.mark.parametrize("nth", [0, 4, 8])
def test_broken_frame_before_a_sound_one_is_damage_with_position_and_remedy(
    store_directory: StoreDirectory, nth: int
) -> None:
    store_directory.fill(ten_frames)
    start = frame_starts(store_directory.path("00000001.log"))[nth]
    for at in (start + 5, start + FRAME_HEADER_BYTES + 42):
        store_directory.flip("00000001.log", at)
        before = store_directory.path("00000001.log").read_bytes()
        with pytest.raises(
            StoreDamaged, match=f"00000001.log is damaged at byte {start}.*salvage"
        ) as refusal:
            store_directory.open()
        assert refusal.value.offset == start
        assert store_directory.path("00000001.log").read_bytes() == before, (
            "a refusal changes nothing"
        )
        store_directory.flip("00000001.log", at)
    assert store_directory.seqs() == list(range(10))


def test_salvage_continues_after_the_damage_and_lists_what_is_lost(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(ten_frames)
    start = frame_starts(store_directory.path("00000001.log"))[4]
    store_directory.flip("00000001.log", start + FRAME_HEADER_BYTES + 42)
    assert store_directory.seqs(salvage=True) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert store_directory.report.lost_messages == [(1, 4)]
    assert any(f"at byte {start}" in line for line in store_directory.report.warnings)


@pytest.mark.parametrize(
    "state", [b"", bytes(SMALL_SNAPSHOT_BYTES + 100_000)], ids=["no snapshot", "a large snapshot"]
)
def test_after_salvage_and_snapshot_the_store_opens_normally(
    store_directory: StoreDirectory, state: bytes
) -> None:
    def fill(store: StoreUnderTest) -> None:
        if state:
            store.snapshot(state)
        ten_frames(store)

    store_directory.fill(fill)
    store_directory.flip("00000001.log", frame_starts(store_directory.path("00000001.log"))[4] + 3)
    with pytest.raises(StoreDamaged):
        store_directory.open()
    store = store_directory.open(salvage=True)
    assert store.store.is_snapshot_due()
    store.commit(message(50))
    store.snapshot(b"clean")
    store.store.close()
    assert store_directory.seqs() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 50]
    assert store_directory.report.warnings == []


def test_damage_in_a_full_segment_after_the_snapshot_is_found(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(full_segments)
    start = frame_starts(store_directory.path("00000003.log"))[-1]
    store_directory.flip("00000003.log", start + 30)
    with pytest.raises(StoreDamaged, match=f"00000003.log is damaged at byte {start}"):
        store_directory.open()
    everything = store_directory.seqs(salvage=True)
    assert 3000 in everything and len(store_directory.report.lost_messages) == 1
    assert store_directory.report.lost_messages[0][1] not in everything


def test_damaged_message_of_a_full_segment_reads_as_none_and_its_neighbors_do_not(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(full_segments)
    store = store_directory.open()
    old = [row.address for row in store.loaded.rows]
    store_directory.flip("00000001.log", (old[7] & 0xFFFF_FFFF) + 500)  # in its body
    store_directory.flip("00000001.log", (old[9] & 0xFFFF_FFFF) + 6)  # in its size
    answers = store.read(old)
    assert [nth for nth, data in enumerate(answers) if data is None] == [7, 9]
    store.store.close()


@pytest.mark.parametrize("lost", [5000, 30_000], ids=["the end", "half"])
def test_truncated_full_segment_is_damage(store_directory: StoreDirectory, lost: int) -> None:
    store_directory.fill(full_segments)
    everything = store_directory.seqs()
    path = store_directory.path("00000001.log")
    size = path.stat().st_size - lost
    path.write_bytes(path.read_bytes()[:size])
    index = store_directory.path("00000001.idx").read_bytes()
    with pytest.raises(
        StoreDamaged,
        match=rf"00000001.log is damaged at byte {size}: .* had {lost} bytes more, .*--salvage",
    ):
        store_directory.open()
    assert store_directory.path("00000001.idx").read_bytes() == index, "a refusal changes nothing"
    left = store_directory.seqs(salvage=True)
    gone = [seq for seq in everything if seq not in left]
    assert gone == [seq for _, seq in store_directory.report.lost_messages]
    assert lost // 1100 <= len(gone) <= lost // 1000 + 1
    assert f"with {len(gone)} messages in them" in store_directory.report.warnings[0]
    assert store_directory.seqs() == left, "the next start needs no salvage"


# -- indexes and snapshots


@pytest.mark.parametrize("harm", ["lost", "flipped", "cut", "of another segment"])
def test_lost_or_damaged_index_is_rebuilt(store_directory: StoreDirectory, harm: str) -> None:
    store_directory.fill(full_segments)
    everything = store_directory.seqs()
    path = store_directory.path("00000001.idx")
    good = path.read_bytes()
    if harm == "lost":
        path.unlink()
    elif harm == "flipped":
        store_directory.flip("00000001.idx", len(good) // 2)
    elif harm == "cut":
        path.write_bytes(good[:-40])
    else:
        shutil.copy(store_directory.path("00000002.idx"), path)
    assert store_directory.seqs() == everything
    assert store_directory.report.rebuilt_indexes == 1
    assert path.read_bytes() == good
    assert store_directory.seqs() == everything and store_directory.report.rebuilt_indexes == 0


def test_lost_index_over_a_damaged_log_is_damage(store_directory: StoreDirectory) -> None:
    store_directory.fill(full_segments)
    everything = store_directory.seqs()
    store_directory.path("00000001.idx").unlink()
    start = frame_starts(store_directory.path("00000001.log"))[3]
    store_directory.flip("00000001.log", start + 100)
    with pytest.raises(StoreDamaged, match=f"00000001.log is damaged at byte {start}"):
        store_directory.open()
    left = store_directory.seqs(salvage=True)
    assert store_directory.report.lost_messages == [(1, 3)]
    assert set(everything) - set(left) == {3}


def test_scan_does_not_need_the_index(store_directory: StoreDirectory) -> None:
    store_directory.fill(full_segments)
    store = store_directory.open()
    with_index = [row.address for row in store.scan(1)]
    store_directory.path("00000001.idx").unlink()
    assert [row.address for row in store.scan(1)] == with_index
    store.store.close()


@pytest.mark.parametrize("at", [0, 5, 20, -1])
def test_without_a_sound_snapshot_a_complete_log_is_read_from_its_start(
    store_directory: StoreDirectory, at: int
) -> None:
    store_directory.fill(full_segments)
    everything = store_directory.seqs()
    store_directory.flip(store_directory.snapshots()[0].name, at)
    store = store_directory.open()
    assert store.loaded.snapshot is None and store.loaded.rows == []
    assert sorted(record.seq for record in store.loaded.records) == everything
    assert "is damaged" in store.report.warnings[0]
    store.snapshot(b"new")
    store.store.close()
    assert len(store_directory.snapshots()) == 1
    assert store_directory.seqs() == everything and store_directory.report.warnings == []


def test_without_a_sound_snapshot_an_incomplete_log_is_refused(
    store_directory: StoreDirectory,
) -> None:
    def work(store: StoreUnderTest) -> None:
        full_segments(store)
        store.snapshot(b"less", free=[1])

    store_directory.fill(work)
    store_directory.flip(store_directory.snapshots()[0].name, 30)
    with pytest.raises(StoreDamaged, match="no snapshot is readable"):
        store_directory.open()
    left = store_directory.seqs(salvage=True)
    assert 3000 in left and 1000 in left and 0 not in left
    assert "may come back" in " ".join(store_directory.report.warnings)


def test_previous_snapshot_is_used_when_the_power_failed_before_its_removal(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(full_segments)
    older = store_directory.snapshots()[0]
    data = older.read_bytes()
    everything = store_directory.seqs()
    store_directory.fill(lambda store: store.snapshot(b"newer"))
    older.write_bytes(data)
    store = store_directory.open()
    assert store.loaded.snapshot == b"newer"
    store.store.close()
    store_directory.flip(store_directory.snapshots()[1].name, 9)
    store = store_directory.open()
    assert store.loaded.snapshot == b"state"
    assert sorted(seq for _, seq in store.loaded.addresses()) == everything
    store.store.close()


@pytest.mark.parametrize("segment", [1, 2, 3, 4])
def test_removed_segment_is_detected(store_directory: StoreDirectory, segment: int) -> None:
    def work(store: StoreUnderTest) -> None:
        full_segments(store)
        store.fill_segment(4000)

    store_directory.fill(work)
    store_directory.path(f"{segment:08}.log").unlink()
    with pytest.raises(
        StoreDamaged, match=f"{segment:08}.log is damaged at byte 0: the segment is missing"
    ):
        store_directory.open()
    assert 4000 in store_directory.seqs(salvage=True) or segment == 4


def test_interrupted_removal_of_segments_is_completed_at_the_next_start(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(full_segments)
    log, index = (
        store_directory.path("00000001.log").read_bytes(),
        store_directory.path("00000001.idx").read_bytes(),
    )
    store_directory.fill(lambda store: store.snapshot(b"s", free=[1, 2]))
    store_directory.path("00000001.log").write_bytes(log)
    store_directory.path("00000002.idx").write_bytes(index)
    store_directory.path("00000009.idx.tmp").write_bytes(b"half")
    assert store_directory.seqs()[0] == 2000
    assert not list(store_directory.directory.glob("0000000[12].*")) and not list(
        store_directory.directory.glob("*.tmp")
    )


# -- the directory


def test_files_of_other_programs_stay(store_directory: StoreDirectory) -> None:
    store_directory.fill(ten_frames)
    for name in ("draft.tmp", "notes.txt"):
        store_directory.path(name).write_bytes(b"x")
    store_directory.fill(ten_frames)
    assert store_directory.path("draft.tmp").exists() and store_directory.path("notes.txt").exists()


def test_newer_layout_is_not_changed(store_directory: StoreDirectory) -> None:
    store_directory.fill(ten_frames)
    store_directory.path("layout").write_text("sluice-log 2 and other fields\n")
    with pytest.raises(StoreUnknown, match="has layout 2, and this Sluice supports layout 1"):
        store_directory.open()


def damage_layout(store_directory: StoreDirectory, harm: str) -> None:
    if harm == "lost":
        store_directory.path("layout").unlink()
    elif harm == "empty":
        store_directory.path("layout").write_bytes(b"")
    else:
        store_directory.flip("layout", 14)


@pytest.mark.parametrize("work", [ten_frames, full_segments])
@pytest.mark.parametrize("harm", ["lost", "flipped", "empty"])
def test_lost_or_damaged_layout_is_rewritten_without_loss(
    store_directory: StoreDirectory, harm: str, work: Callable[[StoreUnderTest], None]
) -> None:
    store_directory.fill(work)
    everything = store_directory.seqs()
    good = store_directory.path("layout").read_bytes()
    damage_layout(store_directory, harm)
    assert store_directory.seqs() == everything
    assert (
        f"layout is {'missing' if harm == 'lost' else 'damaged'}"
        in store_directory.report.warnings[0]
    )
    assert store_directory.path("layout").read_bytes() == good
    assert store_directory.seqs() == everything and store_directory.report.warnings == []


def test_layout_of_a_log_with_one_frame_is_rewritten(store_directory: StoreDirectory) -> None:
    store_directory.fill(lambda store: store.commit(message(1)))
    good = store_directory.path("layout").read_bytes()
    store_directory.path("layout").unlink()
    assert store_directory.seqs() == [1]
    assert store_directory.path("layout").read_bytes() == good


def test_payloads_that_look_like_frames_do_not_reveal_a_wrong_salt(
    store_directory: StoreDirectory,
) -> None:
    record = frame_of([message(7)])
    fake = b"".join(
        encode_frame_header(len(record), 1, 0, lsn, 12345) + record for lsn in range(1, 100)
    )

    def work(store: StoreUnderTest) -> None:
        for seq in range(3):
            store.commit(message(seq, fake))

    store_directory.fill(work)
    good = store_directory.path("layout").read_bytes()
    store_directory.path("layout").unlink()
    assert store_directory.seqs() == [0, 1, 2]
    assert store_directory.path("layout").read_bytes() == good


def test_lost_layout_and_a_broken_first_frame_cost_only_that_frame(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(ten_frames)
    store_directory.path("layout").unlink()
    # In the lsn of the first frame: its header now gives another salt.
    store_directory.flip("00000001.log", 20)
    with pytest.raises(StoreDamaged, match=r"00000001.log is damaged at byte 0"):
        store_directory.open()
    assert not store_directory.path("layout").exists(), "a refusal changes nothing"
    assert store_directory.seqs(salvage=True) == list(range(1, 10))


def test_lost_layout_of_a_log_without_frames_is_rewritten(store_directory: StoreDirectory) -> None:
    store_directory.fill(lambda store: None)
    store_directory.path("layout").unlink()
    assert store_directory.seqs() == []
    store_directory.fill(ten_frames)
    assert store_directory.seqs() == list(range(10)) and store_directory.report.warnings == []


def test_lost_layout_of_an_unreadable_log_is_refused_and_can_be_salvaged(
    store_directory: StoreDirectory,
) -> None:
    store_directory.fill(lambda store: store.commit(message(1)))
    store_directory.path("layout").unlink()
    store_directory.path("00000001.log").write_bytes(b"no frame" * 100)
    with pytest.raises(StoreDamaged, match=r"layout is damaged.*do not agree on one salt"):
        store_directory.open()
    assert not store_directory.path("layout").exists()
    assert store_directory.seqs(salvage=True) == []
    store_directory.fill(ten_frames)
    assert store_directory.seqs() == list(range(10))


def test_slow_checksum_implementation_is_refused(
    store_directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("google_crc32c.implementation", "python")
    with pytest.raises(StoreError, match="google-crc32c runs without its compiled part"):
        store_directory.open()

"""What a torn, cut, flipped or missing file does to a start: nothing acknowledged goes missing in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.errors import StoreDamaged, StoreError, StoreUnknown
from sluice.store.embedded.frame_format import FRAME_BYTES, frame_head
from sluice.store.snapshot_policy import SMALL
from tests.store.kit import StoreUnderTest, frame_of, message, note


class Kept:
    """A closed store whose files a test may spoil."""

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
        """Which messages a start brings back, each checked to be readable; the report stays in `self.report`."""
        store = self.open(salvage)
        self.report = store.report
        found = store.past.addresses()
        assert None not in store.read(list(found.values()))
        store.store.close()
        return sorted(seq for _, seq in found)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "store")


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
    """Where frames begin in a log, by their lengths."""
    data, at, starts = path.read_bytes(), 0, []
    while at < len(data):
        starts.append(at)
        at += FRAME_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
    return starts


# -- the end of the log


def test_a_log_that_ends_at_any_byte_of_its_last_frame_opens_without_that_frame(
    kept: Kept, tmp_path: Path
) -> None:
    kept.fill(ten_frames)
    whole = kept.path("00000001.log").read_bytes()
    last = frame_starts(kept.path("00000001.log"))[-1]
    for length in range(last, len(whole) + 1):
        copy = Kept(tmp_path / "copy")
        shutil.copytree(kept.directory, copy.directory)
        copy.path("00000001.log").write_bytes(whole[:length])
        expected = list(range(10 if length == len(whole) else 9))
        assert copy.seqs() == expected
        assert copy.report.torn_bytes == (length - last if length < len(whole) else 0)
        assert len(copy.path("00000001.log").read_bytes()) == (last if length < len(whole) else length)
        copy.fill(lambda store: store.commit(message(77)))
        assert copy.seqs() == [*expected, 77], "and the log goes on where it was cut"
        assert copy.report.torn_bytes == 0 and copy.report.notes == []
        shutil.rmtree(copy.directory)


def test_a_byte_flipped_anywhere_in_the_last_frame_reads_as_a_torn_write_and_is_reported(
    kept: Kept, tmp_path: Path
) -> None:
    kept.fill(ten_frames)
    last = frame_starts(kept.path("00000001.log"))[-1]
    size = kept.path("00000001.log").stat().st_size
    for at in range(last, size):
        copy = Kept(tmp_path / "copy")
        shutil.copytree(kept.directory, copy.directory)
        copy.flip("00000001.log", at)
        assert copy.seqs() == list(range(9))
        assert copy.report.torn_bytes == size - last
        assert "was cut by" in copy.report.notes[0]
        shutil.rmtree(copy.directory)


@pytest.mark.parametrize("rest", [b"\0" * 5000, b"SLF1" * 300, b"\xff" * 3])
def test_rubbish_behind_the_last_frame_is_cut(kept: Kept, rest: bytes) -> None:
    kept.fill(ten_frames)
    with kept.path("00000001.log").open("ab") as log:
        log.write(rest)
    assert kept.seqs() == list(range(10))
    assert kept.report.torn_bytes == len(rest.strip(b"\0"))  # zeros were laid out, not torn
    assert kept.seqs() == list(range(10)) and kept.report.torn_bytes == 0


def test_frames_without_a_sync_may_be_torn_in_the_middle_and_are_cut_from_there(kept: Kept) -> None:
    def work(store: StoreUnderTest) -> None:
        store.commit(message(1))
        for seq in range(2, 6):
            store.commit(message(seq, b"x" * 100), sync=False)

    kept.fill(work)
    starts = frame_starts(kept.path("00000001.log"))
    kept.flip("00000001.log", starts[2] + 50)
    assert kept.seqs() == [1, 2]
    assert kept.report.torn_bytes > 0


# -- damage


@pytest.mark.parametrize("nth", [0, 4, 8])
def test_a_broken_frame_with_a_sound_one_behind_it_is_damage_and_names_its_place_and_cure(
    kept: Kept, nth: int
) -> None:
    kept.fill(ten_frames)
    start = frame_starts(kept.path("00000001.log"))[nth]
    for at in (start + 5, start + FRAME_BYTES + 42):
        kept.flip("00000001.log", at)
        before = kept.path("00000001.log").read_bytes()
        with pytest.raises(
            StoreDamaged, match=f"00000001.log is damaged at byte {start}.*salvage"
        ) as refusal:
            kept.open()
        assert refusal.value.offset == start
        assert kept.path("00000001.log").read_bytes() == before, "a refusal changes nothing"
        kept.flip("00000001.log", at)
    assert kept.seqs() == list(range(10))


def test_salvage_goes_on_behind_the_damage_and_lists_what_is_lost(kept: Kept) -> None:
    kept.fill(ten_frames)
    start = frame_starts(kept.path("00000001.log"))[4]
    kept.flip("00000001.log", start + FRAME_BYTES + 42)
    assert kept.seqs(salvage=True) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert kept.report.lost == [(1, 4)]
    assert any(f"at byte {start}" in line for line in kept.report.notes)


@pytest.mark.parametrize("state", [b"", bytes(SMALL + 100_000)], ids=["no snapshot", "a large snapshot"])
def test_after_a_salvage_and_a_snapshot_the_store_opens_as_any_other(kept: Kept, state: bytes) -> None:
    def fill(store: StoreUnderTest) -> None:
        if state:
            store.snapshot(state)
        ten_frames(store)

    kept.fill(fill)
    kept.flip("00000001.log", frame_starts(kept.path("00000001.log"))[4] + 3)
    with pytest.raises(StoreDamaged):
        kept.open()
    store = kept.open(salvage=True)
    assert store.store.wants_snapshot()
    store.commit(message(50))
    store.snapshot(b"clean")
    store.store.close()
    assert kept.seqs() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 50]
    assert kept.report.notes == []


def test_damage_in_a_full_segment_behind_the_snapshot_is_found(kept: Kept) -> None:
    kept.fill(full_segments)
    start = frame_starts(kept.path("00000003.log"))[-1]
    kept.flip("00000003.log", start + 30)
    with pytest.raises(StoreDamaged, match=f"00000003.log is damaged at byte {start}"):
        kept.open()
    everything = kept.seqs(salvage=True)
    assert 3000 in everything and len(kept.report.lost) == 1
    assert kept.report.lost[0][1] not in everything


def test_a_damaged_message_of_a_full_segment_reads_as_none_and_its_neighbours_do_not(kept: Kept) -> None:
    kept.fill(full_segments)
    store = kept.open()
    old = [row.address for row in store.past.rows]
    kept.flip("00000001.log", (old[7] & 0xFFFF_FFFF) + 500)  # in its body
    kept.flip("00000001.log", (old[9] & 0xFFFF_FFFF) + 6)  # in its size
    answers = store.read(old)
    assert [nth for nth, data in enumerate(answers) if data is None] == [7, 9]
    store.store.close()


@pytest.mark.parametrize("lost", [5000, 30_000], ids=["the end", "half"])
def test_a_full_segment_that_lost_its_end_is_damage(kept: Kept, lost: int) -> None:
    kept.fill(full_segments)
    everything = kept.seqs()
    path = kept.path("00000001.log")
    size = path.stat().st_size - lost
    path.write_bytes(path.read_bytes()[:size])
    index = kept.path("00000001.idx").read_bytes()
    with pytest.raises(
        StoreDamaged, match=rf"00000001.log is damaged at byte {size}: .* had {lost} bytes more .*--salvage"
    ):
        kept.open()
    assert kept.path("00000001.idx").read_bytes() == index, "a refusal changes nothing"
    left = kept.seqs(salvage=True)
    gone = [seq for seq in everything if seq not in left]
    assert gone == [seq for _, seq in kept.report.lost]
    assert lost // 1100 <= len(gone) <= lost // 1000 + 1
    assert f"with {len(gone)} messages in them" in kept.report.notes[0]
    assert kept.seqs() == left, "the next start needs no salvage"


# -- indexes and snapshots


@pytest.mark.parametrize("harm", ["lost", "flipped", "cut", "of another segment"])
def test_an_index_that_is_lost_or_damaged_is_made_again(kept: Kept, harm: str) -> None:
    kept.fill(full_segments)
    everything = kept.seqs()
    path = kept.path("00000001.idx")
    good = path.read_bytes()
    if harm == "lost":
        path.unlink()
    elif harm == "flipped":
        kept.flip("00000001.idx", len(good) // 2)
    elif harm == "cut":
        path.write_bytes(good[:-40])
    else:
        shutil.copy(kept.path("00000002.idx"), path)
    assert kept.seqs() == everything
    assert kept.report.rebuilt_indexes == 1
    assert path.read_bytes() == good
    assert kept.seqs() == everything and kept.report.rebuilt_indexes == 0


def test_a_lost_index_over_a_damaged_log_is_damage(kept: Kept) -> None:
    kept.fill(full_segments)
    everything = kept.seqs()
    kept.path("00000001.idx").unlink()
    start = frame_starts(kept.path("00000001.log"))[3]
    kept.flip("00000001.log", start + 100)
    with pytest.raises(StoreDamaged, match=f"00000001.log is damaged at byte {start}"):
        kept.open()
    left = kept.seqs(salvage=True)
    assert kept.report.lost == [(1, 3)]
    assert set(everything) - set(left) == {3}


def test_a_scan_does_without_the_index(kept: Kept) -> None:
    kept.fill(full_segments)
    store = kept.open()
    with_index = [row.address for row in store.scan(1)]
    kept.path("00000001.idx").unlink()
    assert [row.address for row in store.scan(1)] == with_index
    store.store.close()


@pytest.mark.parametrize("at", [0, 5, 20, -1])
def test_without_a_sound_snapshot_a_complete_log_is_read_from_its_beginning(kept: Kept, at: int) -> None:
    kept.fill(full_segments)
    everything = kept.seqs()
    kept.flip(kept.snapshots()[0].name, at)
    store = kept.open()
    assert store.past.snapshot is None and store.past.rows == []
    assert sorted(record.seq for record in store.past.records) == everything
    assert "is damaged" in store.report.notes[0]
    store.snapshot(b"new")
    store.store.close()
    assert len(kept.snapshots()) == 1
    assert kept.seqs() == everything and kept.report.notes == []


def test_without_a_sound_snapshot_an_incomplete_log_is_refused(kept: Kept) -> None:
    def work(store: StoreUnderTest) -> None:
        full_segments(store)
        store.snapshot(b"less", free=[1])

    kept.fill(work)
    kept.flip(kept.snapshots()[0].name, 30)
    with pytest.raises(StoreDamaged, match="no snapshot is readable"):
        kept.open()
    left = kept.seqs(salvage=True)
    assert 3000 in left and 1000 in left and 0 not in left
    assert "may come back" in " ".join(kept.report.notes)


def test_the_snapshot_before_is_used_when_the_power_went_before_its_removal(kept: Kept) -> None:
    kept.fill(full_segments)
    older = kept.snapshots()[0]
    data = older.read_bytes()
    everything = kept.seqs()
    kept.fill(lambda store: store.snapshot(b"newer"))
    older.write_bytes(data)
    store = kept.open()
    assert store.past.snapshot == b"newer"
    store.store.close()
    kept.flip(kept.snapshots()[1].name, 9)
    store = kept.open()
    assert store.past.snapshot == b"state"
    assert sorted(seq for _, seq in store.past.addresses()) == everything
    store.store.close()


@pytest.mark.parametrize("segment", [1, 2, 3, 4])
def test_a_segment_that_somebody_removed_is_missed(kept: Kept, segment: int) -> None:
    def work(store: StoreUnderTest) -> None:
        full_segments(store)
        store.fill_segment(4000)

    kept.fill(work)
    kept.path(f"{segment:08}.log").unlink()
    with pytest.raises(StoreDamaged, match=f"{segment:08}.log is damaged at byte 0: the segment is missing"):
        kept.open()
    assert 4000 in kept.seqs(salvage=True) or segment == 4


def test_segments_whose_removal_was_interrupted_are_removed_at_the_next_start(kept: Kept) -> None:
    kept.fill(full_segments)
    log, index = kept.path("00000001.log").read_bytes(), kept.path("00000001.idx").read_bytes()
    kept.fill(lambda store: store.snapshot(b"s", free=[1, 2]))
    kept.path("00000001.log").write_bytes(log)
    kept.path("00000002.idx").write_bytes(index)
    kept.path("00000009.idx.tmp").write_bytes(b"half")
    assert kept.seqs()[0] == 2000
    assert not list(kept.directory.glob("0000000[12].*")) and not list(kept.directory.glob("*.tmp"))


# -- the directory


def test_a_later_layout_is_left_alone(kept: Kept) -> None:
    kept.fill(ten_frames)
    kept.path("layout").write_text("sluice-log 2 and whatever comes then\n")
    with pytest.raises(StoreUnknown, match="has layout 2, and this Sluice knows layout 1"):
        kept.open()


def lose_layout(kept: Kept, harm: str) -> None:
    if harm == "lost":
        kept.path("layout").unlink()
    elif harm == "empty":
        kept.path("layout").write_bytes(b"")
    else:
        kept.flip("layout", 14)


@pytest.mark.parametrize("work", [ten_frames, full_segments])
@pytest.mark.parametrize("harm", ["lost", "flipped", "empty"])
def test_a_lost_or_damaged_layout_is_written_again_and_nothing_is_lost(
    kept: Kept, harm: str, work: Callable[[StoreUnderTest], None]
) -> None:
    kept.fill(work)
    everything = kept.seqs()
    good = kept.path("layout").read_bytes()
    lose_layout(kept, harm)
    assert kept.seqs() == everything
    assert f"layout is {'missing' if harm == 'lost' else 'damaged'}" in kept.report.notes[0]
    assert kept.path("layout").read_bytes() == good
    assert kept.seqs() == everything and kept.report.notes == []


def test_the_layout_of_a_log_with_one_frame_is_written_again(kept: Kept) -> None:
    kept.fill(lambda store: store.commit(message(1)))
    good = kept.path("layout").read_bytes()
    kept.path("layout").unlink()
    assert kept.seqs() == [1]
    assert kept.path("layout").read_bytes() == good


def test_payloads_that_look_like_frames_do_not_pass_for_the_salt_of_the_log(kept: Kept) -> None:
    record = frame_of([message(7)])
    fake = b"".join(frame_head(len(record), 1, 0, lsn, 12345) + record for lsn in range(1, 100))

    def work(store: StoreUnderTest) -> None:
        for seq in range(3):
            store.commit(message(seq, fake))

    kept.fill(work)
    good = kept.path("layout").read_bytes()
    kept.path("layout").unlink()
    assert kept.seqs() == [0, 1, 2]
    assert kept.path("layout").read_bytes() == good


def test_a_lost_layout_and_a_broken_first_frame_cost_that_frame_alone(kept: Kept) -> None:
    kept.fill(ten_frames)
    kept.path("layout").unlink()
    kept.flip("00000001.log", 20)  # in the lsn of the first frame: its header gives another salt now
    with pytest.raises(StoreDamaged, match=r"00000001.log is damaged at byte 0"):
        kept.open()
    assert not kept.path("layout").exists(), "a refusal changes nothing"
    assert kept.seqs(salvage=True) == list(range(1, 10))


def test_a_lost_layout_of_a_log_without_frames_is_written_again(kept: Kept) -> None:
    kept.fill(lambda store: None)
    kept.path("layout").unlink()
    assert kept.seqs() == []
    kept.fill(ten_frames)
    assert kept.seqs() == list(range(10)) and kept.report.notes == []


def test_a_lost_layout_of_a_log_that_cannot_be_read_is_refused_and_salvaged(kept: Kept) -> None:
    kept.fill(lambda store: store.commit(message(1)))
    kept.path("layout").unlink()
    kept.path("00000001.log").write_bytes(b"no frame" * 100)
    with pytest.raises(StoreDamaged, match=r"layout is damaged.*do not agree on the salt"):
        kept.open()
    assert not kept.path("layout").exists()
    assert kept.seqs(salvage=True) == []
    kept.fill(ten_frames)
    assert kept.seqs() == list(range(10))


def test_the_slow_checksum_is_refused(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google_crc32c.implementation", "python")
    with pytest.raises(StoreError, match="google-crc32c runs without its compiled part"):
        kept.open()

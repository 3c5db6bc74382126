"""Tests of frames that the loop writes itself: when it does, and that nothing else changes."""

from __future__ import annotations

import errno
import threading
from functools import partial
from pathlib import Path

import pytest

from sluice.store.embedded import FileSystem
from sluice.store.embedded.direct_writes import (
    FAST_SECONDS,
    MAX_DIRECT_BYTES,
    PAUSE_FACTOR,
    SAMPLES_NEEDED,
    SLOW_SECONDS,
    DirectWrites,
)
from tests.store.kit import TIMEOUT_SECONDS, StoreUnderTest, message

SMALL = 1000


def prove_fast(policy: DirectWrites, now: float) -> None:
    for _ in range(SAMPLES_NEEDED):
        policy.record_in_thread(SMALL, FAST_SECONDS / 2, now)


# ---- the policy


def test_loop_writes_only_after_fast_syncs_in_the_thread() -> None:
    policy = DirectWrites()
    assert not policy.allows(SMALL)
    for _ in range(SAMPLES_NEEDED - 1):
        policy.record_in_thread(SMALL, FAST_SECONDS / 2, 1.0)
    assert not policy.allows(SMALL)
    policy.record_in_thread(SMALL, 1.0, 1.0)  # includes a long wait for the GIL
    assert policy.allows(SMALL)


def test_loop_never_writes_to_a_slow_disk() -> None:
    policy = DirectWrites()
    for nth in range(SAMPLES_NEEDED * 10):
        policy.record_in_thread(SMALL, FAST_SECONDS * 3, float(nth))
        assert not policy.allows(SMALL)


def test_loop_never_writes_large_frames() -> None:
    policy = DirectWrites()
    prove_fast(policy, 1.0)
    assert policy.allows(MAX_DIRECT_BYTES)
    assert not policy.allows(MAX_DIRECT_BYTES + 1)


def test_slow_sync_sends_frames_to_the_thread_for_a_multiple_of_its_duration() -> None:
    policy = DirectWrites()
    prove_fast(policy, 1.0)
    policy.record_direct(SMALL, SLOW_SECONDS * 2, 1.0)
    assert not policy.allows(SMALL)
    prove_fast(policy, 1.0 + SLOW_SECONDS * 1.9 * PAUSE_FACTOR)
    assert not policy.allows(SMALL)
    prove_fast(policy, 1.0 + SLOW_SECONDS * 2.1 * PAUSE_FACTOR)
    assert policy.allows(SMALL)


def test_syncs_that_are_slower_on_average_end_direct_writes() -> None:
    policy = DirectWrites()
    prove_fast(policy, 1.0)
    for _ in range(40):
        policy.record_direct(SMALL, FAST_SECONDS * 1.5, 1.0)
    assert not policy.allows(SMALL)


# ---- the store


class WatchedFiles(FileSystem):
    """Records which thread wrote each frame; fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[int] = []
        self.synced = threading.Event()
        self.syncs_directory = threading.Event()
        self.may_sync_directories = threading.Event()
        self.may_sync_directories.set()
        self.fails = False

    def write(self, fd: int, parts: list[bytes], at: int) -> None:
        self._note_frame(parts)
        super().write(fd, parts, at)

    def write_synced(self, fd: int, parts: list[bytes], at: int) -> None:
        self._note_frame(parts)
        super().write_synced(fd, parts, at)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.synced.set()

    def sync_directory(self, path: str) -> None:
        self.syncs_directory.set()
        assert self.may_sync_directories.wait(TIMEOUT_SECONDS)
        super().sync_directory(path)

    def _note_frame(self, parts: list[bytes]) -> None:
        if len(parts) == 2:
            if self.fails:
                raise OSError(errno.EIO, "the disk is gone")
            self.writers.append(threading.get_ident())


@pytest.fixture
def files() -> WatchedFiles:
    return WatchedFiles()


@pytest.fixture
def direct(tmp_path: Path, files: WatchedFiles) -> StoreUnderTest:
    """A store whose loop writes every frame that needs nothing else."""
    return StoreUnderTest(tmp_path / "store", files, 8 << 20, writes_directly=True).open()


def commit_until_direct(store: StoreUnderTest, files: WatchedFiles) -> int:
    """Commit until the loop has written a frame; return the next free sequence."""
    seq = 1
    while threading.get_ident() not in files.writers:
        store.commit(message(seq))
        seq += 1
        assert seq < 1000, "the loop never wrote a frame"
    return seq


def is_written_directly(store: StoreUnderTest, files: WatchedFiles, seq: int) -> bool:
    """Commit a frame; return whether the loop wrote it. It must not sync it within `commit`."""
    done: list[int] = []
    files.synced.clear()
    store.start_commit(message(seq), done=lambda: done.append(1))
    if files.writers[-1] == threading.get_ident():
        assert not files.synced.is_set()
    assert not done
    store.loop.turn_until(lambda: bool(done))
    if files.writers[-1] != threading.get_ident():
        return False
    assert files.synced.is_set()
    return True


def test_loop_writes_frames_itself_and_syncs_them_after_the_turn(
    direct: StoreUnderTest, files: WatchedFiles
) -> None:
    end = commit_until_direct(direct, files)
    assert sum(is_written_directly(direct, files, seq) for seq in range(end, end + 50)) > 0
    stored = [record.seq for record in direct.reopen().loaded.records]
    assert stored == list(range(1, end + 50))
    direct.store.close()


def test_frame_of_the_loop_precedes_later_jobs(direct: StoreUnderTest, files: WatchedFiles) -> None:
    """A snapshot that began before the frame was written would not cover its messages."""
    seq = commit_until_direct(direct, files)
    done: list[int] = []
    for nth in range(20):
        direct.start_commit(message(seq + nth), done=lambda: done.append(1))
        direct.store.seal_segment()
    direct.loop.turn_until(lambda: len(done) == 20)
    addresses = direct.reopen().loaded.addresses()
    assert len({address >> 32 for address in addresses.values()}) >= 20
    direct.store.close()


def test_frame_of_the_loop_is_synced_when_the_store_closes(
    direct: StoreUnderTest, files: WatchedFiles
) -> None:
    seq = commit_until_direct(direct, files)
    files.synced.clear()
    direct.start_commit(message(seq), done=lambda: None)
    direct.store.close()
    assert files.synced.is_set()
    assert (1, seq) in direct.reopen().loaded.addresses()
    direct.store.close()


def test_loop_does_not_wait_for_another_job_of_the_thread(
    direct: StoreUnderTest, files: WatchedFiles
) -> None:
    first = commit_until_direct(direct, files)
    done: list[int] = []
    for seq in range(first, first + 50):
        done = []
        count = len(files.writers)
        direct.start_commit(message(seq), done=partial(done.append, 1))
        if files.writers[count:] == [threading.get_ident()]:
            break
        direct.loop.turn_until(partial(bool, done))
    assert not done
    files.syncs_directory.clear()
    files.may_sync_directories.clear()
    direct.store.seal_segment()
    assert files.syncs_directory.wait(TIMEOUT_SECONDS)
    direct.loop.turn_once()
    assert not done, "the thread has to sync it"
    files.may_sync_directories.set()
    direct.loop.turn_until(lambda: bool(done))
    direct.store.close()


def test_failed_write_of_the_loop_is_fatal(direct: StoreUnderTest, files: WatchedFiles) -> None:
    seq = commit_until_direct(direct, files)
    files.fails = True
    done: list[int] = []
    direct.start_commit(message(seq), done=lambda: done.append(1))
    direct.loop.turn_until(lambda: bool(direct.failures))
    files.fails = False
    direct.start_commit(message(seq + 1), done=lambda: done.append(2))
    direct.store.close()
    direct.loop.turn_once()
    assert not done and len(direct.failures) == 1
    assert (1, seq + 1) not in direct.reopen().loaded.addresses()
    direct.store.close()


def test_thread_that_waits_for_free_space_writes_the_frame_that_begins_a_sync_interval(
    tmp_path: Path, files: WatchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its sync would come with the next look at the free space, up to a second later."""
    monkeypatch.setattr(files, "free_bytes", lambda directory: 0)
    store = StoreUnderTest(
        tmp_path / "store",
        files,
        8 << 20,
        writes_directly=True,
        min_free_bytes=1 << 20,
        on_low_space=lambda reason: None,
    ).open()
    end = commit_until_direct(store, files)
    for seq in range(end, end + 40, 2):
        store.commit(message(seq))
        store.commit(message(seq + 1), sync=False)
        assert files.writers[-1] != threading.get_ident()
    store.store.close()


def test_direct_write_without_sync_is_synced_within_the_interval(
    tmp_path: Path, files: WatchedFiles
) -> None:
    store = StoreUnderTest(
        tmp_path / "store", files, 8 << 20, writes_directly=True, sync_seconds=0.001
    ).open()
    end = commit_until_direct(store, files)
    for seq in range(end, end + 200):
        files.synced.clear()
        store.commit(message(seq), sync=False)
        assert files.synced.wait(TIMEOUT_SECONDS), "it is synced without another commit"
    store.store.close()

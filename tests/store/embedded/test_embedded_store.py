"""Tests of the embedded store: directory, threads, failures, and a killed process."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.errors import StoreError, StoreFailed, StoreLocked, StoreNotOpened
from sluice.store.embedded import EmbeddedStore, FileSystem
from sluice.store.embedded.reader import WINDOW_BYTES
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store
from tests.store.embedded import killed_process
from tests.store.kit import (
    TIMEOUT_SECONDS,
    ManualLoop,
    RecordingLoader,
    StoreUnderTest,
    frame_of,
    message,
)


def test_both_stores_implement_the_store_protocol(tmp_path: Path) -> None:
    loop = ManualLoop()
    stores: list[Store] = [
        MemoryStore(loop.call_soon),
        EmbeddedStore(str(tmp_path), loop.call_soon, lambda fault: None),
    ]
    for store in stores:
        assert store.open(RecordingLoader()).messages == 0
        store.close()


def test_second_process_gets_the_pid_of_the_process_that_has_the_store_open(
    embedded: StoreUnderTest, tmp_path: Path
) -> None:
    second = StoreUnderTest(embedded.directory)
    with pytest.raises(
        StoreLocked, match=f"open in another process, process {os.getpid()}.*Stop that process"
    ):
        second.open()
    embedded.commit(message(1))
    embedded.store.close()
    assert [record.seq for record in second.open().loaded.records] == [1]
    second.store.close()


def test_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreNotOpened, match=r"store cannot be opened.*Use a directory"):
        StoreUnderTest(tmp_path / "store").open()


def test_directory_with_files_of_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(StoreError, match=r"not a store and not empty: it has 'notes.txt'"):
        StoreUnderTest(tmp_path).open()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["lost+found", ".nfs0001", "lock"])
def test_new_store_may_begin_beside_a_file_of_the_system(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    store = StoreUnderTest(tmp_path)
    store.open()
    store.store.close()


def test_files_are_readable_only_by_their_owner(embedded: StoreUnderTest) -> None:
    assert embedded.directory is not None
    embedded.fill_segment(0)
    embedded.snapshot(b"s")
    for path in embedded.directory.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_freed_segments_free_disk_space(embedded: StoreUnderTest) -> None:
    directory = embedded.directory
    assert directory is not None
    addresses = [
        address for start in range(0, 5000, 1000) for address in embedded.fill_segment(start)
    ]
    assert None not in embedded.read(addresses)  # the reader has opened them
    embedded.snapshot(b"s", free=[1, 2, 3, 4, 5])
    assert embedded.read(addresses[:1]) == [None]  # answered after the reader closed the segment
    assert sum(path.stat().st_size for path in directory.glob("0*")) < 1000
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [link for link in links if str(directory) in link and "deleted" in link]


def test_more_segments_than_open_files_are_read(tmp_path: Path) -> None:
    store = StoreUnderTest(tmp_path / "store", segment_bytes=500).open()
    addresses = [store.commit(message(seq, b"%400d" % seq))[0] for seq in range(300)]
    assert addresses[-1] >> 32 > 100
    for _ in range(2):
        assert store.bodies(addresses) == [b"%400d" % seq for seq in range(300)]
    ours = [
        path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)
    ]
    assert len(ours) < 70
    store.store.close()


class CountingFiles(FileSystem):
    """Counts reads, and makes calls fail or write less."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.syncs = 0
        self.synced = threading.Event()
        self.fail_write = 0
        self.fail_sync = 0
        self.fail_reads = 0
        self.free = 1 << 40
        self.may_sync = threading.Event()
        self.may_sync.set()

    def read(self, fd: int, size: int, at: int) -> bytes:
        self.reads += 1
        if self.fail_reads:
            self.fail_reads -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert size <= WINDOW_BYTES or size > 10 * WINDOW_BYTES
        return super().read(fd, size, at)

    def free_bytes(self, directory: str) -> int:
        return self.free

    def write(self, fd: int, parts: list[bytes], at: int) -> None:
        if self.fail_write:
            raise OSError(self.fail_write, os.strerror(self.fail_write))
        super().write(fd, parts, at)

    def write_synced(self, fd: int, parts: list[bytes], at: int) -> None:
        self.write(fd, parts, at)
        self.sync(fd)

    def sync(self, fd: int) -> None:
        assert self.may_sync.wait(TIMEOUT_SECONDS)
        if self.fail_sync:
            raise OSError(self.fail_sync, os.strerror(self.fail_sync))
        super().sync(fd)
        self.syncs += 1
        self.synced.set()


def test_bytes_written_and_synced_in_one_step_are_complete(tmp_path: Path) -> None:
    files = FileSystem()
    fd = files.create(str(tmp_path / "log"))
    files.write(fd, [b"before"], 0)
    files.write_synced(fd, [b"head", b"body" * 1000], 6)
    assert files.read(fd, 5000, 0) == b"beforehead" + b"body" * 1000
    files.close(fd)


def test_small_frames_are_written_over_preallocated_zeros(embedded: StoreUnderTest) -> None:
    assert embedded.directory is not None
    log = embedded.directory / "00000001.log"
    embedded.commit(message(1))
    embedded.commit(message(2))  # completes after the zeros of the first are written
    size = log.stat().st_size
    embedded.commit(message(3))
    assert log.stat().st_size == size > embedded.store.segment_sizes()[1]


def test_killed_store_opens_without_a_report_about_zeros(
    embedded: StoreUnderTest, tmp_path: Path
) -> None:
    assert embedded.directory is not None
    for seq in (1, 2, 3):
        embedded.commit(message(seq))
    killed_copy = StoreUnderTest(tmp_path / "copy")
    assert killed_copy.directory is not None
    shutil.copytree(embedded.directory, killed_copy.directory)
    (killed_copy.directory / "lock").unlink()
    killed_copy.open()
    assert [record.seq for record in killed_copy.loaded.records] == [1, 2, 3]
    assert killed_copy.report.torn_bytes == 0 and killed_copy.report.warnings == []
    killed_copy.store.close()


def test_neither_full_segment_nor_closed_store_has_zeros_after_its_log(
    embedded: StoreUnderTest,
) -> None:
    assert embedded.directory is not None
    embedded.fill_segment(0)
    embedded.commit(message(9999))
    sizes = embedded.store.segment_sizes()
    assert len(sizes) == 2
    assert (embedded.directory / "00000001.log").stat().st_size == sizes[1]
    embedded.store.close()
    assert (embedded.directory / "00000002.log").stat().st_size == sizes[2]


def test_neighboring_records_are_read_together(tmp_path: Path) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files, 64 << 20).open()
    addresses = store.commit(*[message(seq, b"m" * 1000) for seq in range(2000)])
    files.reads = 0
    assert None not in store.read(random.Random(1).sample(addresses, 2000))
    assert files.reads <= 4
    store.store.close()


def test_each_commit_is_synced_once_before_it_completes(tmp_path: Path) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files, 64 << 20).open()
    files.syncs = 0
    for seq in range(20):
        store.commit(message(seq))
        assert files.syncs == seq + 1
    files.may_sync.clear()
    answers: list[int] = []
    store.start_commit(message(20), done=lambda: answers.append(1))
    while (tmp_path / "store" / "00000001.log").stat().st_size < 21 * 68:
        pass  # until the writer waits before the sync
    assert not store.loop.turn_once() and not answers
    files.may_sync.set()
    store.loop.turn_until(lambda: bool(answers))
    store.store.close()


def test_commit_without_sync_completes_at_once_and_is_synced_within_the_interval(
    tmp_path: Path,
) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files, sync_seconds=0.01).open()
    files.syncs = 0
    files.may_sync.clear()
    store.commit(message(1), sync=False)
    assert files.syncs == 0
    files.synced.clear()
    files.may_sync.set()
    assert files.synced.wait(TIMEOUT_SECONDS), "it is synced without another commit"
    store.store.close()


def test_close_syncs_unsynced_commits(tmp_path: Path) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files, sync_seconds=1000.0).open()
    files.syncs = 0
    store.commit(message(1), sync=False)
    assert files.syncs == 0
    store.store.close()
    assert files.syncs == 1


@pytest.mark.parametrize(("write", "sync"), [(errno.ENOSPC, 0), (errno.EIO, 0), (0, errno.EIO)])
def test_after_a_failed_write_or_sync_nothing_is_acknowledged_again(
    tmp_path: Path, write: int, sync: int
) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files).open()
    store.commit(message(1))
    files.fail_write, files.fail_sync = write, sync
    answers: list[int] = []
    store.start_commit(message(2), done=lambda: answers.append(2))
    store.loop.turn_until(lambda: bool(store.failures))
    files.fail_write = files.fail_sync = 0
    store.start_commit(message(3), done=lambda: answers.append(3))
    store.store.snapshot([b"s"], [], lambda: answers.append(4))
    store.store.close()
    store.loop.turn_once()
    assert answers == []
    (fault,) = store.failures
    assert isinstance(fault, StoreFailed) and os.strerror(write or sync) in str(fault)
    assert 1 in [record.seq for record in store.reopen().loaded.records]
    store.store.close()


def test_frame_that_recovery_would_discard_is_never_acknowledged(embedded: StoreUnderTest) -> None:
    answers: list[int] = []
    embedded.store.commit(frame_of([message(1)]), 2, True, lambda: answers.append(1))
    embedded.loop.turn_until(lambda: bool(embedded.failures))
    assert not answers and "does not contain exactly 2 records" in str(embedded.failures[0])


def test_partial_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pwritev, whole_pwrite = os.pwritev, os.pwrite
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, at, flags=0: whole_pwritev(fd, [parts[0][:9]], at, flags)
    )
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole_pwrite(fd, data[:100], at))
    store = StoreUnderTest(tmp_path / "store").open()
    addresses = store.commit(message(1, b"a" * 1000), message(2, b"b" * 1000))
    assert store.reopen().bodies(addresses) == [b"a" * 1000, b"b" * 1000]
    store.store.close()


def test_rest_of_a_partial_write_is_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWF_DSYNC covers only the bytes of its own call: the rest needs an fdatasync."""
    calls: list[str] = []
    whole_pwritev, whole_pwrite, whole_fdatasync = os.pwritev, os.pwrite, os.fdatasync

    def pwritev(fd: int, parts: list[bytes], at: int, flags: int = 0) -> int:
        calls.append("write")
        return whole_pwritev(fd, [parts[0][:9]], at, flags)

    def pwrite(fd: int, data: bytes, at: int) -> int:
        calls.append("write")
        return whole_pwrite(fd, data[:100], at)

    def fdatasync(fd: int) -> None:
        calls.append("sync")
        whole_fdatasync(fd)

    files = FileSystem()
    fd = files.create(str(tmp_path / "log"))
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    files.write_synced(fd, [b"head", b"body" * 100], 0)
    monkeypatch.undo()
    assert files.read(fd, 500, 0) == b"head" + b"body" * 100
    assert calls.count("sync") == 1 and calls[-1] == "sync" and len(calls) > 3
    files.close(fd)


def test_store_closes_after_its_loop_was_closed(tmp_path: Path) -> None:
    class ClosedLoop(ManualLoop):
        def call_soon(self, *args: object) -> None:
            raise RuntimeError("Event loop is closed")

    loop = ClosedLoop()
    store = EmbeddedStore(str(tmp_path / "store"), loop.call_soon, lambda fault: None)
    store.open(RecordingLoader())
    store.commit(frame_of([message(1)]), 1, True, lambda: None)
    store.close()
    past = RecordingLoader()
    store.open(past)
    store.close()
    assert len(past.records) == 1


@pytest.mark.parametrize("seed", range(4))
def test_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path, seed: int) -> None:
    """A child commits, snapshots and deletes, and prints each step. It is killed three times."""
    draw = random.Random(seed)
    directory = tmp_path / "store"
    steps: dict[str, set[int]] = {"kept": set(), "settling": set(), "settled": set()}
    for life in range(3):
        child = subprocess.Popen(
            [
                sys.executable,
                killed_process.__file__,
                str(directory),
                str(seed),
                str(1 + 1_000_000 * life),
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            encoding="ascii",
        )
        assert child.stdout is not None
        stop_at = draw.randrange(100, 2000)
        for nth, line in enumerate(child.stdout):
            word, number = line.split()
            steps[word].add(int(number))
            if nth == stop_at:
                child.kill()
        child.stdout.close()
        assert child.wait() == -9
    past = killed_process.Live()
    store = StoreUnderTest(directory)
    store.store.open(past)
    live = past.addresses
    missing = steps["kept"] - steps["settling"] - set(live)
    assert not missing, f"acknowledged and lost: {sorted(missing)[:5]}"
    assert not steps["settled"] & set(live), "settled and restored"
    assert store.bodies(list(live.values())) == [killed_process.body_for(seq) for seq in live]
    store.store.close()


def test_read_that_fails_temporarily_is_retried(tmp_path: Path) -> None:
    files = CountingFiles()
    store = StoreUnderTest(tmp_path / "store", files).open()
    addresses = store.commit(message(1))
    files.fail_reads = 2
    assert store.read(addresses) != [None]
    assert files.fail_reads == 0 and not store.failures
    store.store.close()


def test_listener_is_notified_when_the_disk_becomes_nearly_full_and_recovers(
    tmp_path: Path,
) -> None:
    files = CountingFiles()
    files.free = 10 << 20
    reasons: list[str] = []
    store = StoreUnderTest(
        tmp_path / "store", files, min_free_bytes=64 << 20, on_low_space=reasons.append
    ).open()
    store.loop.turn_until(lambda: bool(reasons))
    assert "10 MiB are free" in reasons[0] and "min_free is 64 MiB" in reasons[0]
    store.commit(message(1))  # still stored: settlements free space
    files.free = 100 << 20
    store.loop.turn_until(lambda: len(reasons) > 1)
    assert reasons[1:] == [""]
    store.store.close()


def test_exhausted_file_descriptors_do_not_stop_the_log(tmp_path: Path) -> None:
    store = StoreUnderTest(tmp_path / "store", segment_bytes=500).open()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 30, hard))
        with suppress(OSError):
            while len(taken) < 100:
                taken.append(os.dup(taken[0]))
        assert len(taken) < 100
        addresses = store.fill_segment(0) + store.fill_segment(100)
        store.snapshot(b"s")
        assert None not in store.read(addresses)
        assert not store.failures
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        store.store.close()

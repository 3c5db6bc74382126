"""`sluice verify --data`: verify the store of a stopped broker."""

from __future__ import annotations

import errno
import threading
from functools import partial
from pathlib import Path

import pytest

from sluice.admin.queries.offline_verification import verify_store
from sluice.errors import StoreError, StoreLocked
from sluice.store.embedded import EmbeddedStore, FileSystem
from tests.broker.backends import EmbeddedBackend
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import settle, take
from tests.store.kit import StoreUnderTest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Create a store with all kinds of records and stop its broker."""
    harness = BrokerHarness(backend=EmbeddedBackend(tmp_path / "store"))
    worker = harness.worker("w-1", prefetch=3)
    for number in range(20):
        harness.publish(b"payload %d" % number)
    failed, dead, done = take(worker)
    settle(worker, "nack", failed)
    settle(worker, "reject", dead)
    settle(worker, "ack", done)
    harness.close()
    return tmp_path / "store"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_sound_store_is_reported_as_sound_and_not_changed(directory: Path) -> None:
    before = files(directory)
    report = verify_store(directory, EmbeddedStore)
    assert (report.faults, report.torn_bytes) == ([], 0)
    assert (report.queues, report.messages) == (2, 19), "18 in the queue, one dead letter"
    assert report.segments >= 1
    assert files(directory) == before
    harness = BrokerHarness(backend=EmbeddedBackend(directory))
    harness.close()


def tear(directory: Path) -> None:
    log = max(directory.glob("*.log"), key=lambda path: path.name)
    with log.open("r+b") as file:
        data = file.read()
        file.seek(len(data.rstrip(b"\0")))
        file.write(b"torn by a crash")


def test_torn_log_end_is_reported_without_error_and_not_changed(directory: Path) -> None:
    tear(directory)
    before = files(directory)
    report = verify_store(directory, EmbeddedStore)
    assert report.faults == [] and report.torn_bytes >= 15
    assert "The next start truncates it" in report.notes[0]
    assert files(directory) == before
    store = StoreUnderTest(directory).open()
    assert store.report.torn_bytes == report.torn_bytes, (
        "the start after it reports the torn bytes too"
    )
    store.store.close()


@pytest.mark.parametrize("name", ["00000001.idx", "layout", "lock"])
def test_files_that_a_start_would_rewrite_stay_missing(tmp_path: Path, name: str) -> None:
    store = StoreUnderTest(tmp_path / "store").open()
    store.fill_segment(0)
    store.snapshot(b"")
    store.store.close()
    (tmp_path / "store" / name).unlink()
    (tmp_path / "store" / "00000009.idx").write_bytes(b"without a log")
    (tmp_path / "store" / "00000009.idx.tmp").write_bytes(b"half")
    before = files(tmp_path / "store")
    looked = StoreUnderTest(tmp_path / "store", read_only=True).open()
    assert bool(looked.report.warnings) == (name == "layout")
    looked.store.close()
    assert files(tmp_path / "store") == before


def test_store_opened_by_a_broker_is_refused(tmp_path: Path) -> None:
    harness = BrokerHarness(backend=EmbeddedBackend(tmp_path / "store"))
    with pytest.raises(StoreLocked):
        verify_store(tmp_path / "store", EmbeddedStore)
    harness.close()


def test_directory_without_store_is_refused_and_none_is_created(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StoreError, match="no store"):
            verify_store(folder, EmbeddedStore)
    assert list(tmp_path.iterdir()) == []


def test_directory_of_other_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(StoreError, match="there is no store in"):
        verify_store(tmp_path, EmbeddedStore)
    assert files(tmp_path) == {"notes.txt": b"hi"}


def test_broker_does_not_start_on_a_store_during_verification(directory: Path) -> None:
    looking = StoreUnderTest(directory, read_only=True).open()
    with pytest.raises(StoreLocked):
        StoreUnderTest(directory).open()
    looking.store.close()


def test_damaged_message_is_an_error(directory: Path) -> None:
    log = min(directory.glob("*.log"), key=lambda path: path.name)
    data = log.read_bytes()
    at = data.index(b"payload 11")
    log.write_bytes(data[:at] + b"PAYLOAD" + data[at + 7 :])
    report = verify_store(directory, EmbeddedStore)
    assert len(report.faults) == 1, report.faults


class UnreadableFiles(FileSystem):
    """A disk that can be read for the start and fails afterwards."""

    def read(self, fd: int, size: int, at: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "Input/output error")
        return super().read(fd, size, at)


def test_unreadable_disk_is_an_error_that_names_the_position(directory: Path) -> None:
    report = verify_store(directory, partial(EmbeddedStore, files=UnreadableFiles()))
    assert len(report.faults) == 1 and "cannot be read at byte" in report.faults[0]

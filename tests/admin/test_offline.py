"""`sluice verify --data`: the books of a store whose broker does not run."""

from __future__ import annotations

import errno
import threading
from functools import partial
from pathlib import Path

import pytest

from sluice.admin.offline import verify_store
from sluice.errors import StoreError, StoreLocked
from sluice.store.embedded import EmbeddedStore, Files
from tests.admin.kit import AdminHouse, settle, take


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with something of everything in it, and its broker gone."""
    house = AdminHouse("embedded", tmp_path / "store")
    worker = house.worker("w-1", prefetch=3)
    for number in range(20):
        house.publish(b"payload %d" % number)
    failed, dead, done = take(worker)
    settle(worker, "nack", failed)
    settle(worker, "reject", dead)
    settle(worker, "ack", done)
    house.close()
    return tmp_path / "store"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_store_in_order_is_said_to_be_so_and_left_as_it_is(directory: Path) -> None:
    before = files(directory)
    report = verify_store(directory, EmbeddedStore)
    assert (report.faults, report.torn_bytes) == ([], 0)
    assert (report.queues, report.messages) == (2, 19), "18 in the queue, one dead letter"
    assert report.segments >= 1
    after = files(directory)
    assert {name: data for name, data in after.items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    house = AdminHouse("embedded", directory)
    house.close()


def test_a_torn_end_is_told_and_is_no_fault(directory: Path) -> None:
    log = max(directory.glob("*.log"), key=lambda path: path.name)
    with log.open("r+b") as file:
        data = file.read()
        file.seek(len(data.rstrip(b"\0")))
        file.write(b"torn by a crash")
    report = verify_store(directory, EmbeddedStore)
    assert report.faults == [] and report.torn_bytes >= 15


def test_a_store_that_a_broker_has_open_is_refused(tmp_path: Path) -> None:
    house = AdminHouse("embedded", tmp_path / "store")
    with pytest.raises(StoreLocked):
        verify_store(tmp_path / "store", EmbeddedStore)
    house.close()


def test_a_directory_without_a_store_is_refused_and_none_is_made(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StoreError, match="no store"):
            verify_store(folder, EmbeddedStore)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_message_is_a_fault(directory: Path) -> None:
    log = min(directory.glob("*.log"), key=lambda path: path.name)
    data = log.read_bytes()
    at = data.index(b"payload 11")
    log.write_bytes(data[:at] + b"PAYLOAD" + data[at + 7 :])
    report = verify_store(directory, EmbeddedStore)
    assert len(report.faults) == 1, report.faults


class Worn(Files):
    """A disk from which a start can be read, and then nothing more."""

    def read(self, fd: int, size: int, at: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "Input/output error")
        return super().read(fd, size, at)


def test_a_disk_that_cannot_be_read_is_a_fault_that_names_the_place(directory: Path) -> None:
    report = verify_store(directory, partial(EmbeddedStore, files=Worn()))
    assert len(report.faults) == 1 and "cannot be read at byte" in report.faults[0]

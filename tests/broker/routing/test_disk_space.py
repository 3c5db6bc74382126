"""The embedded store under the broker frees disk space of all kinds of records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.wire.packets import Publish
from tests.broker.backends import EmbeddedBackend
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, payloads
from tests.broker.peers import Client

SEGMENT = 128 * 1024


class DiskHarness(BrokerHarness):
    def __init__(self, folder: Path, segment_bytes: int = SEGMENT) -> None:
        super().__init__(backend=EmbeddedBackend(folder, segment_bytes))
        self.folder = folder

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[DiskHarness]:
    one = DiskHarness(tmp_path)
    yield one
    one.commit_loop.close()


def fill(
    client: Client, topic: str, harness: DiskHarness, count: int = 400, retain: bool = False
) -> None:
    for _ in range(count):
        client.publish(topic, b"x" * 2000, 1, retain)


def write_other_records(harness: DiskHarness) -> None:
    """Write enough other records that the store compacts."""
    fill(harness.connect("other"), "other", harness, 150, retain=True)


def test_queue_frees_its_disk_space_when_all_is_acked(harness: DiskHarness) -> None:
    worker = harness.connect("worker-1")
    fill(worker, "$queue/jobs", harness)
    assert harness.size() > 800_000
    join(worker, "$queue/jobs", ack_mode="puback")
    left = 400
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1
    write_other_records(harness)
    assert harness.size() < 500_000
    assert harness.depth("jobs") == 0


def test_disk_space_is_freed_within_seconds_without_further_writes(harness: DiskHarness) -> None:
    worker = harness.connect("worker-1")
    fill(worker, "$queue/jobs", harness)
    join(worker, "$queue/jobs", ack_mode="puback")
    left = 400
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1
    harness.advance(5)
    assert harness.size() < 2 * SEGMENT


def ack_all(worker: Client, left: int) -> None:
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1


@pytest.mark.parametrize("first", ["acked", "short"])
def test_nearly_full_disk_frees_space_though_no_segment_is_full(tmp_path: Path, first: str) -> None:
    """All records are in the open segment, which is ended early.

    This holds whether the messages were acked before the disk was found to be nearly full or after
    it.
    """
    harness = DiskHarness(tmp_path, 64 << 20)
    worker = harness.connect("worker-1")
    fill(worker, "$queue/jobs", harness, 900)
    join(worker, "$queue/jobs", ack_mode="puback")
    if first == "short":
        harness.commit_loop.housekeeping.set_disk_low(True)
        harness.advance(5)
    assert harness.size() > 1_800_000
    ack_all(worker, 900)
    harness.advance(5)
    if first == "acked":
        assert harness.size() > 1_800_000
        harness.commit_loop.housekeeping.set_disk_low(True)
    harness.advance(5)
    assert harness.size() < 300_000
    assert harness.depth("jobs") == 0
    fill(worker, "$queue/jobs", harness, 3)
    harness.restart()
    assert harness.depth("jobs") == 3
    harness.commit_loop.close()


def test_live_records_are_compacted_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    harness = DiskHarness(tmp_path, 64 << 20)
    client = harness.connect("maker")
    client.publish("lasting", b"x" * 2000, 1, retain=True)
    fill(client, "$queue/jobs", harness, 900)
    join(client, "$queue/jobs", ack_mode="puback")
    ack_all(client, 900)
    harness.commit_loop.housekeeping.set_disk_low(True)
    harness.advance(20)
    assert not (tmp_path / "00000001.log").exists()
    harness.restart()
    assert harness.broker.router.retained.count == 1
    harness.commit_loop.close()


def test_disk_with_free_space_has_one_open_segment(tmp_path: Path) -> None:
    harness = DiskHarness(tmp_path, 64 << 20)
    worker = harness.connect("worker-1")
    fill(worker, "$queue/jobs", harness, 900)
    harness.commit_loop.housekeeping.set_disk_low(True)
    harness.commit_loop.housekeeping.set_disk_low(False)
    join(worker, "$queue/jobs", ack_mode="puback")
    ack_all(worker, 900)
    harness.advance(5)
    assert [path.name for path in tmp_path.glob("*.log")] == ["00000001.log"]
    harness.commit_loop.close()


def test_sessions_free_their_disk_space_when_all_is_acknowledged(harness: DiskHarness) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("news", qos=1)
    client.drop()
    fill(harness.connect("maker"), "news", harness)
    assert harness.size() > 800_000
    client = harness.connect_persistent("sleeper")
    messages = client.messages()
    assert len(messages) == 400
    for message in messages:
        client.ack(message)
    write_other_records(harness)
    assert harness.size() < 500_000


def test_frequently_changed_retained_message_takes_the_space_of_one(harness: DiskHarness) -> None:
    fill(harness.connect("maker"), "state", harness, 600, retain=True)
    write_other_records(harness)
    assert harness.size() < 500_000


def test_stored_state_is_restored_from_disk(harness: DiskHarness) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("news", qos=1)
    maker = harness.connect("maker")
    client.drop()
    maker.publish("news", b"waiting", 1, True)
    put_packet = maker.publish("$queue/jobs", b"queued", 1)
    maker.first_ack(4, put_packet, 0)
    harness.restart()
    client = harness.connect_persistent("sleeper")
    assert payloads(client.messages()) == [b"waiting"]
    assert harness.depth("jobs") == 1

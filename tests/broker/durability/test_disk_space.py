"""The embedded store under the broker: room on disk is given back, whatever it was that took it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from sluice.store.embedded.store import EmbeddedStore
from sluice.wire.packets import Publish
from tests.broker.kit import Client, Loop
from tests.broker.namespaces.kit import QueueHouse, join, payloads

SEGMENT = 128 * 1024


class Disk:
    """The store with its answers in a line, and a count of those that are still to come."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.answers: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.due = 0
        store = EmbeddedStore(
            str(folder), self._answer, self._fail, segment_bytes=segment_bytes, snapshot_bytes=segment_bytes
        )
        self._store = store
        self.open = store.open
        self.next_frame = store.next_frame
        self.wants_snapshot = store.wants_snapshot
        self.segment_sizes = store.segment_sizes
        self.seal = store.seal
        self.close = store.close

    def _answer(self, callback: Callable[..., object], *arguments: object) -> None:
        self.answers.put(lambda: callback(*arguments))

    def _fail(self, fault: Exception) -> None:
        raise fault

    def _count(self, done: Callable[..., None]) -> Callable[..., None]:
        self.due += 1

        def counted(*arguments: Any) -> None:
            self.due -= 1
            done(*arguments)

        return counted

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        self._store.commit(frame, count, sync, self._count(done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._store.read(addresses, self._count(done))

    def begin_snapshot(self) -> None:
        self._store.begin_snapshot()

    def snapshot(self, state: list[bytes], free: Sequence[int], done: Callable[[], None]) -> None:
        self._store.snapshot(state, free, self._count(done))

    def scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._store.scan(segment, self._count(done))


class DiskLoop(Loop):
    """A loop that is at rest when the store is."""

    disk: Disk | None = None

    def settle(self) -> None:
        super().settle()
        while self.disk is not None and self.disk.due:
            self.disk.answers.get(timeout=10)()
            super().settle()


class DiskHouse(QueueHouse):
    def __init__(self, folder: Path, segment_bytes: int = SEGMENT) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        super().__init__()

    def _build(self) -> None:
        disk = Disk(self.folder, self.segment_bytes)
        self.store = disk  # type: ignore[assignment]
        loop = DiskLoop()
        loop.disk = disk
        self.loop = loop
        super()._build()

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


@pytest.fixture
def house(tmp_path: Path) -> Iterator[DiskHouse]:
    one = DiskHouse(tmp_path)
    yield one
    one.runner.close()


def fill(client: Client, topic: str, house: DiskHouse, count: int = 400, retain: bool = False) -> None:
    for _ in range(count):
        client.publish(topic, b"x" * 2000, 1, retain)


def use(house: DiskHouse) -> None:
    """Enough of something else that the store looks back at what it can give up."""
    fill(house.connect("other"), "other", house, 150, retain=True)


def test_a_queue_gives_back_its_room_when_all_is_acked(house: DiskHouse) -> None:
    worker = house.connect("worker-1")
    fill(worker, "$queue/jobs", house)
    assert house.size() > 800_000
    join(worker, "$queue/jobs", ack_mode="puback")
    left = 400
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1
    use(house)
    assert house.size() < 500_000
    assert house.depth("jobs") == 0


def test_room_is_given_back_within_seconds_though_nothing_more_is_written(house: DiskHouse) -> None:
    worker = house.connect("worker-1")
    fill(worker, "$queue/jobs", house)
    join(worker, "$queue/jobs", ack_mode="puback")
    left = 400
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1
    house.advance(5)
    assert house.size() < 2 * SEGMENT


def ack_all(worker: Client, left: int) -> None:
    while left:
        for packet in worker.take():
            if isinstance(packet, Publish):
                worker.ack(packet)
                left -= 1


@pytest.mark.parametrize("first", ["acked", "short"])
def test_a_nearly_full_disk_gets_its_room_back_though_no_segment_is_full(tmp_path: Path, first: str) -> None:
    """Everything lies in the open segment: that is ended early, whether the messages were acked
    before the disk was
    found to be nearly full or after it."""
    house = DiskHouse(tmp_path, 64 << 20)
    worker = house.connect("worker-1")
    fill(worker, "$queue/jobs", house, 900)
    join(worker, "$queue/jobs", ack_mode="puback")
    if first == "short":
        house.runner.short_of_room(True)
        house.advance(5)
    assert house.size() > 1_800_000
    ack_all(worker, 900)
    house.advance(5)
    if first == "acked":
        assert house.size() > 1_800_000
        house.runner.short_of_room(True)
    house.advance(5)
    assert house.size() < 300_000
    assert house.depth("jobs") == 0
    fill(worker, "$queue/jobs", house, 3)
    house.restart()
    assert house.depth("jobs") == 3
    house.runner.close()


def test_the_few_that_live_are_moved_out_of_the_way_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    house = DiskHouse(tmp_path, 64 << 20)
    client = house.connect("maker")
    client.publish("lasting", b"x" * 2000, 1, retain=True)
    fill(client, "$queue/jobs", house, 900)
    join(client, "$queue/jobs", ack_mode="puback")
    ack_all(client, 900)
    house.runner.short_of_room(True)
    house.advance(20)
    assert not (tmp_path / "00000001.log").exists()
    house.restart()
    assert house.broker.router.retained.count == 1
    house.runner.close()


def test_a_disk_with_room_keeps_one_open_segment(tmp_path: Path) -> None:
    house = DiskHouse(tmp_path, 64 << 20)
    worker = house.connect("worker-1")
    fill(worker, "$queue/jobs", house, 900)
    house.runner.short_of_room(True)
    house.runner.short_of_room(False)
    join(worker, "$queue/jobs", ack_mode="puback")
    ack_all(worker, 900)
    house.advance(5)
    assert [path.name for path in tmp_path.glob("*.log")] == ["00000001.log"]
    house.runner.close()


def test_sessions_give_back_their_room_when_all_is_acknowledged(house: DiskHouse) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("news", qos=1)
    client.drop()
    fill(house.connect("maker"), "news", house)
    assert house.size() > 800_000
    client = house.connect_lasting("sleeper")
    messages = client.messages()
    assert len(messages) == 400
    for message in messages:
        client.ack(message)
    use(house)
    assert house.size() < 500_000


def test_a_retained_message_that_changes_often_takes_the_room_of_one(house: DiskHouse) -> None:
    fill(house.connect("maker"), "state", house, 600, retain=True)
    use(house)
    assert house.size() < 500_000


def test_what_is_kept_on_disk_is_there_again(house: DiskHouse) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("news", qos=1)
    maker = house.connect("maker")
    client.drop()
    maker.publish("news", b"waiting", 1, True)
    put_packet = maker.publish("$queue/jobs", b"queued", 1)
    maker.first_ack(4, put_packet, 0)
    house.restart()
    client = house.connect_lasting("sleeper")
    assert payloads(client.messages()) == [b"waiting"]
    assert house.depth("jobs") == 1

"""Bulk readers yield to messages: their rate while the broker is busy, and how they share it."""

from __future__ import annotations

import asyncio
import heapq
import math
from pathlib import Path

import pyarrow as pa
import pytest
from librt.strings import BytesWriter

from sluice.admin.bulk.broker_load import (
    MIN_READ_RATE_PER_CORE,
    READ_TO_WRITE_RATIO,
    SAMPLE_SECONDS,
    BrokerLoad,
)
from sluice.admin.bulk.bulk_views import MessageSlice
from sluice.bulk.read_throttle import STEP_SECONDS, ReadThrottle
from sluice.bulk.readers import (
    LocalReader,
    PartitionRange,
    ReaderSlots,
    ReadRequest,
    WorkerPool,
    WorkerReader,
)
from sluice.errors import TooManyReaders, UnreadableMessage
from sluice.message import Message, write_message_fields
from sluice.store.embedded.layout import log_name
from sluice.store.protocol import MESSAGE, write_record

MB = 1 << 20


class FakeLoadClock:
    """A fake clock and the CPU time of a loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 5.0

    def load(self, cores: int = 2) -> BrokerLoad:
        return BrokerLoad(lambda: self.now, lambda: self.used, cores)

    def advance(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.used += seconds * share


def test_idle_broker_does_not_throttle_readers() -> None:
    hours = FakeLoadClock()
    strain = hours.load()
    assert strain.max_read_rate() == math.inf, "nothing is known yet"
    hours.advance(1.0, 0.3)
    strain.record_write(500 * MB)
    assert strain.max_read_rate() == math.inf


def test_readers_of_a_busy_broker_get_a_multiple_of_the_publish_rate() -> None:
    hours = FakeLoadClock()
    strain = hours.load()
    strain.max_read_rate()
    hours.advance(1.0, 0.9)
    strain.record_write(200 * MB)
    assert strain.max_read_rate() == pytest.approx(READ_TO_WRITE_RATIO * 200 * MB)
    hours.advance(SAMPLE_SECONDS / 2, 0.0)
    assert strain.max_read_rate() == pytest.approx(READ_TO_WRITE_RATIO * 200 * MB), (
        "it does not sample again at once"
    )
    hours.advance(1.0, 0.1)
    assert strain.max_read_rate() == math.inf


@pytest.mark.parametrize("cores", [2, 16])
def test_readers_of_a_busy_broker_with_few_publishes_still_progress(cores: int) -> None:
    hours = FakeLoadClock()
    strain = hours.load(cores)
    strain.max_read_rate()
    hours.advance(1.0, 0.9)
    strain.record_write(1000)
    assert strain.max_read_rate() == MIN_READ_RATE_PER_CORE * cores


class Time:
    """A clock that advances when all tasks wait for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def throttle(self) -> ReadThrottle:
        return ReadThrottle(lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, id(awake), awake))
        await awake.wait()

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            if not self._sleepers or self._sleepers[0][0] > end:
                break
            self.now, _, awake = heapq.heappop(self._sleepers)
            awake.set()
        self.now = end


class ThrottledReaders:
    """Readers that each take one part after the other, as fast as they may."""

    def __init__(self, throttle: ReadThrottle, count: int, rate: float) -> None:
        self.rate = rate
        self.got = [0] * count
        self.tasks = [asyncio.create_task(self._read(throttle, nth)) for nth in range(count)]

    async def _read(self, throttle: ReadThrottle, nth: int) -> None:
        while True:
            await throttle.wait(8 * MB, self.rate)
            self.got[nth] += 8 * MB
            await asyncio.sleep(0)

    def stop(self, first: int = 0) -> None:
        for task in self.tasks[first:]:
            task.cancel()


async def test_readers_share_the_allowed_rate_in_turn() -> None:
    time = Time()
    readers = ThrottledReaders(time.throttle(), 32, 64.0 * MB)
    await time.advance(60.0)
    assert sum(readers.got) == pytest.approx(60 * 64 * MB, rel=0.01)
    assert max(readers.got) - min(readers.got) <= 8 * MB
    readers.stop()


async def test_no_reader_waits_for_the_share_of_readers_that_left() -> None:
    time = Time()
    readers = ThrottledReaders(time.throttle(), 32, 64.0 * MB)
    await time.advance(60.0)
    readers.stop(1)
    before = readers.got[0]
    await time.advance(10.0)
    assert readers.got[0] - before == pytest.approx(10 * 64 * MB, rel=0.03)
    readers.stop()


async def test_changed_rate_applies_to_all_waiting_readers() -> None:
    time = Time()
    readers = ThrottledReaders(time.throttle(), 4, 1.0 * MB)
    await time.advance(8.0)
    assert sum(readers.got) == 2 * 8 * MB
    readers.rate = 80.0 * MB
    await time.advance(8.0)  # until a reader asks again
    before = sum(readers.got)
    await time.advance(10.0)
    assert sum(readers.got) - before == pytest.approx(10 * 80 * MB, rel=0.03)
    readers.stop()


async def test_no_reader_waits_any_longer_when_the_broker_becomes_idle() -> None:
    time = Time()
    throttle = time.throttle()
    waiting = [asyncio.create_task(throttle.wait(8 * MB, 1.0 * MB)) for _ in range(4)]
    await time.advance(1.0)
    assert [one.done() for one in waiting] == [True, False, False, False]
    await throttle.wait(8 * MB, math.inf)
    await time.advance(STEP_SECONDS)
    assert all(one.done() for one in waiting)


class RecordingThrottle(ReadThrottle):
    """Records the requests and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, float]] = []

    async def wait(self, size: int, bytes_per_second: float) -> None:
        self.asked.append((size, bytes_per_second))


ROWS = 3


def record(seq: int) -> bytes:
    start, out = BytesWriter(), BytesWriter()
    write_message_fields(start, Message(b""))
    write_record(out, MESSAGE, 0, 40, seq, 0, 0, 0, start.getvalue(), b"value-%d" % seq)
    return out.getvalue()


def slice_of(seq: int, rate: float) -> MessageSlice:
    data = record(seq)
    place = seq.to_bytes(8, "little") + (1 << 32 | seq * len(data)).to_bytes(8, "little")
    return MessageSlice(
        40, place + len(data).to_bytes(4, "little"), [data], seq + 1, len(data), rate
    )


async def slices(part: PartitionRange, at: int, max_rows: int, max_bytes: int) -> MessageSlice:
    """Reads one message at a time from a broker that becomes busy."""
    return slice_of(at, math.inf if at < 1 else 1000.0)


@pytest.mark.parametrize("in_files", [True, False])
async def test_every_part_of_a_range_waits_for_its_turn(in_files: bool, tmp_path: Path) -> None:
    (tmp_path / log_name(1)).write_bytes(b"".join(record(seq) for seq in range(ROWS)))
    throttle = RecordingThrottle()
    wanted = ReadRequest("q", (PartitionRange(0, 0, ROWS),), ["value"])
    pool = WorkerPool(lambda queue: str(tmp_path), throttle)
    reading: WorkerReader | LocalReader = (
        WorkerReader(pool, wanted, slices)
        if in_files
        else LocalReader(ReaderSlots(), throttle, wanted, slices)
    )
    try:
        await reading.open()
        reading.start()
        data = b"".join([chunk async for chunk in reading.chunks()])
    finally:
        await reading.close()
        pool.close()
    assert pa.ipc.open_stream(data).read_all().column("value").to_pylist() == [
        b"value-%d" % seq for seq in range(ROWS)
    ]
    size = len(record(0))
    assert throttle.asked == [(size, math.inf), (size, 1000.0), (size, 1000.0)]


async def test_concurrent_readers_are_limited_where_the_broker_builds_the_ranges() -> None:
    slots = ReaderSlots(2)
    wanted = ReadRequest("q", (PartitionRange(0, 0, ROWS),), ["value"])

    async def fails(part: PartitionRange, at: int, max_rows: int, max_bytes: int) -> MessageSlice:
        raise UnreadableMessage("q", 0, 0)

    first, second, third = (
        LocalReader(slots, RecordingThrottle(), wanted, slices) for _ in range(3)
    )
    with pytest.raises(UnreadableMessage):
        await LocalReader(slots, RecordingThrottle(), wanted, fails).open()  # no slot is free
    await first.open()
    await second.open()
    with pytest.raises(TooManyReaders):
        await third.open()
    await first.close()
    await third.open()
    await third.close()
    await second.close()

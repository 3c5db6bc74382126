"""Readers give way: how much they get while the broker is busy, and how that is shared."""

from __future__ import annotations

import asyncio
import heapq
import math
from pathlib import Path

import pyarrow as pa
import pytest
from librt.strings import BytesWriter

from sluice.admin.bulk.bulk_views import Slice
from sluice.admin.bulk.broker_load import LEAST, LOOK_SECONDS, TIMES, Strain
from sluice.bulk.read_throttle import STEP_SECONDS, Pace
from sluice.bulk.readers import LocalReading, Part, Reading, Seats, Wanted, Workshop
from sluice.errors import TooManyReaders, UnreadableMessage
from sluice.message import Message, write_start
from sluice.store.embedded.layout import log_name
from sluice.store.protocol import MESSAGE, write_record

MB = 1 << 20


class Hours:
    """The time, and what a loop has used of a core."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 5.0

    def strain(self, cores: int = 2) -> Strain:
        return Strain(lambda: self.now, lambda: self.used, cores)

    def pass_by(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.used += seconds * share


def test_a_broker_with_time_to_spare_lets_readers_have_everything() -> None:
    hours = Hours()
    strain = hours.strain()
    assert strain.pace() == math.inf, "nothing is known yet"
    hours.pass_by(1.0, 0.3)
    strain.wrote(500 * MB)
    assert strain.pace() == math.inf


def test_readers_of_a_busy_broker_get_a_multiple_of_what_is_published() -> None:
    hours = Hours()
    strain = hours.strain()
    strain.pace()
    hours.pass_by(1.0, 0.9)
    strain.wrote(200 * MB)
    assert strain.pace() == pytest.approx(TIMES * 200 * MB)
    hours.pass_by(LOOK_SECONDS / 2, 0.0)
    assert strain.pace() == pytest.approx(TIMES * 200 * MB), "one does not look again at once"
    hours.pass_by(1.0, 0.1)
    assert strain.pace() == math.inf


@pytest.mark.parametrize("cores", [2, 16])
def test_readers_of_a_busy_broker_that_writes_little_still_get_on(cores: int) -> None:
    hours = Hours()
    strain = hours.strain(cores)
    strain.pace()
    hours.pass_by(1.0, 0.9)
    strain.wrote(1000)
    assert strain.pace() == LEAST * cores


class Time:
    """It passes when everybody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def pace(self) -> Pace:
        return Pace(lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, id(awake), awake))
        await awake.wait()

    async def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            if not self._sleepers or self._sleepers[0][0] > end:
                break
            self.now, _, awake = heapq.heappop(self._sleepers)
            awake.set()
        self.now = end


class Readers:
    """Each takes one part after the other, as fast as it may."""

    def __init__(self, pace: Pace, count: int, rate: float) -> None:
        self.rate = rate
        self.got = [0] * count
        self.tasks = [asyncio.create_task(self._read(pace, nth)) for nth in range(count)]

    async def _read(self, pace: Pace, nth: int) -> None:
        while True:
            await pace.wait(8 * MB, self.rate)
            self.got[nth] += 8 * MB
            await asyncio.sleep(0)

    def stop(self, first: int = 0) -> None:
        for task in self.tasks[first:]:
            task.cancel()


async def test_what_readers_may_have_they_have_together_and_in_turn() -> None:
    time = Time()
    readers = Readers(time.pace(), 32, 64.0 * MB)
    await time.pass_by(60.0)
    assert sum(readers.got) == pytest.approx(60 * 64 * MB, rel=0.01)
    assert max(readers.got) - min(readers.got) <= 8 * MB
    readers.stop()


async def test_nobody_waits_for_what_others_wanted_who_have_gone() -> None:
    time = Time()
    readers = Readers(time.pace(), 32, 64.0 * MB)
    await time.pass_by(60.0)
    readers.stop(1)
    before = readers.got[0]
    await time.pass_by(10.0)
    assert readers.got[0] - before == pytest.approx(10 * 64 * MB, rel=0.03)
    readers.stop()


async def test_who_is_told_of_another_rate_tells_all_who_stand_in_line() -> None:
    time = Time()
    readers = Readers(time.pace(), 4, 1.0 * MB)
    await time.pass_by(8.0)
    assert sum(readers.got) == 2 * 8 * MB
    readers.rate = 80.0 * MB
    await time.pass_by(8.0)  # until somebody asks again
    before = sum(readers.got)
    await time.pass_by(10.0)
    assert sum(readers.got) - before == pytest.approx(10 * 80 * MB, rel=0.03)
    readers.stop()


async def test_nobody_waits_any_longer_when_the_broker_has_time_to_spare() -> None:
    time = Time()
    pace = time.pace()
    asking = [asyncio.create_task(pace.wait(8 * MB, 1.0 * MB)) for _ in range(4)]
    await time.pass_by(1.0)
    assert [one.done() for one in asking] == [True, False, False, False]
    await pace.wait(8 * MB, math.inf)
    await time.pass_by(STEP_SECONDS)
    assert all(one.done() for one in asking)


class Watched(Pace):
    """Says what was asked for, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, float]] = []

    async def wait(self, size: int, rate: float) -> None:
        self.asked.append((size, rate))


ROWS = 3


def record(seq: int) -> bytes:
    start, out = BytesWriter(), BytesWriter()
    write_start(start, Message(b""))
    write_record(out, MESSAGE, 0, 40, seq, 0, 0, 0, start.getvalue(), b"value-%d" % seq)
    return out.getvalue()


def slice_of(seq: int, pace: float) -> Slice:
    data = record(seq)
    place = seq.to_bytes(8, "little") + (1 << 32 | seq * len(data)).to_bytes(8, "little")
    return Slice(40, place + len(data).to_bytes(4, "little"), [data], seq + 1, len(data), pace)


async def slices(part: Part, at: int, most: int, most_bytes: int) -> Slice:
    """One message at a time, of a broker that becomes busy."""
    return slice_of(at, math.inf if at < 1 else 1000.0)


@pytest.mark.parametrize("in_files", [True, False])
async def test_every_part_of_a_range_waits_for_its_turn(in_files: bool, tmp_path: Path) -> None:
    (tmp_path / log_name(1)).write_bytes(b"".join(record(seq) for seq in range(ROWS)))
    pace = Watched()
    wanted = Wanted("q", (Part(0, 0, ROWS),), ["value"])
    workshop = Workshop(str(tmp_path), pace)
    reading: Reading | LocalReading = (
        Reading(workshop, wanted, slices) if in_files else LocalReading(Seats(), pace, wanted, slices)
    )
    try:
        await reading.open()
        reading.go()
        data = b"".join([chunk async for chunk in reading.chunks()])
    finally:
        await reading.close()
        workshop.close()
    assert pa.ipc.open_stream(data).read_all().column("value").to_pylist() == [
        b"value-%d" % seq for seq in range(ROWS)
    ]
    size = len(record(0))
    assert pace.asked == [(size, math.inf), (size, 1000.0), (size, 1000.0)]


async def test_so_many_read_at_a_time_where_the_broker_builds_their_ranges() -> None:
    seats = Seats(2)
    wanted = Wanted("q", (Part(0, 0, ROWS),), ["value"])

    async def fails(part: Part, at: int, most: int, most_bytes: int) -> Slice:
        raise UnreadableMessage("q", 0, 0)

    first, second, third = (LocalReading(seats, Watched(), wanted, slices) for _ in range(3))
    with pytest.raises(UnreadableMessage):
        await LocalReading(seats, Watched(), wanted, fails).open()  # has none any more
    await first.open()
    await second.open()
    with pytest.raises(TooManyReaders):
        await third.open()
    await first.close()
    await third.open()
    await third.close()
    await second.close()

"""Readers give way: how much they get while the broker is busy, and how that is shared."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest
from librt.strings import BytesWriter

from sluice.admin.bulk import Slice
from sluice.admin.strain import LEAST, LOOK_SECONDS, TIMES, Strain
from sluice.bulk.pace import LONGEST_SECONDS, Pace
from sluice.bulk.reading import LocalReading, Part, Reading, Wanted, Workshop
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


def test_what_readers_may_have_they_have_together() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.delay(8 * MB, 80 * MB) == 0.0
    assert pace.delay(8 * MB, 80 * MB) == pytest.approx(0.1)
    assert pace.delay(8 * MB, 80 * MB) == pytest.approx(0.2)
    now[0] = 0.25
    assert pace.delay(8 * MB, 80 * MB) == pytest.approx(0.05)
    assert pace.delay(400 * MB, 80 * MB) == pytest.approx(0.15)
    assert pace.delay(1, 80 * MB) == LONGEST_SECONDS, "nobody waits for longer at a time"
    assert pace.delay(8 * MB, math.inf) == 0.0
    assert pace.delay(8 * MB, 80 * MB) == 0.0, "what was taken before is forgotten"


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
        Reading(workshop, wanted, slices) if in_files else LocalReading(pace, wanted, slices)
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

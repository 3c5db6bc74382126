"""Fields of notes."""

from __future__ import annotations

import pytest

from sluice.queues.log.notes import MAX_MILLISECONDS, NoteReader, NoteWriter

KIND = 1


def seconds_of(milliseconds: int) -> float:
    note = NoteWriter(KIND)
    note.write_int(milliseconds)
    return NoteReader(note.to_bytes()).read_seconds()


@pytest.mark.parametrize("milliseconds", [0, -5, 1_700_000_000_123, MAX_MILLISECONDS])
def test_time_that_is_read_can_be_written(milliseconds: int) -> None:
    note = NoteWriter(KIND)
    note.write_seconds(seconds_of(milliseconds))
    assert NoteReader(note.to_bytes()).read_int() == pytest.approx(milliseconds, abs=1)


@pytest.mark.parametrize("milliseconds", [MAX_MILLISECONDS + 1, (1 << 63) - 1, -(1 << 63)])
def test_time_that_cannot_be_written_again_is_refused(milliseconds: int) -> None:
    with pytest.raises(ValueError, match="a time of"):
        seconds_of(milliseconds)

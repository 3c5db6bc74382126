"""What a segment knows of the values in it."""

from __future__ import annotations

import random

from sluice.queues.segments import Segments

SHORTEST = 68


def test_a_segment_knows_which_of_its_last_values_live() -> None:
    chance = random.Random(3)
    segments = Segments()
    here: set[int] = set()
    gone: set[int] = set()
    at = 28
    for _ in range(5000):
        address = chance.choice([7, 8]) << 32 | at
        at += chance.choice([SHORTEST, SHORTEST + 1, 100, 5000])
        segments.add_lasting(address, SHORTEST)
        here.add(address)
        if chance.random() < 0.6:
            other = chance.choice(sorted(here)[-50:])
            segments.drop(other, SHORTEST)
            here.remove(other)
            gone.add(other)
    assert all(segments.lasts(address) for address in here)
    assert not any(segments.lasts(address) for address in gone)
    assert not segments.lasts(9 << 32 | 28)
    segments.given_back([7])
    assert not any(segments.lasts(address) for address in here if address >> 32 == 7)


def test_messages_of_work_queues_are_no_last_values() -> None:
    segments = Segments()
    segments.add(1 << 32, 100)
    segments.add_lasting(1 << 32 | 128, 100)
    segments.drop(1 << 32, 100)
    assert not segments.lasts(1 << 32)
    assert segments.lasts(1 << 32 | 128)

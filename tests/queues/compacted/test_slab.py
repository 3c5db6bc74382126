"""Room for the rows of owners: nobody gets what another has, and what is given back can be had again."""

from __future__ import annotations

import random

import pytest

from sluice.queues.compacted.slab import FIRST_BITS, PIECE_BITS, Run, Space


@pytest.mark.parametrize("seed", range(3))
def test_no_two_have_the_same_rows(seed: int) -> None:
    chance = random.Random(seed)
    space = Space()
    runs: list[Run] = []
    taken: dict[int, set[int]] = {}  # by piece
    for _ in range(3000):
        if runs and chance.random() < 0.45:
            run = runs.pop(chance.randrange(len(runs)))
            taken[id(run.piece)] -= set(range(int(run.first), int(run.first) + (1 << int(run.bits))))
            space.give(run.piece, run.first, run.bits)
            continue
        run = space.take(chance.choice((2, 2, 3, 5, 9)))
        rows = set(range(int(run.first), int(run.first) + (1 << int(run.bits))))
        theirs = taken.setdefault(id(run.piece), set())
        assert not rows & theirs and max(rows) < 1 << int(run.piece.bits)
        theirs |= rows
        runs.append(run)
    for run in runs:
        space.give(run.piece, run.first, run.bits)
    assert all(piece.is_empty() for piece in space._pieces)


def test_one_who_needs_more_than_a_piece_has_one_of_his_own() -> None:
    space = Space()
    small = space.take(3)
    assert small.piece.bits == FIRST_BITS
    large = space.take(PIECE_BITS + 1)
    assert large.piece.bits == PIECE_BITS + 1 and large.first == 0
    space.give(small.piece, small.first, 3)
    space.give(large.piece, large.first, PIECE_BITS + 1)
    assert len(space._pieces) == 1


def test_owners_who_grow_together_leave_room_for_each_other() -> None:
    """A hundred of them, from 4 rows to 128: what the first have left is enough for the rest."""
    space = Space()
    runs = [space.take(2) for _ in range(100)]
    for bits in range(3, 8):
        for nth, run in enumerate(runs):
            runs[nth] = space.take(bits)
            space.give(run.piece, run.first, bits - 1)
    assert sum(1 << int(piece.bits) for piece in space._pieces) <= (1 << FIRST_BITS) + (1 << PIECE_BITS)
    assert sum(len(free) for free in space._pieces[-1].free) < 30

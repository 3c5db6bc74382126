"""Room for the rows of owners: nobody gets what another has, and what is given back can be had again."""

from __future__ import annotations

import random

import pytest

from sluice.queues.compacted.slab import FIRST_CHUNK_BITS, MAX_CHUNK_BITS, Extent, Slab


@pytest.mark.parametrize("seed", range(3))
def test_allocations_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    space = Slab()
    runs: list[Extent] = []
    taken: dict[int, set[int]] = {}  # by piece
    for _ in range(3000):
        if runs and chance.random() < 0.45:
            run = runs.pop(chance.randrange(len(runs)))
            taken[id(run.chunk)] -= set(
                range(int(run.first_row), int(run.first_row) + (1 << int(run.bits)))
            )
            space.release(run.chunk, run.first_row, run.bits)
            continue
        run = space.allocate(chance.choice((2, 2, 3, 5, 9)))
        rows = set(range(int(run.first_row), int(run.first_row) + (1 << int(run.bits))))
        theirs = taken.setdefault(id(run.chunk), set())
        assert not rows & theirs and max(rows) < 1 << int(run.chunk.bits)
        theirs |= rows
        runs.append(run)
    for run in runs:
        space.release(run.chunk, run.first_row, run.bits)
    assert all(piece.is_empty() for piece in space._chunks_by_room)


def test_allocation_larger_than_a_chunk_gets_its_own() -> None:
    space = Slab()
    small = space.allocate(3)
    assert small.chunk.bits == FIRST_CHUNK_BITS
    large = space.allocate(MAX_CHUNK_BITS + 1)
    assert large.chunk.bits == MAX_CHUNK_BITS + 1 and large.first_row == 0
    space.release(small.chunk, small.first_row, 3)
    space.release(large.chunk, large.first_row, MAX_CHUNK_BITS + 1)
    assert len(space._chunks_by_room) == 1


def test_owners_that_grow_together_leave_space_for_each_other() -> None:
    """A hundred of them, from 4 rows to 128: what the first have left is enough for the rest."""
    space = Slab()
    runs = [space.allocate(2) for _ in range(100)]
    for bits in range(3, 8):
        for nth, run in enumerate(runs):
            runs[nth] = space.allocate(bits)
            space.release(run.chunk, run.first_row, bits - 1)
    assert sum(1 << int(piece.bits) for piece in space._chunks_by_room) <= (
        1 << FIRST_CHUNK_BITS
    ) + (1 << MAX_CHUNK_BITS)
    assert sum(len(free) for free in space._chunks_by_room[-1].free_extents) < 30

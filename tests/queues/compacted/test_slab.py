"""Allocator for rows: extents never overlap, and released ones can be allocated again."""

from __future__ import annotations

import random

import pytest

from sluice.queues.compacted.slab import FIRST_CHUNK_BITS, MAX_CHUNK_BITS, Extent, Slab


@pytest.mark.parametrize("seed", range(3))
def test_allocations_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    slab = Slab()
    extents: list[Extent] = []
    allocated_rows: dict[int, set[int]] = {}  # by chunk
    for _ in range(3000):
        if extents and rng.random() < 0.45:
            extent = extents.pop(rng.randrange(len(extents)))
            allocated_rows[id(extent.chunk)] -= set(
                range(int(extent.first_row), int(extent.first_row) + (1 << int(extent.bits)))
            )
            slab.release(extent.chunk, extent.first_row, extent.bits)
            continue
        extent = slab.allocate(rng.choice((2, 2, 3, 5, 9)))
        rows = set(range(int(extent.first_row), int(extent.first_row) + (1 << int(extent.bits))))
        allocated = allocated_rows.setdefault(id(extent.chunk), set())
        assert not rows & allocated and max(rows) < 1 << int(extent.chunk.bits)
        allocated |= rows
        extents.append(extent)
    for extent in extents:
        slab.release(extent.chunk, extent.first_row, extent.bits)
    assert all(chunk.is_empty() for chunk in slab._chunks_by_room)


def test_allocation_larger_than_a_chunk_gets_its_own() -> None:
    slab = Slab()
    small = slab.allocate(3)
    assert small.chunk.bits == FIRST_CHUNK_BITS
    large = slab.allocate(MAX_CHUNK_BITS + 1)
    assert large.chunk.bits == MAX_CHUNK_BITS + 1 and large.first_row == 0
    slab.release(small.chunk, small.first_row, 3)
    slab.release(large.chunk, large.first_row, MAX_CHUNK_BITS + 1)
    assert len(slab._chunks_by_room) == 1


def test_owners_that_grow_together_leave_space_for_each_other() -> None:
    """A hundred owners grow from 4 rows to 128: released extents are enough for the later ones."""
    slab = Slab()
    extents = [slab.allocate(2) for _ in range(100)]
    for bits in range(3, 8):
        for nth, extent in enumerate(extents):
            extents[nth] = slab.allocate(bits)
            slab.release(extent.chunk, extent.first_row, bits - 1)
    assert sum(1 << int(chunk.bits) for chunk in slab._chunks_by_room) <= (
        1 << FIRST_CHUNK_BITS
    ) + (1 << MAX_CHUNK_BITS)
    assert sum(len(free) for free in slab._chunks_by_room[-1].free_extents) < 30

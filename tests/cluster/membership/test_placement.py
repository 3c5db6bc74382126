"""Placement of names in cells and of cells on nodes: pure functions."""

from __future__ import annotations

import uuid
from collections import Counter
from random import Random

import pytest

from sluice.cluster.membership.placement import place_cells
from sluice.placement import cell_of, cell_of_queue

CELLS = 60
QUEUES = 1000

NUMBERED = {
    "counted": [f"orders-{nth}" for nth in range(QUEUES)],
    "padded, counted from one": [f"queue{nth:05}" for nth in range(1, QUEUES + 1)],
    "in the middle": [f"tenants/{nth}/invoices" for nth in range(QUEUES)],
    "two numbers": [f"site-{site}/line-{line}/temp" for site in range(20) for line in range(50)],
    "years and days": [
        f"log-{year}-{month:02}-{day:02}"
        for year in range(2020, 2023)
        for month in range(1, 13)
        for day in range(1, 29)
    ][:QUEUES],
}

# Of a thousand randomly placed names, a sixth is up to 20 % off; no function of the name alone is
# better.
RANDOMLY_PLACED = {
    "few in each group": [
        f"plant-{plant}/cell-{cell}" for plant in range(125) for cell in range(8)
    ],
    "in steps": [f"device-{nth * 1000}" for nth in range(QUEUES)],
    "without order": [str(uuid.UUID(int=Random(nth).getrandbits(128))) for nth in range(QUEUES)],
}


def nodes_of(count: int) -> list[str]:
    return [f"node-{chr(ord('a') + nth)}" for nth in range(count)]


@pytest.mark.parametrize("scheme", NUMBERED)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_thousand_queues_are_even_within_ten_percent(scheme: str, count: int) -> None:
    owners = place_cells(CELLS, nodes_of(count))
    held = Counter(owners[cell_of_queue(name, CELLS)] for name in NUMBERED[scheme])
    even = len(NUMBERED[scheme]) / count
    assert all(abs(held[node] - even) <= even * 0.1 for node in nodes_of(count)), held


@pytest.mark.parametrize("scheme", RANDOMLY_PLACED)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_unnumbered_names_are_as_even_as_random_ones(scheme: str, count: int) -> None:
    owners = place_cells(CELLS, nodes_of(count))
    held = Counter(owners[cell_of_queue(name, CELLS)] for name in RANDOMLY_PLACED[scheme])
    even = QUEUES / count
    assert all(abs(held[node] - even) <= even * 0.2 for node in nodes_of(count)), held


@pytest.mark.parametrize("cells", [1, 7, 60, 256])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_nodes_have_equally_many_cells_within_one(cells: int, count: int) -> None:
    held = Counter(place_cells(cells, nodes_of(count)))
    shares = [held[node] for node in nodes_of(count)]
    assert sum(shares) == cells
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_joining_or_leaving_node_moves_little_more_than_its_share(count: int) -> None:
    """For any node and any name. A new random placement would move nearly all cells."""
    moved = []
    for draw in range(10):
        names = [f"{Random(draw * 100 + nth).random()}" for nth in range(count + 1)]
        before, after = place_cells(CELLS, names[:-1]), place_cells(CELLS, names)
        moved.append(sum(one != other for one, other in zip(before, after)))
    share = CELLS / (count + 1)
    assert sum(moved) / len(moved) <= 1.5 * share
    assert max(moved) <= 2 * share


def test_placement_does_not_depend_on_who_computes_it() -> None:
    nodes = nodes_of(5)
    assert place_cells(CELLS, nodes) == place_cells(CELLS, nodes[::-1])
    assert place_cells(CELLS, []) == []


@pytest.mark.parametrize("count", [2, 3, 5])
def test_avoided_cell_moves_alone_and_stays_if_no_other_node_is_left(count: int) -> None:
    nodes = nodes_of(count)
    before = place_cells(CELLS, nodes)
    for cell in range(CELLS):
        after = place_cells(CELLS, nodes, {cell: [before[cell]]})
        assert [number for number in range(CELLS) if before[number] != after[number]] == [cell]
        assert place_cells(CELLS, nodes, {cell: nodes}) == before


def test_name_has_the_same_cell_as_text_and_as_bytes() -> None:
    assert cell_of("a/ü-3", CELLS) == cell_of("a/ü-3".encode(), CELLS)


@pytest.mark.parametrize("name", ["orders", "orders-17", "dlq/orders"])
def test_dead_letters_are_placed_with_their_queue(name: str) -> None:
    assert cell_of_queue(f"dlq/{name}", CELLS) == cell_of_queue(name, CELLS)


def test_very_long_number_in_a_name_is_accepted() -> None:
    assert 0 <= cell_of("x" + "9" * 5000, CELLS) < CELLS

"""A short run of the simulator, and the seeds that have found something: each once broke the engine.

Long runs: scripts/simulate --steps 1000000 --seed 1
"""

from __future__ import annotations

import pytest

from sluice.queues.rules import PER_KEY, STRICT
from tests.simulator.oracle import Violation
from tests.simulator.world import World, run


@pytest.mark.parametrize("seed", range(1, 31))
def test_worlds_in_which_nothing_is_lost_double_or_out_of_order(seed: int) -> None:
    run(seed, 300)


def test_a_longer_life_with_an_order_to_keep() -> None:
    world = run(5, 2500, ordering=PER_KEY, batch_size=1, partitions=2)
    assert world.counts["crashes"] > 10 and world.counts["rests"] >= 1
    run(6, 1000, ordering=STRICT, batch_size=1)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (3, 300),  # a message expired before its own frame was kept, and was read as damaged
        (
            16,
            300,
        ),  # two groups, one of them done: its count went up again when the message expired for the other
        (
            1007,
            5000,
        ),  # an urgent message behind a gate made older ones of its key wait for what waited for them
    ],
)
def test_what_was_found_stays_mended(seed: int, steps: int) -> None:
    run(seed, steps)


def test_the_judge_notices_a_message_that_vanishes() -> None:
    """Whoever watches must be able to see: take something away behind the engine's back."""
    world = World(2, overflow=0, message_ttl=0.0)
    while world.steps < 150 or not world.oracle.pairs:
        world.step()
    pair = next(iter(world.oracle.pairs.values()))
    partition = world.engine.partitions[pair.place[0]]
    world.oracle.in_hands.clear()
    while world.engine.groups[pair.gid].cursors[partition.number].leases.get(pair.place[1]) is not None:
        world.step()
    world.engine.remove_for_all(partition, pair.place[1], 3)
    with pytest.raises(Violation, match="without a reason"):
        world.check()

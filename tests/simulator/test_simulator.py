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
    with pytest.raises(Violation):
        for step in range(400):
            world.step()
            if step > 150 and world.oracle.pairs:
                pair = next(iter(world.oracle.pairs.values()))
                world.engine.remove_for_all(world.engine.partitions[pair.place[0]], pair.place[1], 3)

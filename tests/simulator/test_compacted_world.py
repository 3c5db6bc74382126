"""A short run of the simulator of compacted queues. Long runs: scripts/simulate --compacted --steps 1000000"""

from __future__ import annotations

import pytest

from tests.simulator.compacted_world import LastValues, run
from tests.simulator.oracle import Violation


@pytest.mark.parametrize("seed", range(1, 13))
def test_worlds_in_which_the_last_value_of_each_key_is_kept_and_given_once(seed: int) -> None:
    run(seed, 300)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (4, 300),  # what was acknowledged out of turn was given again when its turn had come
    ],
)
def test_what_was_found_stays_mended(seed: int, steps: int) -> None:
    run(seed, steps)


def test_the_judge_notices_a_value_that_vanishes() -> None:
    """Whoever watches must be able to see: take something away behind the world's back."""
    world = LastValues(2)
    while not any(owner.live for owner in world.engine.exclusive.owners.values()) or world.retention:
        world.retention = 0.0
        world.step()
    owner = next(owner for owner in world.engine.exclusive.owners.values() if owner.live)
    owner.remove(owner.after(0))
    with pytest.raises(Violation, match="missing"):
        world.check()


def test_the_judge_notices_an_owner_that_is_there_and_gets_nothing() -> None:
    world = LastValues(2)
    world.retention = 0.0
    world.subscribe()
    (taker,) = world.takers.values()
    taker.fetching = True  # and nobody has asked the store
    while not world.model[taker.client].waits():
        world.write()
    with pytest.raises(Violation, match="is there and has room"):
        world.rest()


def test_the_judge_notices_a_group_that_forgets_what_it_has_settled() -> None:
    world = LastValues(2)
    world.publish()
    world.join()
    world.rest()
    world.check()
    next(iter(world.model["state"].groups.values())).add(0)
    with pytest.raises(Violation, match="groups wait for"):
        world.check()

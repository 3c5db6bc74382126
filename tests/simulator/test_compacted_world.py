"""A short simulation of compacted queues.

Long runs: scripts/simulate --compacted --steps 1000000
"""

from __future__ import annotations

import pytest

from tests.simulator.compacted_world import CompactedWorld, run
from tests.simulator.oracle import Violation


@pytest.mark.parametrize("seed", range(1, 13))
def test_last_value_of_each_key_is_stored_and_delivered_once(seed: int) -> None:
    run(seed, 300)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (4, 300),  # a value acknowledged out of order was delivered again later
    ],
)
def test_earlier_failing_seeds_pass(seed: int, steps: int) -> None:
    run(seed, steps)


def test_checker_detects_a_lost_value() -> None:
    """The checker must detect faults: remove a value without telling the world."""
    world = CompactedWorld(2)
    while (
        not any(owner.live_values for owner in world.engine.exclusive.owners.values())
        or world.retention
    ):
        world.retention = 0.0
        world.step()
    owner = next(owner for owner in world.engine.exclusive.owners.values() if owner.live_values)
    owner.remove(owner.slot_after(0))
    with pytest.raises(Violation, match="missing"):
        world.check()


def test_checker_detects_an_online_owner_that_gets_nothing() -> None:
    world = CompactedWorld(2)
    world.retention = 0.0
    world.subscribe()
    (reader,) = world.readers.values()
    reader.is_reading = True  # although no read was requested
    while not world.model[reader.client].waits():
        world.write()
    with pytest.raises(Violation, match="is online with capacity"):
        world.wait_idle()


def test_checker_detects_a_group_that_forgets_its_settlements() -> None:
    world = CompactedWorld(2)
    world.publish()
    world.join()
    world.wait_idle()
    world.check()
    next(iter(world.model["state"].groups.values())).add(0)
    with pytest.raises(Violation, match="groups have unsettled"):
        world.check()

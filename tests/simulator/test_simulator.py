"""A short run of the simulator, and the seeds that have found something: each once broke the engine.

Long runs: scripts/simulate --steps 1000000 --seed 1
"""

from __future__ import annotations

import pytest

from sluice.queues.delivery import Lease
from sluice.queues.rules import PER_KEY, STRICT
from tests.simulator.oracle import Violation
from tests.simulator.strangers import STRANGER
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


def world_with_a_delivery() -> tuple[World, Lease]:
    """Return a world in which a client holds a message and the engine's timers are set."""
    world = World(3, overflow=0, message_ttl=0.0, retention=0.0, max_retries=10, total_timeout=10_800.0)
    while world.steps < 150 or not any(hand.holds for hand in world.hands):
        world.step()
    world.runner.end_turn()
    world.is_armed = True
    held = next(one for hand in world.hands for one in hand.holds.values())
    return world, held.lease


def let_time_pass(world: World) -> None:
    for _ in range(30):
        world.pass_time()
        world.runner.end_turn()
        world._run_all()
        world.judge_turn()


@pytest.mark.parametrize("seconds", [-3.0, 3.0])
def test_the_judge_notices_a_deadline_that_is_not_kept(seconds: float) -> None:
    world, lease = world_with_a_delivery()
    queue = lease.cursor.group.queue
    lease.deadline += seconds
    world.engine.timers.watch(queue, lease.deadline)
    world.runner.end_turn()
    with pytest.raises(Violation, match="before its deadline" if seconds < 0 else "after its deadline"):
        let_time_pass(world)


def test_the_judge_counts_attempts() -> None:
    world, lease = world_with_a_delivery()
    lease.failures += 1
    with pytest.raises(Violation, match="may have failed"):
        let_time_pass(world)


@pytest.mark.parametrize("seconds", [-2.0, 60.0])
def test_the_judge_notices_a_retry_that_does_not_come_at_its_time(seconds: float) -> None:
    world, lease = world_with_a_delivery()
    number = (int(lease.cursor.group.gid), int(lease.cursor.partition.pid), int(lease.seq))
    hand = next(hand for hand in world.hands if number in hand.holds)
    del hand.holds[number]
    world.engine.nack(lease, 3.0, "")
    world.failed(number, 3.0)
    world.put_down(number)
    hand.prefetch = 1000
    lease.due += seconds
    world.engine.timers.wait_for_retry(lease, lease.due)
    world.runner.end_turn()
    with pytest.raises(Violation, match="before its time" if seconds < 0 else "still waits for its retry"):
        let_time_pass(world)


def test_the_judge_notices_a_stranger_who_may_settle() -> None:
    world, lease = world_with_a_delivery()
    lease.holder = STRANGER
    with pytest.raises(Violation, match="does not hold it may settle it"):
        try_strangers(world)


def try_strangers(world: World) -> None:
    for _ in range(300):
        world.strangers.try_one(world.engine, world.old)

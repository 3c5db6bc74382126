"""A short simulation, and seeds that once found a bug in the engine.

Long runs: scripts/simulate --steps 1000000 --seed 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from sluice.message import Message
from sluice.queues.log.notes import PURGED
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.queue_rules import PER_KEY, REJECT_NEW, STRICT
from tests.simulator.oracle import Number, Violation
from tests.simulator.unauthorized_clients import UNKNOWN_CLIENT
from tests.simulator.world import World, run


@pytest.mark.parametrize("seed", range(1, 31))
def test_nothing_is_lost_duplicated_or_reordered(seed: int) -> None:
    run(seed, 300)


@pytest.mark.timeout(300)
def test_longer_run_with_ordering() -> None:
    world = run(5, 2500, ordering=PER_KEY, batch_size=1, partitions=2)
    assert world.counts["crashes"] > 10 and world.counts["rests"] >= 1
    run(6, 1000, ordering=STRICT, batch_size=1)


@pytest.mark.timeout(300)  # half a minute of CPU time if the queues are not compiled
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        # A message expired before its own frame was committed, and was read as damaged.
        (3, 300),
        # Of two groups, one was done: its count grew again when the message expired for the other.
        (16, 300),
        # An urgent message behind a gate blocked older ones of its key, which the gate waited for.
        (1007, 5000),
        # The raised burst of a rate limit counted for the time before it was raised.
        (20261124, 1800),
        # The judge forgot the ids of a queue whose deletion was lost in a crash.
        (20261157, 1300),
        # After a restart, a raised rate limit began with the tokens of the one before.
        (20262010, 2700),
    ],
)
def test_earlier_failing_seeds_pass(seed: int, steps: int) -> None:
    run(seed, steps)


# ---- the checker itself: each test plants one fault in a world without random events

PLAIN: Final = {
    "partitions": 1,
    "ordering": PER_KEY,
    "batch_size": 1,
    "max_retries": 1000,
    "initial_backoff": 5.0,
    "total_timeout": 10_800.0,
    "jitter": 0.0,
    "delivery_timeout": 30.0,
    "max_depth": 100_000,
    "overflow": REJECT_NEW,
    "message_ttl": 0.0,
    "expired_to_dlq": False,
    "retention": 0.0,
    "dlq_enabled": True,
    "dedup_window": 120.0,
    "compress": False,
    "sync": True,
    "rebalance_after": 1.0,
}


@pytest.fixture(params=[1, 2, 3])
def plain_world(request: pytest.FixtureRequest) -> Callable[..., World]:
    """Create a world with one message in queue one and one group; the seed must not matter."""

    def make(**settings: Any) -> World:
        world = World(request.param, **{**PLAIN, **settings})
        world.engine.now = world.loop.now
        world.make_group(world.engine.lifecycle.get_or_create_queue("one"), "red", None)
        publish(world)
        return world

    return make


def publish(world: World) -> None:
    world.serial += 1
    world.send("one", Message(b"%d:x" % world.serial, b"", b"a", b""))
    end_turn(world)


def end_turn(world: World) -> None:
    world.engine.now = world.loop.now
    world.commit_loop.end_turn()
    world._run_all()
    world.is_armed = True
    world.check_turn()


def let_time_pass(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.advance(1.0)
        end_turn(world)


def deliver(world: World) -> Lease:
    """Add a consumer that gets the message."""
    queue = world.engine.queues["one"]
    consumer = world.add_consumer(queue, queue.groups["red"], 3)
    end_turn(world)
    (held,) = consumer.holds.values()
    return held.lease


def number_of(lease: Lease) -> Number:
    return (int(lease.cursor.group.gid), int(lease.cursor.partition.pid), int(lease.seq))


def fail(world: World, lease: Lease, delay: float) -> None:
    """Let the client nack the message."""
    number = number_of(lease)
    (consumer,) = world.consumers
    del consumer.holds[number]
    world.engine.settlement.nack(lease, delay, "")
    world.failed(number, delay, int(lease.attempt))
    world.returned(number)


PlainWorld = Callable[..., World]


def test_checker_reports_nothing_without_a_planted_fault(plain_world: PlainWorld) -> None:
    world = plain_world(total_timeout=300.0, max_retries=1000)
    deliver(world)
    let_time_pass(world, 100)
    world.restart()
    let_time_pass(world, 250)
    assert not world.oracle.pairs, "dead after its total timeout"


def test_checker_detects_a_lost_message(plain_world: PlainWorld) -> None:
    world = plain_world()
    (pair,) = world.oracle.pairs.values()
    world.engine.removal.remove_for_all_groups(
        world.engine.partitions[pair.location[0]], pair.location[1], PURGED
    )
    with pytest.raises(Violation, match="without a reason"):
        world.check()


@pytest.mark.parametrize("seconds", [-3.0, 3.0])
def test_checker_detects_a_missed_deadline(plain_world: PlainWorld, seconds: float) -> None:
    world = plain_world()
    lease = deliver(world)
    lease.deadline += seconds
    world.engine.timers.schedule_deadline_check(lease.cursor.group.queue, lease.deadline)
    world.commit_loop.end_turn()
    with pytest.raises(
        Violation, match="before its deadline" if seconds < 0 else "after its deadline"
    ):
        let_time_pass(world, 60)


def test_checker_counts_attempts(plain_world: PlainWorld) -> None:
    world = plain_world()
    lease = deliver(world)
    lease.failures += 1
    fail(world, lease, 0.0)
    with pytest.raises(Violation, match="and attempt 2 is next"):
        end_turn(world)


@pytest.mark.parametrize("seconds", [-2.0, 60.0])
def test_checker_detects_a_retry_at_the_wrong_time(plain_world: PlainWorld, seconds: float) -> None:
    world = plain_world()
    lease = deliver(world)
    fail(world, lease, 3.0)
    lease.retry_at += seconds
    world.engine.timers.schedule_retry(lease, lease.retry_at)
    world.commit_loop.end_turn()
    with pytest.raises(
        Violation, match="before its time" if seconds < 0 else "still waits for its retry"
    ):
        let_time_pass(world, 60)


def test_checker_detects_a_missed_total_timeout(plain_world: PlainWorld) -> None:
    world = plain_world(total_timeout=60.0)
    lease = deliver(world)
    lease.first_delivered_at += 100.0
    fail(world, lease, 1.0)
    world.leave()
    with pytest.raises(Violation, match="is past its total timeout"):
        let_time_pass(world, 200)


def test_checker_detects_a_total_timeout_that_restarts_with_the_process(
    plain_world: PlainWorld,
) -> None:
    world = plain_world(total_timeout=60.0)
    lease = deliver(world)
    let_time_pass(world, 20)
    fail(world, lease, 1.0)
    end_turn(world)
    world.restart()
    (lease,) = (
        one for group in world.engine.groups.values() for one in group.cursors[0].leases.values()
    )
    assert lease.spent_before_start == pytest.approx(20.0, abs=0.1)
    lease.spent_before_start = 0.0
    with pytest.raises(Violation, match="is past its total timeout"):
        let_time_pass(world, 200)


def test_checker_detects_an_unauthorized_settlement(plain_world: PlainWorld) -> None:
    world = plain_world()
    deliver(world).holder = UNKNOWN_CLIENT
    with pytest.raises(Violation, match="does not hold it may settle it"):
        try_unauthorized_clients(world)


def try_unauthorized_clients(world: World) -> None:
    while world.unauthorized.attempts < 10:
        world.unauthorized.try_one(world.engine, world.old)

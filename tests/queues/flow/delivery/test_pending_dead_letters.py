"""A settlement whose dead letter needs its body from the store is acknowledged after both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.queues.model.delivery_lease import DEAD_LETTERING, Lease
from tests.queues.conftest import MakeEngine
from tests.queues.kit import Delivery, EngineUnderTest, MemoryBackend

FIRST, SECOND = 900_001, 900_002


def lease_before_crash(engine: EngineUnderTest, count: int = 1) -> list[Delivery]:
    for number in range(count):
        engine.publish(b"%d" % number)
    leased = engine.worker("w").lease_all()
    engine.crash_and_restart()
    engine.publisher.receipts.clear()
    return leased


def reject(engine: EngineUnderTest, old: Delivery) -> Lease:
    """Reject a delivery of the previous run; the turn has not ended."""
    group = engine.engine.queues["tasks"].groups["workers"]
    engine.engine.now = engine.loop.now
    lease = engine.engine.lease_lookup.reclaim_lease(group, old.name, old.token, "w")
    assert lease is not None
    engine.engine.settlement.dead_letter(lease, "rejected", "no sense", True)
    assert lease.state == DEAD_LETTERING
    return lease


def wait_for(engine: EngineUnderTest, tag: int, *leases: Lease) -> None:
    engine.engine.pending_dead_letters.add_waiter(engine.publisher, tag, list(leases))


def test_it_waits_for_the_body_and_for_the_commit(engine: EngineUnderTest) -> None:
    (old,) = lease_before_crash(engine)
    wait_for(engine, FIRST, reject(engine, old))
    engine.commit_loop.end_turn()
    assert engine.publisher.receipts == []
    engine.run_until_idle()
    assert engine.publisher.receipts == [FIRST]
    engine.crash_and_restart()
    assert engine.dead_letters() == [b"0"] and engine.depth() == 0


def test_what_is_not_acknowledged_may_be_lost_and_what_is_acknowledged_is_not() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    (old,) = lease_before_crash(engine)
    assert backend.store is not None
    backend.store.hold()
    wait_for(engine, FIRST, reject(engine, old))
    engine.run_until_idle()
    assert engine.publisher.receipts == [], "the body was read, the dead letter is not committed"
    backend.cut_power()
    engine.reopen()
    assert engine.publisher.receipts == []
    assert engine.depth() == 1 and engine.worker("w").ack_all() == [b"0"]


def test_one_command_waits_for_all_its_dead_letters_and_the_next_for_it(
    engine: EngineUnderTest,
) -> None:
    first, second, third = lease_before_crash(engine, 3)
    wait_for(engine, FIRST, reject(engine, first), reject(engine, second))
    wait_for(engine, SECOND, reject(engine, third))
    engine.run_until_idle()
    assert engine.publisher.receipts == [FIRST, SECOND]
    assert sorted(engine.dead_letters()) == [b"0", b"1", b"2"]


def delete_queue(engine: EngineUnderTest, lease: Lease) -> None:
    engine.engine.lifecycle.delete_queue(engine.engine.lifecycle.get_queue("tasks"))


def delete_group(engine: EngineUnderTest, lease: Lease) -> None:
    engine.engine.lifecycle.delete_group(lease.cursor.group)


def ack_late(engine: EngineUnderTest, lease: Lease) -> None:
    engine.engine.settlement.ack(lease)


@pytest.mark.parametrize("end", [delete_queue, delete_group, ack_late])
def test_delivery_that_ends_while_its_body_is_read_is_acknowledged_too(
    engine: EngineUnderTest, end: Callable[[EngineUnderTest, Lease], None]
) -> None:
    (old,) = lease_before_crash(engine)
    lease = reject(engine, old)
    wait_for(engine, FIRST, lease)
    engine.commit_loop.end_turn()
    end(engine, lease)
    engine.run_until_idle()
    assert engine.publisher.receipts == [FIRST]
    assert "dlq/tasks" not in engine.engine.queues


def test_damaged_body_ends_the_wait(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (old,) = lease_before_crash(engine)
    lease = reject(engine, old)
    wait_for(engine, FIRST, lease)
    (read,) = engine.engine.end_turn().reads
    engine.engine.on_read_done(read, [None])
    engine.run_until_idle()
    assert engine.publisher.receipts == [FIRST]
    assert any("damaged on disk" in warning for warning in engine.warnings)
    assert engine.depth() == 0

"""The ledger balances: every message of every group is in exactly one column."""

from __future__ import annotations

from sluice.queues.model.ledger import verify
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest


def test_every_message_is_in_one_ledger_column(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=1000.0)
    worker = engine.worker(prefetch=5)
    engine.group("idle")
    for number in range(10):
        engine.publish(b"%d" % number, ttl=1000 if number == 9 else 0)
    acked, nacked, rejected, *_ = worker.lease_all()
    worker.is_open = False
    worker.ack(acked)
    worker.nack(nacked, delay=500)
    worker.reject(rejected)
    ledger = engine.ledger()
    assert (ledger.enqueued, ledger.waiting, ledger.delivered, ledger.retrying) == (10, 5, 2, 1)
    assert (ledger.acked, ledger.dead, ledger.expired, ledger.purged) == (1, 1, 0, 0)
    assert ledger.balance() == 0
    engine.advance(seconds=1001)
    engine.engine.removal.purge_queue(engine.queue())
    ledger = engine.ledger()
    assert (ledger.expired, ledger.acked, ledger.dead) == (1, 1, 1)
    idle = engine.ledger("idle")
    assert (idle.enqueued, idle.expired, idle.purged, idle.balance()) == (10, 1, 9, 0)


def test_depth_is_exact(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=3)
    workers = [engine.worker(group=name) for name in ("a", "b")]
    for number in range(30):
        engine.publish(b"%d" % number)
        assert engine.depth() == number + 1
    workers[0].ack_all()
    assert engine.depth() == 30
    for settled, delivery in enumerate(reversed(workers[1].lease_all())):
        workers[1].ack(delivery)
        assert engine.depth() == 29 - settled


def test_counters_survive_a_restart(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    worker = engine.worker()
    for number in range(10):
        engine.publish(b"%d" % number, message_id=b"%d" % (number % 9))
    deliveries = worker.lease_all()
    worker.nack(deliveries[0])
    for delivery in deliveries[1:4]:
        worker.ack(delivery)
    for restart in (engine.crash_and_restart, engine.restart):
        restart()
        queue = engine.queue()
        assert (queue.enqueued, queue.retried, engine.depth()) == (9, 1, 6)
        ledger = engine.ledger()
        assert (ledger.enqueued, ledger.acked, ledger.retrying, ledger.waiting) == (9, 3, 1, 5)


def test_verify_names_counters_that_do_not_add_up(engine: EngineUnderTest) -> None:
    engine.group()
    engine.publish(b"1")
    queue = engine.queue()
    assert verify(engine.engine.queues) == []
    queue.depth += 1
    queue.bytes += 5
    cursor = engine.group().cursors[0]
    cursor.outcome_counts[0] += 1
    cursor.in_flight += 1
    faults = "\n".join(verify(engine.engine.queues))
    queue.depth -= 1
    queue.bytes -= 5
    cursor.outcome_counts[0] -= 1
    cursor.in_flight -= 1
    for text in ("depth", "bytes", "not settled", "deliveries"):
        assert text in faults

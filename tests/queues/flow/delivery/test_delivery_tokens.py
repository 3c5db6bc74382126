"""Delivery tokens prove a delivery to a client, also after a restart or a change of owner."""

from __future__ import annotations

import hmac
from hashlib import shake_128

import pytest

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.flow.delivery.delivery_tokens import DeliveryToken, DeliveryTokens
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Consumer
from sluice.queues.names import format_message_id
from tests.queues.conftest import MakeEngine
from tests.queues.kit import Delivery, EngineUnderTest, MemoryBackend


def may_settle(
    engine: EngineUnderTest, name: bytes, token: DeliveryToken, client: str = "w"
) -> bool:
    """Return whether a token settles a live delivery, or one of an earlier run."""
    group = engine.engine.queues["tasks"].groups["workers"]
    try:
        engine.engine.lease_lookup.find_lease(group, name, token, client)
        return True
    except (StaleDelivery, UnknownDelivery):
        return engine.engine.lease_lookup.reclaim_lease(
            group, name, token, client
        ) is not None or engine.engine.lease_lookup.ack_late(group, name, token, client)


def guesses_for(token: DeliveryToken) -> list[DeliveryToken]:
    """Return guesses of an attacker who knows the counters and other tokens of the run."""
    run, counter, tag = int(token.run), int(token.counter), int(token.tag)
    guesses = [DeliveryToken(counter + step, run, tag) for step in range(-50, 51) if step]
    guesses += [DeliveryToken(counter, run, tag ^ (1 << bit)) for bit in range(63)]
    return [
        *guesses,
        DeliveryToken(counter, run, 0),
        DeliveryToken(counter, run ^ 1, tag ^ 1),
        DeliveryToken(counter, 0, tag ^ 1),
    ]


def test_guessed_token_settles_nothing(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    job = engine.worker("w").lease()
    assert not any(
        may_settle(engine, job.name, guess, client)
        for guess in guesses_for(job.token)
        for client in "wx"
    )
    assert may_settle(engine, job.name, job.token, "x"), "the token itself does, from any client"


@pytest.mark.parametrize("stop", ["crash", "restart", "restart twice"])
def test_guessed_token_settles_nothing_after_a_restart(engine: EngineUnderTest, stop: str) -> None:
    engine.publish(b"job")
    job = engine.worker("w").lease()
    engine.crash_and_restart() if stop == "crash" else engine.restart()
    if stop == "restart twice":
        engine.restart()
    assert not any(
        may_settle(engine, job.name, guess, client)
        for guess in guesses_for(job.token)
        for client in "wx"
    )
    assert not may_settle(engine, job.name, job.token, "x"), "it was not issued to this client"
    assert may_settle(engine, job.name, job.token)


def test_client_cannot_settle_deliveries_of_its_group_after_a_restart(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2, batch_size=1)
    first, second = engine.worker("first", prefetch=1), engine.worker("second", prefetch=1)
    engine.publish(b"one")
    engine.publish(b"two")
    held, other = first.lease(), second.lease()
    engine.crash_and_restart()
    for token in (
        other.token,
        held.token,
        DeliveryToken(held.token.counter, other.token.run, other.token.tag),
    ):
        assert not may_settle(engine, held.name, token, "second")
    assert may_settle(engine, held.name, held.token, "first")
    assert may_settle(engine, other.name, other.token, "second")


def test_token_of_another_group_settles_nothing_after_a_restart(engine: EngineUnderTest) -> None:
    engine.group("workers")
    engine.publish(b"job")
    other = engine.worker("w", group="others").lease()
    engine.crash_and_restart()
    assert not may_settle(engine, other.name, other.token)


def test_delivery_failed_before_a_restart_is_not_settled_without_its_tag(
    engine: EngineUnderTest,
) -> None:
    """The record of a failure has the counter of the delivery, and not the tag."""
    engine.publish(b"job")
    worker = engine.worker("w")
    job = worker.lease()
    worker.nack(job, delay=60.0)
    engine.restart()
    assert not any(
        may_settle(engine, job.name, guess, client)
        for guess in guesses_for(job.token)
        for client in "wx"
    )
    assert not may_settle(engine, job.name, job.token, "x")
    group = engine.engine.queues["tasks"].groups["workers"]
    engine.engine.settlement.ack(
        engine.engine.lease_lookup.find_lease(group, job.name, job.token, "w")
    )
    engine.run_until_idle()
    assert engine.depth() == 0


def test_token_is_valid_after_a_restart_with_the_clock_set_back(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    job = engine.worker("w").lease()
    engine.loop.now -= 7200.0
    engine.restart()
    assert not may_settle(engine, job.name, guesses_for(job.token)[0])
    assert may_settle(engine, job.name, job.token)


def test_token_secret_survives_snapshots_and_restarts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.publish(b"job")
    job = engine.worker("w").lease()
    secret = engine.engine.tokens.secret
    assert len(secret) == 32
    runs = {int(job.token.run)}
    for _ in range(3):
        engine.publish(bytes(1 << 20), queue="large")  # large enough for a snapshot
        engine.publish(b"and after it", queue="large")
        engine.restart()
        assert engine.engine.tokens.secret == secret
        runs.add(int(engine.engine.tokens.run))
    assert len(runs) == 4
    assert may_settle(engine, job.name, job.token)


def test_two_stores_have_different_secrets() -> None:
    one, two = EngineUnderTest(MemoryBackend()), EngineUnderTest(MemoryBackend())
    assert one.engine.tokens.secret != two.engine.tokens.secret


# ---- the tag itself


PRIME = 2**32 - 5


def reference(
    secret: bytes, run: int, counter: int, gid: int, client: str, pid: int, seq: int
) -> int:
    """Compute the tag as delivery_tokens.py defines it, without regard for speed."""
    key = hmac.digest(secret, b"delivery tokens" + run.to_bytes(8, "little"), "sha256")
    hashed = shake_128(key + b"hash").digest(48)
    keys = [int.from_bytes(hashed[at : at + 8], "little") for at in range(0, 48, 8)]
    member = hmac.digest(key, b"member" + gid.to_bytes(8, "little") + client.encode(), "sha256")
    pads = shake_128(key + b"pads" + (counter >> 8).to_bytes(8, "little")).digest(2048)
    words = (seq % 2**30, seq >> 30, pid)
    half = []
    for nth in (0, 1):
        member_half = int.from_bytes(member[nth * 8 : nth * 8 + 8], "little")
        half.append(
            (
                member_half
                + sum(k * w for k, w in zip(keys[nth * 3 : nth * 3 + 3], words, strict=True))
            )
            % PRIME
        )
    at = (counter & 255) * 8
    return (half[0] << 32 | half[1]) ^ int.from_bytes(pads[at : at + 8], "little")


@pytest.mark.parametrize("seq", [0, 1, 2**30 - 1, 2**30, 2**48 - 1])
@pytest.mark.parametrize("pid", [1, 77, 2**31 - 1])
@pytest.mark.parametrize("client", ["w", "grüße", ""])
def test_token_tags_match_the_reference_compiled_and_interpreted(
    engine: EngineUnderTest, client: str, pid: int, seq: int
) -> None:
    secret, run, first = bytes(range(32)), 0xFEDC_BA98, (1_700_000_000_000 << 20) + 250
    tokens = DeliveryTokens()
    tokens.start_run(secret, run, first)
    consumer = Consumer(client, 1, 0, False)
    tokens.prepare_consumer(consumer, 9)
    lease = Lease(engine.group().cursors[0], seq, 0)
    for counter in range(first, first + 12):
        tokens.issue(lease, consumer, pid)
        expected = reference(secret, run, counter, 9, client, pid, seq)
        assert (int(lease.token_counter), int(lease.token_tag) % 2**64) == (counter, expected)
        later = DeliveryTokens()
        later.start_run(secret, 1, first)
        token = DeliveryToken(lease.token_counter, run, lease.token_tag)
        assert tokens.is_valid(token, 9, client, pid, seq) and later.is_valid(
            token, 9, client, pid, seq
        )
        assert not later.is_valid(token, 8, client, pid, seq)
        assert not later.is_valid(token, 9, client + "x", pid, seq)
        assert not later.is_valid(token, 9, client, pid - 1, seq)
        assert not later.is_valid(token, 9, client, pid, seq ^ 1)


def test_tokens_of_several_runs_and_blocks_are_checked_in_any_order(
    engine: EngineUnderTest,
) -> None:
    """Cached pads must not be used for another run, block or secret."""
    lease = Lease(engine.group().cursors[0], 5, 0)
    consumer = Consumer("w", 1, 0, False)
    tokens, issued = DeliveryTokens(), []
    for run in (7, 8):
        tokens.start_run(bytes(32), run, 250)
        tokens.prepare_consumer(consumer, 9)
        for _ in range(12):  # counters 250 to 261 are in two blocks
            tokens.issue(lease, consumer, 3)
            issued.append(DeliveryToken(lease.token_counter, run, lease.token_tag))
    for token in (*issued, *issued[::5], *reversed(issued)):
        assert tokens.is_valid(token, 9, "w", 3, 5)
        assert not tokens.is_valid(
            DeliveryToken(token.counter, 15 - token.run, token.tag), 9, "w", 3, 5
        )
    assert tokens.is_valid(issued[-1], 9, "w", 3, 5)
    tokens.start_run(bytes([1] * 32), 8, 250)
    assert not tokens.is_valid(issued[-1], 9, "w", 3, 5)


def test_released_delivery_is_not_settled_by_its_token(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    worker = engine.worker("w")
    job: Delivery = worker.lease()
    worker.is_open = False
    worker.release(job)
    assert not may_settle(
        engine, format_message_id(job.lease.cursor.partition.pid, job.seq), job.token
    )

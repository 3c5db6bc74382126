"""Clients that try to settle what they do not hold: each attempt is refused and changes nothing.

A delivery is settled by its token, or without one by the client that has it. The attempts use no
token and another client's name, tokens that were never given out (a wrong counter, a wrong tag, the
tag of another delivery), a token of an older delivery of the same message, and forged tokens of a
previous run, under the name of a stranger and of the client that holds the message.

Strangers have a source of randomness of their own, so that a seed means the same without them.
"""

from __future__ import annotations

from random import Random
from typing import Final

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.engine import Engine
from sluice.queues.flow.delivery_tokens import DeliveryToken
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Group
from sluice.queues.names import format_message_id
from tests.queues.kit import NO_TOKEN
from tests.simulator.oracle import Number, Oracle, Violation
from tests.simulator.participants import HeldDelivery

UNKNOWN_CLIENT: Final = "stranger"  # never a member of a group
NEVER_DELIVERED: Final = 1 << 40  # counters grow by one from the time of the start
LONG_AGO: Final = 10**9 << 20  # the span of tokens of some days


class UnauthorizedClients:
    def __init__(self, seed: int, oracle: Oracle) -> None:
        self._chance = Random(seed)
        self._oracle = oracle
        self.attempts = 0

    def try_one(self, engine: Engine, known: list[HeldDelivery]) -> None:
        """`known` are deliveries of this run, over or not."""
        if not known or self._chance.random() > 0.3:
            return
        held = self._chance.choice(known)
        queue = engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        if group is None or int(group.gid) != held.number[0]:
            return
        self.attempts += 1
        before = _state(group, held.number)
        fault = self._try(engine, group, held, known)
        if not fault and _state(group, held.number) != before:
            fault = "an attempt was refused, and changed the delivery"
        if fault:
            raise Violation(f"{fault}: {held.number}, delivered to {held.client}")

    def _try(
        self, engine: Engine, group: Group, held: HeldDelivery, known: list[HeldDelivery]
    ) -> str:
        given = held.token
        step = self._chance.randrange(-3, 4)
        tokens = [
            NO_TOKEN,
            DeliveryToken(given.counter + NEVER_DELIVERED, given.run, given.tag),
            DeliveryToken(given.counter, given.run, given.tag ^ (1 << self._chance.randrange(63))),
            DeliveryToken(given.counter, given.run, 0),
        ]
        other = self._chance.choice(known)
        if other.token.counter != given.counter + step:
            tokens.append(DeliveryToken(given.counter + step, given.run, other.token.tag))
        current = self._holder(held.number, known)
        if current is not None:
            tokens += [
                one.token for one in known if one.number == held.number and one is not current
            ]
        for token in tokens:
            try:
                engine.find_lease(group, held.name, token, UNKNOWN_CLIENT)
            except (StaleDelivery, UnknownDelivery):
                continue
            return f"a client that does not hold it may settle it with token {token.counter}"
        return self._try_of_previous_run(engine, group, held, other)

    def _try_of_previous_run(
        self, engine: Engine, group: Group, held: HeldDelivery, other: HeldDelivery
    ) -> str:
        """Tokens of previous runs are forged here, so they count for nobody, also if nobody has the message."""
        name = format_message_id(*held.number[1:])
        if held.number in self._oracle.in_flight and engine.ack_late(
            group, name, NO_TOKEN, UNKNOWN_CLIENT
        ):
            return "a client of a previous run may ack what another has"
        run = int(held.token.run) ^ 1
        for client in (UNKNOWN_CLIENT, held.client):
            for tag in (held.token.tag, other.token.tag, 0):
                old = DeliveryToken(held.token.counter - LONG_AGO, run, tag)
                if engine.ack_late(group, name, old, client):
                    return f"{client} may ack with a token that no run has issued"
                if engine.reclaim_lease(group, name, old, client) is not None:
                    return f"{client} may take up a message with a token that no run has issued"
        return ""

    def _holder(self, number: Number, known: list[HeldDelivery]) -> HeldDelivery | None:
        """The delivery that is under way, if any."""
        if number not in self._oracle.in_flight:
            return None
        return max(
            (one for one in known if one.number == number), key=lambda one: one.token.counter
        )


def _state(group: Group, number: Number) -> tuple[object, ...] | None:
    """What the engine knows of the delivery."""
    for cursor in group.cursors:
        if int(cursor.partition.pid) == number[1]:
            lease: Lease | None = cursor.leases.get(number[2])
            if lease is None:
                return None
            return (
                lease.state,
                lease.token_counter,
                lease.holder,
                lease.deadline,
                lease.retry_at,
                lease.failures,
                lease.consumer,
            )
    return None

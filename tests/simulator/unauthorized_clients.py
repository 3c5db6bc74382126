"""Clients that try to settle deliveries of others: each attempt is refused and changes nothing.

A delivery is settled by its token, or without one by the client that holds it. The attempts use no
token and another client id, tokens that were never issued (a wrong counter, a wrong tag, the tag of
another delivery), a token of an older delivery of the same message, and forged tokens of a previous
run, with the id of an unknown client and of the client that holds the message.

These clients have a random generator of their own, so that a seed means the same without them.
"""

from __future__ import annotations

from random import Random
from typing import Final

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.engine import Engine
from sluice.queues.flow.delivery.delivery_tokens import DeliveryToken
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Group
from sluice.queues.names import format_message_id
from tests.queues.kit import NO_TOKEN
from tests.simulator.oracle import Number, Oracle, Violation
from tests.simulator.participants import HeldDelivery

UNKNOWN_CLIENT: Final = "unknown"  # never a member of a group
NEVER_DELIVERED: Final = 1 << 40  # counters grow by one from the time of the start
LONG_AGO: Final = 10**9 << 20  # tokens of some days ago


class UnauthorizedClients:
    def __init__(self, seed: int, oracle: Oracle) -> None:
        self._rng = Random(seed)
        self._oracle = oracle
        self.attempts = 0

    def try_one(self, engine: Engine, known: list[HeldDelivery]) -> None:
        """Make one attempt. `known` are deliveries of this run, ended or not."""
        if not known or self._rng.random() > 0.3:
            return
        held = self._rng.choice(known)
        queue = engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        if group is None or int(group.gid) != held.number[0]:
            return
        self.attempts += 1
        before = _state(group, held.number)
        error = self._try(engine, group, held, known)
        if not error and _state(group, held.number) != before:
            error = "an attempt was refused, and changed the delivery"
        if error:
            raise Violation(f"{error}: {held.number}, delivered to {held.client}")

    def _try(
        self, engine: Engine, group: Group, held: HeldDelivery, known: list[HeldDelivery]
    ) -> str:
        issued = held.token
        step = self._rng.randrange(-3, 4)
        tokens = [
            NO_TOKEN,
            DeliveryToken(issued.counter + NEVER_DELIVERED, issued.run, issued.tag),
            DeliveryToken(issued.counter, issued.run, issued.tag ^ (1 << self._rng.randrange(63))),
            DeliveryToken(issued.counter, issued.run, 0),
        ]
        other = self._rng.choice(known)
        if other.token.counter != issued.counter + step:
            tokens.append(DeliveryToken(issued.counter + step, issued.run, other.token.tag))
        current = self._holder(held.number, known)
        if current is not None:
            tokens += [
                one.token for one in known if one.number == held.number and one is not current
            ]
        for token in tokens:
            try:
                engine.lease_lookup.find_lease(group, held.name, token, UNKNOWN_CLIENT)
            except (StaleDelivery, UnknownDelivery):
                continue
            return f"a client that does not hold it may settle it with token {token.counter}"
        return self._try_of_previous_run(engine, group, held, other)

    def _try_of_previous_run(
        self, engine: Engine, group: Group, held: HeldDelivery, other: HeldDelivery
    ) -> str:
        """Try forged tokens of previous runs, which never count."""
        name = format_message_id(*held.number[1:])
        if held.number in self._oracle.in_flight and engine.lease_lookup.ack_late(
            group, name, NO_TOKEN, UNKNOWN_CLIENT
        ):
            return "a client of a previous run may ack a message that another client holds"
        run = int(held.token.run) ^ 1
        for client in (UNKNOWN_CLIENT, held.client):
            for tag in (held.token.tag, other.token.tag, 0):
                old = DeliveryToken(held.token.counter - LONG_AGO, run, tag)
                if engine.lease_lookup.ack_late(group, name, old, client):
                    return f"{client} may ack with a token that no run has issued"
                if engine.lease_lookup.reclaim_lease(group, name, old, client) is not None:
                    return f"{client} may reclaim a message with a token that no run has issued"
        return ""

    def _holder(self, number: Number, known: list[HeldDelivery]) -> HeldDelivery | None:
        """Return the current delivery, if any."""
        if number not in self._oracle.in_flight:
            return None
        return max(
            (one for one in known if one.number == number), key=lambda one: one.token.counter
        )


def _state(group: Group, number: Number) -> tuple[object, ...] | None:
    """Return the engine's state of the delivery."""
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

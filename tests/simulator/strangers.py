"""Clients that try to settle what they do not hold: each attempt is refused and changes nothing.

A delivery is settled by its token, or without one by the client that has it. The attempts use no
token and another client's name, a token that was never given out, a token of an older delivery of
the same message, and a token of a previous run for a message that a client has now.

Strangers have a source of randomness of their own, so that a seed means the same without them.
"""

from __future__ import annotations

from random import Random
from typing import Final

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.delivery import Lease
from sluice.queues.engine import Engine
from sluice.queues.group import Group
from sluice.queues.names import message_id
from tests.simulator.oracle import Failure, Number, Oracle, Violation
from tests.simulator.people import Held

STRANGER: Final = "stranger"  # never a member of a group
NEVER_GIVEN: Final = 1 << 40  # tokens count up by one from the time of the start
LONG_AGO: Final = 10**9 << 20  # the span of tokens of some days


class Strangers:
    def __init__(self, seed: int, oracle: Oracle) -> None:
        self._chance = Random(seed)
        self._oracle = oracle
        self.attempts = 0

    def try_one(self, engine: Engine, known: list[Held]) -> None:
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

    def _try(self, engine: Engine, group: Group, held: Held, known: list[Held]) -> str:
        tokens = {0, held.token + NEVER_GIVEN}
        current = self._holder(held.number, known)
        if current is not None:
            tokens |= {one.token for one in known if one.number == held.number and one is not current}
        for token in sorted(tokens):
            try:
                engine.lease_of(group, held.name, token, STRANGER)
            except (StaleDelivery, UnknownDelivery):
                continue
            return f"a client that does not hold it may settle it with token {token}"
        return self._try_of_previous_run(engine, group, held)

    def _try_of_previous_run(self, engine: Engine, group: Group, held: Held) -> str:
        name = message_id(*held.number[1:])
        old = held.token - LONG_AGO
        if held.number in self._oracle.in_hands:
            if engine.finish_late(group, name, old, STRANGER) or engine.finish_late(group, name, 0, STRANGER):
                return "a client of a previous run may ack what another has"
        elif not self._has_failed(held.number):
            return ""  # nobody has it, and a late word of a previous run counts
        if engine.retake(group, name, old, STRANGER) is not None:
            return "a client of a previous run may take up what was delivered since"
        return ""

    def _holder(self, number: Number, known: list[Held]) -> Held | None:
        """The delivery that is under way, if any."""
        if number not in self._oracle.in_hands:
            return None
        return max((one for one in known if one.number == number), key=lambda one: one.token)

    def _has_failed(self, number: Number) -> bool:
        """Whether it has certainly failed in this run, so that no older token is valid."""
        pair = self._oracle.pairs.get(number)
        if pair is None or not pair.attempts.first.is_known:
            return False
        return len(pair.attempts.possible) == 1 and pair.attempts.possible[0].count not in (
            0,
            Failure.UNKNOWN,
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
                lease.token,
                lease.holder,
                lease.deadline,
                lease.due,
                lease.failures,
                lease.consumer,
            )
    return None

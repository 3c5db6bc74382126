"""Keys held for repair in the simulation: nothing of a held key is delivered.

Which keys are held follows from what clients and operators did: from deaths, and from whether the
dead letters are still stored. Of the engine's own record only the location of a dead letter is
used.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.queues.engine import Engine
from sluice.queues.model.effects import Alert
from sluice.queues.model.group import Group
from sluice.queues.model.queue_rules import ANY_ORDER, STRICT
from tests.simulator.oracle import Number, Oracle, Pair, Violation

DEATHS = ("max_retries", "timeout", "rejected")


class Hold:
    """A death that holds a key: its dead letter, then the message that was put back."""

    def __init__(self, frame: int, at: float, dead_letter: tuple[int, int]) -> None:
        self.frame = frame
        self.at = at
        self.dead_letter = dead_letter
        self.repaired: Number | None = None
        self.repaired_frame = 0


class KeyHolds:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._holds: dict[tuple[int, int], list[Hold]] = {}  # by gid and key hash
        self.count = 0
        self._seen: list[Alert] = []  # alerts of this turn that were processed

    def see(self, engine: Engine, alerts: list[Alert]) -> None:
        """Process new alerts: each tells of a death, at once and before the next delivery."""
        for alert in alerts:
            if not any(one is alert for one in self._seen):
                self._seen.append(alert)
                self._on_death(engine, alert)

    def end_turn(self, alerts: list[Alert]) -> None:
        self._seen = [one for one in self._seen if any(one is kept for kept in alerts)]

    def _on_death(self, engine: Engine, alert: Alert) -> None:
        queue = engine.queues.get(alert.queue)
        group = queue.groups.get(alert.group) if queue is not None else None
        if queue is None or group is None or alert.reason not in DEATHS:
            return
        if not queue.rules.holds_keys or queue.rules.ordering == ANY_ORDER:
            return
        held = [
            (key_hash, location, one.held_at)
            for key_hash, one in group.held_keys.items()
            for location in one.dead_letters
            if location not in self._known(int(group.gid), key_hash)
        ]
        for key_hash, location, held_at in held:
            # Earlier than now if recovery restored it after a seek that a crash has undone.
            hold = Hold(self._oracle.frame, held_at, location)
            self._holds.setdefault((int(group.gid), key_hash), []).append(hold)
            self.count += 1

    def _known(self, gid: int, key_hash: int) -> list[tuple[int, int]]:
        return [hold.dead_letter for hold in self._holds.get((gid, key_hash), [])]

    def put_back(self, dead_letter: tuple[int, int], key_hash: int, number: Number) -> None:
        for hold in self._holds.get((number[0], key_hash), []):
            if hold.dead_letter == dead_letter and hold.repaired is None:
                hold.repaired = number
                hold.repaired_frame = self._oracle.frame

    def delivered(
        self,
        engine: Engine,
        group: Group,
        number: Number,
        now: float,
        is_unsettled: Callable[[Pair], bool],
    ) -> None:
        """Check that the key of a delivered message is not held."""
        partition = engine.partitions[number[1]]
        block = partition.find_block(number[2])
        assert block is not None
        key_hash = int(block.key_hash[block.index_of(number[2])]) & 0xFFFF_FFFF
        if group.queue.rules.ordering == STRICT:
            key_hash = 1
        holds = self._holds.get((number[0], key_hash), [])
        if any(hold.repaired == number for hold in holds):
            return
        timeout = group.queue.rules.hold_timeout
        latest = max([hold.at for hold in holds], default=0.0)
        if timeout and now >= latest + timeout - 1e-3:
            holds = []
        for hold in holds:
            dead_letters = engine.partitions.get(hold.dead_letter[0])
            is_dead = dead_letters is not None and dead_letters.holds(hold.dead_letter[1])
            repaired = self._oracle.pairs.get(hold.repaired) if hold.repaired else None
            if is_dead or (repaired is not None and is_unsettled(repaired)):
                raise Violation(f"{number} of key {key_hash} is delivered, which is held")
        self._holds.pop((number[0], key_hash), None)

    def forget(self, gids: list[int]) -> None:
        """Expect no hold any more: by a seek, other rules, or the end of a group."""
        self._holds = {at: holds for at, holds in self._holds.items() if at[0] not in gids}

    def restarted(self) -> None:
        """Keep the deaths that no crash can undo, and the repairs."""
        self._seen = []
        durable: dict[tuple[int, int], list[Hold]] = {}
        for at, holds in self._holds.items():
            kept = [hold for hold in holds if self._oracle.is_durable(hold.frame)]
            for hold in kept:
                if hold.repaired is not None and not self._oracle.is_durable(hold.repaired_frame):
                    hold.repaired = None  # perhaps: its dead letter is stored again, or it is not
            if kept:
                durable[at] = kept
        self._holds = durable

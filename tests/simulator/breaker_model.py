"""What a breaker must do, by the events that clients see.

The model holds the state that follows from deliveries, acks and failures. A crash may undo its last
change; then the state after the restart is adopted, unless the change was durable.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.queues.model.admission import CLOSED
from sluice.queues.model.group import Group
from tests.simulator.oracle import Number, Oracle, Violation

TOLERANCE = 1e-6


class BreakerModel:
    """The breaker of one group."""

    def __init__(self) -> None:
        self.is_open = False
        self.opened_at = 0.0
        self.is_probing = False  # a delivery since it opened decides
        self.probe: Number | None = None
        self.failed_at: list[float] = []
        self.changed_in = 0  # the frame of its last change

    def set_open(self, now: float, frame: int) -> None:
        self.is_open, self.opened_at, self.changed_in = True, now, frame
        self.is_probing, self.probe, self.failed_at = False, None, []

    def close(self, frame: int) -> None:
        self.__init__()  # type: ignore[misc]
        self.changed_in = frame


class Breakers:
    def __init__(self, oracle: Oracle, clock: Callable[[], float]) -> None:
        self._oracle = oracle
        self._clock = clock
        self._models: dict[int, BreakerModel] = {}
        # The attempt of the next delivery, of messages that failed in this run.
        self._next_attempts: dict[Number, int] = {}
        self.opened = 0

    def _model(self, group: Group) -> BreakerModel | None:
        if not group.queue.rules.breaker_failures:
            self._models.pop(int(group.gid), None)
            return None
        return self._models.setdefault(int(group.gid), BreakerModel())

    def forbids(self, group: Group) -> bool:
        """Return whether the breaker allows no delivery now."""
        model = self._model(group)
        if model is None or not model.is_open:
            return False
        if model.is_probing:
            return model.probe is not None
        return self._clock() < model.opened_at + group.queue.rules.breaker_open_for + TOLERANCE

    def delivered(self, group: Group, number: Number, attempt: int) -> None:
        expected = self._next_attempts.pop(number, attempt)
        if expected != attempt:
            raise Violation(f"{number} has attempt {attempt}, and attempt {expected} is next")
        model = self._model(group)
        if model is None or not model.is_open:
            return
        if model.probe is not None:
            raise Violation(f"{number} is delivered while {model.probe} is the probe")
        left = model.opened_at + group.queue.rules.breaker_open_for - self._clock()
        if not model.is_probing and left > TOLERANCE:
            raise Violation(f"{number} is delivered {left:.3f} s before the breaker may probe")
        model.is_probing = True
        model.probe = number

    def acked(self, group: Group | None, number: Number) -> None:
        model = self._model(group) if group is not None else None
        if model is None:
            return
        model.failed_at = []
        if model.is_open and model.probe == number:
            model.close(self._oracle.frame)

    def failed(self, group: Group, number: Number, attempt: int, is_by_consumer: bool) -> bool:
        """Record a nack or a passed deadline; return whether it counts as an attempt."""
        counts = self._count_failure(group, number, is_by_consumer)
        self._next_attempts[number] = attempt + counts
        return counts

    def _count_failure(self, group: Group, number: Number, is_by_consumer: bool) -> bool:
        model = self._model(group)
        if model is None or not is_by_consumer:
            self.ended(number)
            return True
        now = self._clock()
        rules = group.queue.rules
        if model.is_open:
            if model.probe == number:
                model.set_open(now, self._oracle.frame)
            return False
        model.failed_at = [at for at in model.failed_at if now - at <= rules.breaker_window]
        model.failed_at.append(now)
        if len(model.failed_at) >= rules.breaker_failures:
            model.set_open(now, self._oracle.frame)
            self.opened += 1
        return True

    def ended(self, number: Number) -> None:
        """Record that a delivery ended without telling whether work succeeds."""
        model = self._models.get(number[0])
        if model is not None and model.probe == number:
            model.probe = None

    def dead_lettered(self, number: Number, reason: str, group: Group) -> None:
        """Check that no message dies of a failure that does not count."""
        attempt = self._next_attempts.get(number)
        limit = int(group.queue.rules.max_retries)
        if reason == "max_retries" and attempt is not None and attempt - 1 <= limit:
            raise Violation(f"{number} is dead after {attempt - 1} failures, limit {limit}")

    def forget_attempts(self, gid: int) -> None:
        """The group was moved, or the engine counts failures that no client sees."""
        self._next_attempts = {
            number: attempt for number, attempt in self._next_attempts.items() if number[0] != gid
        }

    def adopt(self, group: Group, after_restart: bool) -> None:
        """Take over the state of the engine; after a restart, durable changes must be in it."""
        model = self._model(group)
        if model is None:
            return
        breaker = group.admission.breaker
        is_open = breaker.state != CLOSED
        if after_restart and self._oracle.is_durable(model.changed_in):
            if is_open != model.is_open:
                raise Violation(f"the breaker of {group.name} is open: {is_open}")
            if is_open and abs(breaker.opened_at - model.opened_at) > 0.01:
                raise Violation(f"the breaker of {group.name} opened at {breaker.opened_at}")
        if is_open:
            model.set_open(breaker.opened_at, 0)
        else:
            model.close(0)

    def restarted(self, groups: dict[int, Group]) -> None:
        self._next_attempts = {}
        self._models = {gid: self._models[gid] for gid in groups if gid in self._models}
        for group in groups.values():
            self.adopt(group, True)

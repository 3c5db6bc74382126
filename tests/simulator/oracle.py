"""The oracle: what must be true of the queues, independent of the engine's counters.

The world reports requests and results to the oracle. A `Pair` is one message for one group, with
all the states it has been in and when; a crash may undo states that were not on disk, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

ABSENT: Final = "absent"
UNSETTLED: Final = "waits"  # unsettled: never delivered, leased, or between two attempts
ACKED: Final = "acked"
DEAD: Final = "dead"
EXPIRED: Final = "expired"
PURGED: Final = "purged"
CANCELLED: Final = "cancelled"


# A message in a group: gid, pid, sequence.
Number = tuple[int, int, int]


class Violation(AssertionError):
    """Raised when something happens that must not happen."""


class Sent:
    """A message as its publisher knows it, and its location in the queue."""

    def __init__(
        self, serial: int, queue: str, key: bytes, own_id: bytes, plain: bool, sent_at: float
    ) -> None:
        self.serial = serial
        self.queue = queue
        self.key = key
        self.own_id = own_id
        self.plain = plain  # neither a priority nor a delay: keeps its order among those of its key
        self.sent_at = sent_at
        self.receipt = False
        # Seconds since 1970; 0: never. The latter is later if a crash may have undone a command.
        self.expires = 0
        self.latest_expires = 0
        self.is_id_lost = False  # the queue may have forgotten its id: a crash, or never stored
        self.due = 0.0  # when its delay is over; 0.0: it has none
        self.frame = 0  # the frame that contains it
        # Until when a command that a crash may undo lets it wait; else the same as `due`.
        self.latest_due = 0.0
        # Frame, due time and expiry of each command.
        self._moves: list[tuple[int, float, int]] = []

    def expire_at(self, expires: int) -> None:
        self.expires = self.latest_expires = expires

    def move(self, due: float, expires: int, frame: int) -> None:
        """Record that a command has changed its time, and its expiry to after that time."""
        if not self._moves:
            latest_due = self.latest_due or self.due
            self._moves = [(0, self.due, self.expires), (0, latest_due, self.latest_expires)]
        self._moves.append((frame, due, expires))
        self.due = self.latest_due = due
        self.expire_at(expires)

    def recover(self, durable: int) -> None:
        """Set the times that are possible after a crash."""
        if self._moves:
            last = max(nth for nth, (frame, *_) in enumerate(self._moves) if frame <= durable)
            possible = self._moves[0 if last <= 1 else last :]
            due_times = [due for _, due, _ in possible]
            self.due, self.latest_due = min(due_times), max(due_times)
            expiries = [expires for *_, expires in possible]  # all 0, or none: a command moves it
            self.expires, self.latest_expires = min(expiries), max(expiries)
            self._moves = []


STORED_ROUNDING_SECONDS: Final = 0.002  # times are stored in milliseconds, over several restarts


class Moment:
    """A time that is known within bounds."""

    def __init__(self, earliest: float, latest: float) -> None:
        self.earliest = earliest
        self.latest = latest

    @property
    def is_known(self) -> bool:
        return self.latest > 0.0


UNKNOWN_MOMENT: Final = Moment(0.0, 0.0)


class Failure:
    """The state of a message after its n-th failure; `NEVER` stands for none."""

    UNKNOWN: Final = -1  # as a count: any number of failures

    def __init__(
        self,
        count: int,
        first: Moment,
        due_from: float,
        due_until: float,
        is_last: bool,
        failed_at: float = 0.0,
    ) -> None:
        self.count = count
        self.first = first  # the first delivery, from which the total timeout counts
        # The minimum used part of the total timeout, according to the note of this failure.
        self._spent = failed_at - first.latest
        self.failed_at = failed_at
        self.due_from = due_from  # the retry may come from here on
        self.due_until = due_until  # its wait ends here at the latest
        self.is_last = is_last  # it must not be delivered again

    def after_restart(self, now: float) -> Failure:
        """Return the failure as it counts after a restart.

        The used part of the total timeout was stored with the failure, and perhaps later with a
        snapshot.
        """
        if not self.first.is_known:
            return self
        first = Moment(
            self.first.earliest - STORED_ROUNDING_SECONDS,
            now - self._spent + STORED_ROUNDING_SECONDS,
        )
        failed_at = first.latest + self._spent
        return Failure(self.count, first, self.due_from, self.due_until, self.is_last, failed_at)


NEVER: Final = Failure(0, UNKNOWN_MOMENT, 0.0, 0.0, False)
ANY: Final = Failure(Failure.UNKNOWN, UNKNOWN_MOMENT, 0.0, float("inf"), False)


class Attempts:
    """The failures of one message in one group, and how many of them a crash may undo."""

    def __init__(self) -> None:
        self.possible: list[Failure] = [NEVER]  # its state is one of these
        self.first = UNKNOWN_MOMENT  # its first delivery; valid while a client has it
        self._base: list[Failure] = [NEVER]  # the states before those in the log
        self._log: list[tuple[int, Failure]] = []  # frame and failure, oldest first

    def add(self, failure: Failure, frame: int) -> None:
        self.possible = [failure]
        self._log.append((frame, failure))

    def move(self, due: float, frame: int) -> None:
        """Record that a command has changed the time of the retry."""
        last = self.possible[-1]
        if len(self.possible) > 1 or last.count == Failure.UNKNOWN:
            self.forget(frame)
        elif last.count:
            moved = Failure(last.count, last.first, due, due, False, last.failed_at)
            self.add(moved, frame)

    def reset(self, frame: int) -> None:
        """Count the message as never delivered, after a seek."""
        self.add(NEVER, frame)

    def forget(self, frame: int) -> None:
        """Allow any state: the message may have failed without a notification."""
        self.add(ANY, frame)

    def found(self, failure: Failure, count: int, frame: int) -> None:
        """Record which of the possible states a delivery shows."""
        if failure.count == Failure.UNKNOWN:
            self.add(Failure(count, UNKNOWN_MOMENT, 0.0, 0.0, False) if count else NEVER, frame)
            return
        self.possible = [failure]
        if not self._log:
            self._base = [failure]

    def recover(self, durable: int, now: float) -> None:
        """Compute the possible states after a crash: the last one on disk, or a later one.

        A message that was given up at its last failure comes back as it was before.
        """
        later: list[Failure] = []
        for frame, failure in self._log:
            if failure.is_last:
                continue
            if frame <= durable:
                self._base = [failure]
                later = []
            else:
                later.append(failure)
        self.possible = self._base = [failure.after_restart(now) for failure in self._base + later]
        self._log = []
        self.first = UNKNOWN_MOMENT

    def counts(self) -> str:
        return " or ".join(str(failure.count) for failure in self.possible)


class Pair:
    def __init__(self, gid: int, sent: Sent, location: tuple[int, int], frame: int) -> None:
        self.gid = gid
        self.sent = sent
        self.location = location  # (pid, seq)
        self.targeted = False
        self.attempts = Attempts()
        self.states: list[tuple[int, str]] = [(0, ABSENT), (frame, UNSETTLED)]

    @property
    def number(self) -> Number:
        return (self.gid, *self.location)

    def state(self) -> str:
        return self.states[-1][1]

    def become(self, state: str, frame: int) -> None:
        self.states.append((frame, state))

    def possible(self, durable: int) -> list[str]:
        """Return the possible states after a crash: the last one on disk, and later ones."""
        at = 0
        for nth, (frame, _) in enumerate(self.states):
            if frame <= durable:
                at = nth
        return [state for _, state in self.states[at:]]

    def found(self, state: str) -> None:
        """Set the state that recovery has shown."""
        self.states = [(0, ABSENT), (0, state)] if state != ABSENT else [(0, ABSENT)]

    def __repr__(self) -> str:
        return (
            f"message {self.sent.serial} (key {self.sent.key!r}, location {self.location}) "
            f"of group {self.gid}: {self.states}"
        )


class Oracle:
    def __init__(self) -> None:
        self.pairs: dict[tuple[int, int, int], Pair] = {}  # by gid, pid, seq: unsettled messages
        # Settled messages, while a crash may undo it.
        self.past: dict[tuple[int, int, int], Pair] = {}
        # Unsettled messages without priority and delay.
        self.by_key: dict[tuple[int, bytes], dict[tuple[int, int, int], Pair]] = {}
        self.in_flight: dict[tuple[int, int, int], object] = {}  # holder of each delivery
        self.frames = 0  # submitted commits
        self.answered = 0  # confirmed commits
        self.durable = 0  # commits that a power cut cannot undo

    @property
    def frame(self) -> int:
        """Return the number of the commit that current events will be part of."""
        return self.frames + 1

    def is_durable(self, frame: int) -> bool:
        return frame <= self.durable

    # ---- messages

    def add(self, gid: int, sent: Sent, location: tuple[int, int], targeted: bool = False) -> Pair:
        pair = Pair(gid, sent, location, self.frame)
        pair.targeted = targeted
        self.pairs[(gid, *location)] = pair
        self._index(pair)
        return pair

    def _index(self, pair: Pair) -> None:
        if pair.sent.key and pair.sent.plain and not pair.targeted:
            at = (pair.gid, pair.sent.key)
            self.by_key.setdefault(at, {})[(pair.gid, *pair.location)] = pair

    def settle(self, pair: Pair, outcome: str) -> None:
        pair.become(outcome, self.frame)
        self._remove(pair)
        self.past[(pair.gid, *pair.location)] = pair

    def forget_order(self, pair: Pair) -> None:
        """Expect no order any more between the message and others of its key."""
        self.by_key.get((pair.gid, pair.sent.key), {}).pop(pair.number, None)

    def _remove(self, pair: Pair) -> None:
        number = (pair.gid, *pair.location)
        self.pairs.pop(number, None)
        at = (pair.gid, pair.sent.key)
        if at in self.by_key:
            self.by_key[at].pop(number, None)

    def revive(self, pair: Pair) -> None:
        """Make a settled message unsettled: a seek, or a crash that undid the settlement."""
        number = (pair.gid, *pair.location)
        self.past.pop(number, None)
        self.pairs[number] = pair
        self._index(pair)

    def drop(self, number: tuple[int, int, int]) -> None:
        pair = self.pairs.get(number)
        if pair is not None:
            self._remove(pair)
        self.past.pop(number, None)

    def forget_durable_past(self) -> None:
        """Forget settlements that nothing can undo."""
        self.past = {
            number: pair
            for number, pair in self.past.items()
            if not self.is_durable(pair.states[-1][0])
        }

    # ---- deliveries

    def delivered(
        self,
        number: tuple[int, int, int],
        holder: object,
        in_order: bool,
        is_unsettled: Callable[[Pair], bool],
    ) -> None:
        """Record a delivery and check it. `waits` tells whether a message is still unsettled."""
        if number in self.in_flight:
            raise Violation(
                f"{number} is delivered to {holder} while {self.in_flight[number]} has it"
            )
        self.in_flight[number] = holder
        pair = self.pairs.get(number)
        if pair is None:
            raise Violation(f"{number} is delivered, and is not unsettled: {self.past.get(number)}")
        if pair.sent.frame > self.answered:
            raise Violation(f"{pair} is delivered before its commit")
        if in_order:
            for other in self.earlier_of_key(pair):
                if is_unsettled(other):
                    raise Violation(f"{pair} is delivered before {other}")

    def earlier_of_key(self, pair: Pair) -> list[Pair]:
        if not pair.sent.key or not pair.sent.plain or pair.targeted:
            return []
        order_key = self.by_key.get((pair.gid, pair.sent.key), {})
        return [other for other in order_key.values() if other.sent.serial < pair.sent.serial]

    def returned(self, number: tuple[int, int, int]) -> None:
        self.in_flight.pop(number, None)

"""What must be true of the queues, kept by somebody who has never seen the engine's books.

The world tells the oracle what was asked and what was answered. A `Pair` is one message for one group, with all the
states it has been in and when; a crash may take back whatever was not yet on disk, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

ABSENT: Final = "absent"
WAITS: Final = "waits"  # to be settled: never delivered, leased, or between two attempts
ACKED: Final = "acked"
DEAD: Final = "dead"
EXPIRED: Final = "expired"
PURGED: Final = "purged"


Number = tuple[int, int, int]  # of a message in a group: gid, pid, sequence


class Violation(AssertionError):
    """Something happened that must not happen."""


class Sent:
    """A message as its publisher knows it, and where the queue has put it."""

    def __init__(
        self, serial: int, queue: str, key: bytes, own_id: bytes, plain: bool, sent_at: float
    ) -> None:
        self.serial = serial
        self.queue = queue
        self.key = key
        self.own_id = own_id
        self.plain = plain  # neither a priority nor a delay: keeps its place among those of its key
        self.sent_at = sent_at
        self.receipt = False
        self.expires = 0  # seconds since 1970; 0: never
        self.is_id_lost = False  # the queue may have forgotten its id: a crash, or never stored
        self.due = 0.0  # when its delay is over; 0.0: it has none
        self.frame = 0  # the commit that keeps it


STORED_ROUNDING: Final = 0.002  # times are stored in milliseconds, over several restarts


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
    """What is known of a message after its n-th failure; `NEVER` stands for none."""

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
        self.first = first  # the first delivery of all, from which the total timeout counts
        # How much of the total timeout is spent at least, as the note of this failure says.
        self._spent = failed_at - first.latest
        self.due_from = due_from  # the retry may come from here on,
        self.due_until = due_until  # and its wait ends here at the latest
        self.is_last = is_last  # it must not be delivered again

    def after_restart(self, now: float) -> Failure:
        """Return it as it counts in a process that has just started. The time that is spent of the
        total timeout was stored with the failure, and perhaps later with a snapshot."""
        if not self.first.is_known:
            return self
        first = Moment(self.first.earliest - STORED_ROUNDING, now - self._spent + STORED_ROUNDING)
        failed_at = first.latest + self._spent
        return Failure(self.count, first, self.due_from, self.due_until, self.is_last, failed_at)


NEVER: Final = Failure(0, UNKNOWN_MOMENT, 0.0, 0.0, False)
ANY: Final = Failure(Failure.UNKNOWN, UNKNOWN_MOMENT, 0.0, float("inf"), False)


class Attempts:
    """The failures of one message in one group, and how many of them a crash may take back."""

    def __init__(self) -> None:
        self.possible: list[Failure] = [NEVER]  # its state is one of these
        self.first = UNKNOWN_MOMENT  # its first delivery; valid while a client has it
        self._base: list[Failure] = [NEVER]  # the states before those in the log
        self._log: list[tuple[int, Failure]] = []  # frame and failure, oldest first

    def add(self, failure: Failure, frame: int) -> None:
        self.possible = [failure]
        self._log.append((frame, failure))

    def reset(self, frame: int) -> None:
        """A seek: it counts as never delivered."""
        self.add(NEVER, frame)

    def forget(self, frame: int) -> None:
        """It may have failed since, and nobody was told."""
        self.add(ANY, frame)

    def found(self, failure: Failure, count: int, frame: int) -> None:
        """A delivery tells which of the possible states it is in."""
        if failure.count == Failure.UNKNOWN:
            self.add(Failure(count, UNKNOWN_MOMENT, 0.0, 0.0, False) if count else NEVER, frame)
            return
        self.possible = [failure]
        if not self._log:
            self._base = [failure]

    def recover(self, durable: int, now: float) -> None:
        """After a crash: the last state on disk, or one that came later. A message that was given up
        at its last failure comes back as it was before."""
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
    def __init__(self, gid: int, sent: Sent, place: tuple[int, int], frame: int) -> None:
        self.gid = gid
        self.sent = sent
        self.place = place  # (pid, seq)
        self.targeted = False
        self.attempts = Attempts()
        self.states: list[tuple[int, str]] = [(0, ABSENT), (frame, WAITS)]

    @property
    def number(self) -> Number:
        return (self.gid, *self.place)

    def state(self) -> str:
        return self.states[-1][1]

    def become(self, state: str, frame: int) -> None:
        self.states.append((frame, state))

    def possible(self, durable: int) -> list[str]:
        """The states it may be in after a crash: the last one on disk, and those that came later."""
        at = 0
        for nth, (frame, _) in enumerate(self.states):
            if frame <= durable:
                at = nth
        return [state for _, state in self.states[at:]]

    def found(self, state: str) -> None:
        """Recovery has decided: this is where it goes on from."""
        self.states = [(0, ABSENT), (0, state)] if state != ABSENT else [(0, ABSENT)]

    def __repr__(self) -> str:
        return (
            f"message {self.sent.serial} (key {self.sent.key!r}, place {self.place}) of group {self.gid}: "
            f"{self.states}"
        )


class Oracle:
    def __init__(self) -> None:
        self.pairs: dict[tuple[int, int, int], Pair] = {}  # by group, pid, seq: all that wait
        self.past: dict[
            tuple[int, int, int], Pair
        ] = {}  # and those that are settled, while a crash may undo it
        self.by_key: dict[
            tuple[int, bytes], dict[tuple[int, int, int], Pair]
        ] = {}  # plain ones that wait
        self.in_flight: dict[tuple[int, int, int], object] = {}  # who has what right now
        self.frames = 0  # commits that were asked for
        self.answered = 0  # up to which of them the store has said so
        self.durable = 0  # up to which of them a power cut can take nothing back

    @property
    def frame(self) -> int:
        """The commit that what happens now will be part of."""
        return self.frames + 1

    def is_durable(self, frame: int) -> bool:
        return frame <= self.durable

    # ---- messages

    def add(self, gid: int, sent: Sent, place: tuple[int, int], targeted: bool = False) -> Pair:
        pair = Pair(gid, sent, place, self.frame)
        pair.targeted = targeted
        self.pairs[(gid, *place)] = pair
        self._index(pair)
        return pair

    def _index(self, pair: Pair) -> None:
        if pair.sent.key and pair.sent.plain and not pair.targeted:
            at = (pair.gid, pair.sent.key)
            self.by_key.setdefault(at, {})[(pair.gid, *pair.place)] = pair

    def settle(self, pair: Pair, how: str) -> None:
        pair.become(how, self.frame)
        self._take_out(pair)
        self.past[(pair.gid, *pair.place)] = pair

    def _take_out(self, pair: Pair) -> None:
        number = (pair.gid, *pair.place)
        self.pairs.pop(number, None)
        at = (pair.gid, pair.sent.key)
        if at in self.by_key:
            self.by_key[at].pop(number, None)

    def revive(self, pair: Pair) -> None:
        """A seek, or a crash that took a settlement back."""
        number = (pair.gid, *pair.place)
        self.past.pop(number, None)
        self.pairs[number] = pair
        self._index(pair)

    def drop(self, number: tuple[int, int, int]) -> None:
        pair = self.pairs.get(number)
        if pair is not None:
            self._take_out(pair)
        self.past.pop(number, None)

    def forget_durable_past(self) -> None:
        """Settled for good, and nothing can bring it back: needed no more."""
        self.past = {
            number: pair
            for number, pair in self.past.items()
            if not self.is_durable(pair.states[-1][0])
        }

    # ---- deliveries

    def delivered(
        self,
        number: tuple[int, int, int],
        who: object,
        in_order: bool,
        waits: Callable[[Pair], bool],
    ) -> None:
        """`waits` tells whether a message is really still to be settled: this step may have ended it."""
        if number in self.in_flight:
            raise Violation(f"{number} is delivered to {who} while {self.in_flight[number]} has it")
        self.in_flight[number] = who
        pair = self.pairs.get(number)
        if pair is None:
            raise Violation(
                f"{number} is delivered, and nobody waits for it: {self.past.get(number)}"
            )
        if pair.sent.frame > self.answered:
            raise Violation(f"{pair} is delivered before it is kept")
        if in_order:
            for other in self.earlier_of_key(pair):
                if waits(other):
                    raise Violation(f"{pair} is delivered before {other}")

    def earlier_of_key(self, pair: Pair) -> list[Pair]:
        if not pair.sent.key or not pair.sent.plain or pair.targeted:
            return []
        lane = self.by_key.get((pair.gid, pair.sent.key), {})
        return [other for other in lane.values() if other.sent.serial < pair.sent.serial]

    def returned(self, number: tuple[int, int, int]) -> None:
        self.in_flight.pop(number, None)

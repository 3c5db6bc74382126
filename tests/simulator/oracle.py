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
        self.frame = 0  # the commit that keeps it


class Pair:
    def __init__(self, gid: int, sent: Sent, place: tuple[int, int], frame: int) -> None:
        self.gid = gid
        self.sent = sent
        self.place = place  # (pid, seq)
        self.targeted = False
        self.failures = 0  # that it has seen; -1 when a crash may have taken some back
        self.states: list[tuple[int, str]] = [(0, ABSENT), (frame, WAITS)]

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
        if self.states[-1][1] != state:
            self.failures = -1
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
        self.by_key: dict[tuple[int, bytes], dict[tuple[int, int, int], Pair]] = {}  # plain ones that wait
        self.in_hands: dict[tuple[int, int, int], object] = {}  # who has what right now
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

    def come_back(self, pair: Pair) -> None:
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
            number: pair for number, pair in self.past.items() if not self.is_durable(pair.states[-1][0])
        }

    # ---- deliveries

    def delivered(
        self, number: tuple[int, int, int], who: object, in_order: bool, waits: Callable[[Pair], bool]
    ) -> None:
        """`waits` tells whether a message is really still to be settled: this step may have ended it."""
        if number in self.in_hands:
            raise Violation(f"{number} is delivered to {who} while {self.in_hands[number]} has it")
        self.in_hands[number] = who
        pair = self.pairs.get(number)
        if pair is None:
            raise Violation(f"{number} is delivered, and nobody waits for it: {self.past.get(number)}")
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

    def attempted(self, number: tuple[int, int, int], attempt: int) -> None:
        """Its deliveries are counted, across restarts too."""
        pair = self.pairs[number]
        if pair.failures >= 0 and attempt != pair.failures + 1:
            raise Violation(f"{pair} has failed {pair.failures} times, and this is called attempt {attempt}")
        pair.failures = attempt - 1

    def failed(self, number: tuple[int, int, int]) -> None:
        pair = self.pairs.get(number)
        if pair is not None and pair.failures >= 0:
            pair.failures += 1

    def put_down(self, number: tuple[int, int, int]) -> None:
        self.in_hands.pop(number, None)

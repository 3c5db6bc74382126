"""Frames that Redis had confirmed and does not have any more: found, recorded, confirmed by an operator.

Redis replicates asynchronously. A replica that is promoted while it is behind, a restart without an
append-only file and a restored backup all make Redis continue at an earlier frame. The process that
owns the store knows the last frame that was confirmed to it, so it notices: a write does not fit
behind the last frame in Redis, or the renewal of the lease finds a smaller frame or token.

The record lies in the hash `<log>:losses`, beside the log, so it outlives the process:

    total                       frames lost in the life of the store
    id                          of the last loss recorded, so that it is counted once
    first last times at queues  of the losses that nobody has confirmed yet

A process that was not running when Redis went back cannot notice: there is nobody to compare with.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sluice.errors import FramesLost, StoreError
from sluice.store.redis.errors import final_fault, passes, text_of
from sluice.store.redis.keys import Keys, queue_of
from sluice.store.redis.connection import Link, Server, call, patiently
from sluice.store.redis.scripts import CONFIRM_LOSS, NOTE_LOSS

REMEMBERED_FRAMES: Final = 1024  # of which the queues are known, should they be lost


@dataclass(frozen=True, slots=True)
class Loss:
    """Frames `first` to `last`, lost in one or more incidents that nobody has confirmed yet."""

    first: int
    last: int
    times: int
    at: float  # seconds since 1970, of the latest
    queues: dict[str, int]  # messages by queue, as far as it was known

    @property
    def frames(self) -> int:
        return self.last - self.first + 1


@dataclass(slots=True)
class Losses:
    """What is recorded of a store: frames lost in its life, and what awaits confirmation."""

    total: int = 0
    unconfirmed: Loss | None = None

    def forget(self) -> None:
        """An operator has confirmed it."""
        self.unconfirmed = None


@dataclass
class LossDetector:
    """Compares what Redis says with what it has confirmed. Used by the writer and the lease keeper,
    which may both notice the same loss: it is recorded once. No store survives its first loss."""

    keys: Keys
    name_of: Callable[[int], str | None]  # of a partition
    token: int = 0
    confirmed: int = 0  # the last frame that Redis has confirmed to this process
    _id: str = field(default_factory=lambda: os.urandom(8).hex())
    _frames: deque[tuple[int, dict[int, int]]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED_FRAMES)
    )

    def remember(self, frame: int, counts: dict[int, int]) -> None:
        """Keep which partitions a frame has messages for. Called in the loop, once for each frame."""
        self._frames.append((frame, counts))

    def explain(self, fault: BaseException, link: Link) -> StoreError:
        """Return the error that ends the store, and record a loss if there was one."""
        has = self._frame_behind(fault, link)
        if has is None or has >= self.confirmed:
            return final_fault(fault)
        return self.record(has, link)

    def record(self, has: int, link: Link) -> FramesLost:
        """Redis continues behind frame `has`, which is smaller than one that it has confirmed."""
        lost = FramesLost(has + 1, self.confirmed, self._queues_behind(has))
        keys = [self.keys.losses]
        facts = (self._id, lost.first, lost.last, int(time.time() * 1000))
        ask = call(NOTE_LOSS, keys, *facts, json.dumps(lost.queues))
        try:
            patiently(partial(link.ask, [(keys[0], ask)]), 1.0)
        except Exception as fault:
            if not passes(fault):
                raise
        return lost

    def _frame_behind(self, fault: BaseException, link: Link) -> int | None:
        """Return the last frame that Redis has, if the fault says that it has gone back."""
        word, _, number = text_of(fault).partition(" ")
        if word == "GAP":
            return int(number)
        if word != "FENCED" or (number.isdigit() and int(number) >= self.token):
            return None
        try:  # the token itself has gone back: the log has too
            return int(link.ask([(self.keys.log, ["HGET", self.keys.log, "frame"])])[0] or 0)
        except Exception as silence:
            if not passes(silence):
                raise
            return None

    def _queues_behind(self, has: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for frame, counts in self._frames.copy():
            if has < frame <= self.confirmed:
                for pid, count in counts.items():
                    name = self.name_of(pid)
                    if name is not None:
                        found[name] = found.get(name, 0) + count
        return found


def queue_name(name: str) -> str | None:
    """Return the queue of a partition's name; None for what belongs to no queue (sessions, retained)."""
    return queue_of(name) or None


def read_losses(link: Link, keys: Keys) -> Losses:
    names = ("total", "first", "last", "times", "at", "queues")
    total, first, last, times, at, queues = link.ask([(keys.losses, ["HMGET", keys.losses, *names])])[0]
    if last is None:
        return Losses(int(total or 0))
    told: Any = json.loads(queues)
    return Losses(int(total), Loss(int(first), int(last), int(times), int(at) / 1000, dict(told)))


def confirm_loss(url: str, prefix: str, answer_seconds: float, tag: str, last: int) -> bool:
    """Record that an operator knows of the losses up to frame `last`; False if there are others by now."""
    keys = Keys(prefix, tag)
    server = Server(url, answer_seconds)
    try:
        server.look()
        link = server.link()
        try:
            return bool(link.ask([(keys.losses, call(CONFIRM_LOSS, [keys.losses], last))])[0])
        finally:
            link.close()
    finally:
        server.close()

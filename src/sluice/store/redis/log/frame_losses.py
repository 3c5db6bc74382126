"""Lost frames: Redis confirmed them and no longer has them. Detection, record and confirmation.

Redis replicates asynchronously. A replica that is promoted while it is behind, a restart without an
append-only file and a restored backup all make Redis continue at an earlier frame. The process that
owns the store knows the last frame that Redis confirmed to it, so it detects the loss: a write does
not follow the last frame in Redis, or the renewal of the lease finds a smaller frame or token.

The record is in the hash `<log>:losses`, beside the log, so it outlives the process:

    total                       frames lost since the store was created
    id                          id of the last recorded loss, so that it is counted once
    first last times at queues  of the losses that no operator has confirmed yet

A loss while no process owns the store cannot be detected: there is no value to compare with.
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

from sluice.errors import FramesLost, StoreError, StoreFailed
from sluice.store.redis.connection import (
    RedisChannel,
    RedisServer,
    retry_while_disconnected,
    script_command,
)
from sluice.store.redis.errors import error_text, is_transient, permanent_error
from sluice.store.redis.keys import RedisKeys, queue_of_partition_name
from sluice.store.redis.scripts import CONFIRM_LOSS, RECORD_LOSS

MAX_REMEMBERED_FRAMES: Final = 1024  # frames whose queues are known, in case they are lost


@dataclass(frozen=True, slots=True)
class FrameLoss:
    """Frames `first` to `last`, lost in one or more incidents that no operator has confirmed."""

    first: int
    last: int
    times: int
    at: float  # seconds since 1970, of the latest loss
    queues: dict[str, int]  # lost messages by queue, as far as known

    @property
    def frames(self) -> int:
        return self.last - self.first + 1


@dataclass(slots=True)
class FrameLosses:
    """The recorded losses of a store: the total, and the losses that await confirmation."""

    total: int = 0
    unconfirmed: FrameLoss | None = None

    def forget(self) -> None:
        """Forget the unconfirmed losses after an operator confirmed them."""
        self.unconfirmed = None


@dataclass
class LossDetector:
    """Compares the last frame in Redis with the last confirmed one.

    The writer and the lease renewer share a detector. Both may notice the same loss, which is
    recorded once. The first loss ends the store.
    """

    keys: RedisKeys
    queue_of_partition: Callable[[int], str | None]
    token: int = 0
    confirmed_frame: int = 0  # last frame that Redis confirmed to this process
    _loss_id: str = field(default_factory=lambda: os.urandom(8).hex())
    _recent_frames: deque[tuple[int, dict[int, int]]] = field(
        default_factory=lambda: deque(maxlen=MAX_REMEMBERED_FRAMES)
    )

    def remember_frame(self, frame: int, counts: dict[int, int]) -> None:
        """Remember which partitions a frame has messages for.

        The loop calls this for each frame.
        """
        self._recent_frames.append((frame, counts))

    def to_store_error(self, error: BaseException, channel: RedisChannel) -> StoreError:
        """Return the error that ends the store, and record a loss if there was one."""
        frame_in_redis = self._find_earlier_frame(error, channel)
        if frame_in_redis is None:
            return permanent_error(error)
        if frame_in_redis >= self.confirmed_frame:
            if not error_text(error).startswith("FENCED"):
                return permanent_error(error)
            return StoreFailed(
                "Redis has failed over to a replica that did not know this broker as the owner yet",
                "Nothing that was acknowledged is lost. Start this broker again",
            )
        return self.record_loss(frame_in_redis, channel)

    def record_loss(self, frame_in_redis: int, channel: RedisChannel) -> FramesLost:
        """Record that Redis continues after `frame_in_redis`, before the confirmed frame."""
        loss = FramesLost(
            frame_in_redis + 1, self.confirmed_frame, self._lost_messages_by_queue(frame_in_redis)
        )
        keys = [self.keys.losses]
        arguments = (self._loss_id, loss.first, loss.last, int(time.time() * 1000))
        command = script_command(RECORD_LOSS, keys, *arguments, json.dumps(loss.queues))
        try:
            retry_while_disconnected(partial(channel.execute, [(keys[0], command)]), 1.0)
        except Exception as fault:
            if not is_transient(fault):
                raise
        return loss

    def _find_earlier_frame(self, error: BaseException, channel: RedisChannel) -> int | None:
        """Return the last frame in Redis if the error means that Redis went back, else None."""
        code, _, number = error_text(error).partition(" ")
        if code == "GAP":
            return int(number)
        if code != "FENCED" or (number.isdigit() and int(number) >= self.token):
            return None
        try:  # the token itself went back, so the log did too
            return int(channel.execute([(self.keys.log, ["HGET", self.keys.log, "frame"])])[0] or 0)
        except Exception as silence:
            if not is_transient(silence):
                raise
            return None

    def _lost_messages_by_queue(self, frame_in_redis: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for frame, counts in self._recent_frames.copy():
            if frame_in_redis < frame <= self.confirmed_frame:
                for pid, count in counts.items():
                    name = self.queue_of_partition(pid)
                    if name is not None:
                        found[name] = found.get(name, 0) + count
        return found


def queue_or_none(partition_name: str) -> str | None:
    """Return the queue of a partition's name, or None for partitions without one (sessions)."""
    return queue_of_partition_name(partition_name) or None


def read_frame_losses(channel: RedisChannel, keys: RedisKeys) -> FrameLosses:
    names = ("total", "first", "last", "times", "at", "queues")
    total, first, last, times, at, queues = channel.execute(
        [(keys.losses, ["HMGET", keys.losses, *names])]
    )[0]
    if last is None:
        return FrameLosses(int(total or 0))
    messages_by_queue: Any = json.loads(queues)
    return FrameLosses(
        int(total),
        FrameLoss(int(first), int(last), int(times), int(at) / 1000, dict(messages_by_queue)),
    )


def confirm_loss(url: str, prefix: str, answer_seconds: float, tag: str, last: int) -> bool:
    """Record that an operator confirmed the losses up to `last`; return False if there are more."""
    keys = RedisKeys(prefix, tag)
    server = RedisServer(url, answer_seconds)
    try:
        server.detect()
        channel = server.open_channel()
        try:
            return bool(
                channel.execute([(keys.losses, script_command(CONFIRM_LOSS, [keys.losses], last))])[
                    0
                ]
            )
        finally:
            channel.close()
    finally:
        server.close()

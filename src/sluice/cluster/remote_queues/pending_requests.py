"""Requests that a session proxy has sent to its remote cell and that are not answered yet."""

from __future__ import annotations

from collections.abc import Callable

from sluice.broker.sessions import SubscribeOptions
from sluice.wire.packets import Publish


class PendingPublish:
    """A publish in flight to the remote cell.

    `epoch` identifies the client connection that waits for the answer. -1: no connection waits,
    and if the publish is a settlement, it settles by token. `split` is set if this is one part of
    a client's settlement. Without an answer by `deadline` the client is refused; 0: never.
    """

    def __init__(
        self,
        packet: Publish,
        is_command: bool,
        epoch: int,
        split: SplitSettlement | None = None,
        deadline: float = 0.0,
    ) -> None:
        self.packet = packet
        self.is_command = is_command
        self.epoch = epoch
        self.split = split
        self.deadline = deadline
        self.is_refused = False  # timed out: a later answer is ignored


class SplitSettlement:
    """A settlement that is sent in parts: answered after all parts, with the first refusal."""

    def __init__(self, original: PendingPublish, parts: int) -> None:
        self.original = original
        self.reason = 0
        self.reason_string = ""
        self.is_refused = False
        self._remaining = parts

    def add_answer(self, reason: int, reason_string: str) -> bool:
        """Record the answer of one part; return whether it was the last."""
        self._remaining -= 1
        if reason and not self.reason:
            self.reason, self.reason_string = reason, reason_string
        return self._remaining == 0


class PendingSubscribe:
    """A SUBSCRIBE in flight. `previous` is the subscription that it replaces, if any."""

    def __init__(
        self,
        topic_filter: bytes,
        on_reply: Callable[[int, str], None] | None,
        deadline: float = 0.0,
        previous: SubscribeOptions | None = None,
    ) -> None:
        self.topic_filter = topic_filter
        self.on_reply = on_reply
        self.deadline = deadline
        self.previous = previous

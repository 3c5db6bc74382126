"""What a leg has said to its far cell and waits to hear of."""

from __future__ import annotations

from collections.abc import Callable

from sluice.wire.packets import Publish


class PendingPublish:
    """A publish on its way to the far cell. The epoch tells which connection of the client waits for the answer; -1:
    none does, and if it settles, it does so by token. `whole`: it is a part of what the client has said. The client is
    refused if there is no answer by `until`; 0: never."""

    def __init__(
        self,
        packet: Publish,
        is_settlement: bool,
        epoch: int,
        split: SplitSettlement | None = None,
        deadline: float = 0.0,
    ) -> None:
        self.packet = packet
        self.is_settlement = is_settlement
        self.epoch = epoch
        self.split = split
        self.deadline = deadline
        self.is_refused = False  # it was given up: an answer that comes now is ignored


class SplitSettlement:
    """A settling publish that is said in parts: answered when all of them are, with the first refusal."""

    def __init__(self, original: PendingPublish, parts: int) -> None:
        self.original = original
        self.reason = 0
        self.reason_string = ""
        self.is_refused = False
        self._remaining = parts

    def add_answer(self, reason: int, reason_string: str) -> bool:
        """One part is answered; whether that was the last."""
        self._remaining -= 1
        if reason and not self.reason:
            self.reason, self.reason_string = reason, reason_string
        return self._remaining == 0


class PendingSubscribe:
    """A SUBSCRIBE on its way. `before` is the subscription that it replaces, if there was one."""

    def __init__(
        self,
        topic_filter: bytes,
        on_reply: Callable[[int, str], None] | None,
        deadline: float = 0.0,
        previous: tuple[int, list[str]] | None = None,
    ) -> None:
        self.topic_filter = topic_filter
        self.on_reply = on_reply
        self.deadline = deadline
        self.previous = previous

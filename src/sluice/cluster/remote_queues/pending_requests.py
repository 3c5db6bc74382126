"""What a leg has said to its far cell and waits to hear of."""

from __future__ import annotations

from collections.abc import Callable

from sluice.wire.packets import Publish


class Sent:
    """A publish on its way to the far cell. The epoch tells which connection of the client waits for the answer; -1:
    none does, and if it settles, it does so by token. `whole`: it is a part of what the client has said. The client is
    refused if there is no answer by `until`; 0: never."""

    def __init__(
        self,
        packet: Publish,
        settles: bool,
        epoch: int,
        whole: Whole | None = None,
        until: float = 0.0,
    ) -> None:
        self.packet = packet
        self.settles = settles
        self.epoch = epoch
        self.whole = whole
        self.until = until
        self.refused = False  # it was given up: an answer that comes now is ignored


class Whole:
    """A settling publish that is said in parts: answered when all of them are, with the first refusal."""

    def __init__(self, sent: Sent, parts: int) -> None:
        self.sent = sent
        self.reason = 0
        self.why = ""
        self.refused = False
        self._left = parts

    def add(self, reason: int, why: str) -> bool:
        """One part is answered; whether that was the last."""
        self._left -= 1
        if reason and not self.reason:
            self.reason, self.why = reason, why
        return self._left == 0


class Asked:
    """A SUBSCRIBE on its way. `before` is the subscription that it replaces, if there was one."""

    def __init__(
        self,
        topic_filter: bytes,
        answer: Callable[[int, str], None] | None,
        until: float = 0.0,
        before: tuple[int, list[str]] | None = None,
    ) -> None:
        self.topic_filter = topic_filter
        self.answer = answer
        self.until = until
        self.before = before

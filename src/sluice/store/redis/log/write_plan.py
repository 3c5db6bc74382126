"""What one write does, sorted by where it does it, and the two ways of doing it.

On one Redis all of it is one call of one script: there as a whole or not at all. In a Cluster no script reaches beyond
its node, so there is an order instead. Bodies first: they are not there until the log says so. Then the log, in one
script: this is the moment at which the frame is there. Then the views, which a start makes true again if they were cut
off. Every step can be said twice.
"""

from __future__ import annotations

from typing import Protocol

from sluice.store.redis.keys import Keys, fence_of
from sluice.store.redis.connection import Command, Link, Word, call
from sluice.store.redis.scripts import PART_UNIT, WRITE, WRITE_PART

MOST_WORDS = 2000  # of one command in a script: Lua takes 8000 from a list at once


class Steps:
    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.words: list[Word] = []

    def command(self, name: str, key: str, *words: Word) -> None:
        self.keys[key] = None
        self.words += [len(words) + 2, name, key, *words]

    def try_command(self, key: str, *command: Word) -> None:
        """One that may be refused."""
        self.keys[key] = None
        self.words += ["?", len(command), *command]

    def many(self, name: str, key: str, first: list[Word], rest: list[Word]) -> None:
        """A command with any number of words, as several."""
        for start in range(0, len(rest), MOST_WORDS):
            self.command(name, key, *first, *rest[start : start + MOST_WORDS])


class Plan:
    """`number` is the frame's; 0 for what is none, and may be said again at any time."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.bodies_are_there = False  # said once, they are not said again
        self.log = Steps()
        self.bodies: dict[str, Steps] = {}  # by the base of a partition's keys
        self.views: dict[str, Steps] = {}

    def body(self, base: str) -> Steps:
        return self.bodies.setdefault(base, Steps())

    def view(self, base: str) -> Steps:
        return self.views.setdefault(base, Steps())


def stamp(token: int, turn: int) -> int:
    """Even: the one behind it is free for the second half of a frame."""
    return token * PART_UNIT + turn * 2


def write_part(base: str, steps: Steps, token: int, mark: int) -> list[Word]:
    return call(WRITE_PART, list({fence_of(base): None, **steps.keys}), token, mark, *steps.words)


class Scribe(Protocol):
    def write(self, link: Link, plan: Plan, token: int, turn: int) -> None:
        """Do it all, or raise. Said again with the same turn, it does what is still to be done."""


class SingleScribe:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def write(self, link: Link, plan: Plan, token: int, turn: int) -> None:
        names: dict[str, None] = {self._keys.fence: None, self._keys.log: None}
        words: list[Word] = [token, stamp(token, turn), plan.number or ""]
        for steps in (plan.log, *plan.bodies.values(), *plan.views.values()):
            names.update(steps.keys)
            words += steps.words
        link.ask([(self._keys.log, call(WRITE, list(names), *words))])


class ClusterScribe:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def write(self, link: Link, plan: Plan, token: int, turn: int) -> None:
        mark = stamp(token, turn)
        if not plan.bodies_are_there:
            self._write_parts(link, plan.bodies, token, mark)
            plan.bodies_are_there = True
        if plan.log.words:
            names = {self._keys.fence: None, self._keys.log: None, **plan.log.keys}
            words = (token, mark, plan.number or "", *plan.log.words)
            link.ask([(self._keys.log, call(WRITE, list(names), *words))])
        self._write_parts(link, plan.views, token, mark + 1)

    def _write_parts(self, link: Link, parts: dict[str, Steps], token: int, mark: int) -> None:
        commands: list[tuple[str, Command]] = []
        for base, steps in parts.items():
            if not steps.words:
                continue
            commands.append((base, write_part(base, steps, token, mark)))
        if commands:
            link.ask(commands)

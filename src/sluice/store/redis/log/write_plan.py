"""What one write does, sorted by where it does it, and the two ways of doing it.

On one Redis all of it is one call of one script: there as a whole or not at all. In a Cluster no script reaches beyond
its node, so there is an order instead. Bodies first: they are not there until the log says so. Then the log, in one
script: this is the moment at which the frame is there. Then the views, which a start makes true again if they were cut
off. Every step can be said twice.
"""

from __future__ import annotations

from typing import Protocol

from sluice.store.redis.connection import Argument, Command, RedisChannel, script_command
from sluice.store.redis.keys import RedisKeys, fence_key
from sluice.store.redis.scripts import STAMP_UNIT, WRITE, WRITE_PARTITION

MAX_COMMAND_ARGUMENTS = 2000  # of one command in a script: Lua takes 8000 from a list at once


class ScriptSteps:
    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.arguments: list[Argument] = []

    def add_command(self, name: str, key: str, *arguments: Argument) -> None:
        self.keys[key] = None
        self.arguments += [len(arguments) + 2, name, key, *arguments]

    def add_optional_command(self, key: str, *command: Argument) -> None:
        """One that may be refused."""
        self.keys[key] = None
        self.arguments += ["?", len(command), *command]

    def add_batched_command(
        self, name: str, key: str, leading: list[Argument], batched: list[Argument]
    ) -> None:
        """A command with any number of words, as several."""
        for start in range(0, len(batched), MAX_COMMAND_ARGUMENTS):
            self.add_command(name, key, *leading, *batched[start : start + MAX_COMMAND_ARGUMENTS])


class WritePlan:
    """`number` is the frame's; 0 for what is none, and may be said again at any time."""

    def __init__(self, frame_number: int = 0) -> None:
        self.frame_number = frame_number
        self.are_bodies_written = False  # said once, they are not said again
        self.log = ScriptSteps()
        self.bodies: dict[str, ScriptSteps] = {}  # by the base of a partition's keys
        self.views: dict[str, ScriptSteps] = {}

    def body_steps(self, base: str) -> ScriptSteps:
        return self.bodies.setdefault(base, ScriptSteps())

    def view_steps(self, base: str) -> ScriptSteps:
        return self.views.setdefault(base, ScriptSteps())


def make_stamp(token: int, write_number: int) -> int:
    """Even: the one behind it is free for the second half of a frame."""
    return token * STAMP_UNIT + write_number * 2


def partition_write_command(
    base: str, steps: ScriptSteps, token: int, stamp: int
) -> list[Argument]:
    return script_command(
        WRITE_PARTITION, list({fence_key(base): None, **steps.keys}), token, stamp, *steps.arguments
    )


class PlanWriter(Protocol):
    def write(self, channel: RedisChannel, plan: WritePlan, token: int, write_number: int) -> None:
        """Do it all, or raise. Said again with the same turn, it does what is still to be done."""


class SinglePlanWriter:
    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys

    def write(self, link: RedisChannel, plan: WritePlan, token: int, turn: int) -> None:
        names: dict[str, None] = {self._keys.fence: None, self._keys.log: None}
        words: list[Argument] = [token, make_stamp(token, turn), plan.frame_number or ""]
        for steps in (plan.log, *plan.bodies.values(), *plan.views.values()):
            names.update(steps.keys)
            words += steps.arguments
        link.execute([(self._keys.log, script_command(WRITE, list(names), *words))])


class ClusterPlanWriter:
    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys

    def write(self, link: RedisChannel, plan: WritePlan, token: int, turn: int) -> None:
        mark = make_stamp(token, turn)
        if not plan.are_bodies_written:
            self._write_partitions(link, plan.bodies, token, mark)
            plan.are_bodies_written = True
        if plan.log.arguments:
            names = {self._keys.fence: None, self._keys.log: None, **plan.log.keys}
            words = (token, mark, plan.frame_number or "", *plan.log.arguments)
            link.execute([(self._keys.log, script_command(WRITE, list(names), *words))])
        self._write_partitions(link, plan.views, token, mark + 1)

    def _write_partitions(
        self, channel: RedisChannel, steps_by_base: dict[str, ScriptSteps], token: int, stamp: int
    ) -> None:
        commands: list[tuple[str, Command]] = []
        for base, steps in steps_by_base.items():
            if not steps.arguments:
                continue
            commands.append((base, partition_write_command(base, steps, token, stamp)))
        if commands:
            channel.execute(commands)

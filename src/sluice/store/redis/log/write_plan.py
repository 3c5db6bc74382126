"""The steps of one write, grouped by key, and the two ways to execute them.

On a single Redis one script executes all steps atomically. In a Cluster a script cannot access
other nodes, so the order gives the guarantee. Bodies come first: a body counts only when the log
has its frame. Then one script writes the log, which makes the frame exist. Then come the views,
which a start repairs if they are incomplete. Every step is idempotent.
"""

from __future__ import annotations

from typing import Protocol

from sluice.store.redis.connection import (
    Argument,
    Command,
    RedisChannel,
    ReplicaAcks,
    script_command,
)
from sluice.store.redis.keys import RedisKeys, fence_key
from sluice.store.redis.scripts import STAMP_UNIT, WRITE, WRITE_PARTITION

MAX_COMMAND_ARGUMENTS = 2000  # arguments of one command: Lua unpacks at most 8000


class ScriptSteps:
    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.arguments: list[Argument] = []

    def add_command(self, name: str, key: str, *arguments: Argument) -> None:
        self.keys[key] = None
        self.arguments += [len(arguments) + 2, name, key, *arguments]

    def add_optional_command(self, key: str, *command: Argument) -> None:
        """Add a command that Redis may refuse."""
        self.keys[key] = None
        self.arguments += ["?", len(command), *command]

    def add_batched_command(
        self, name: str, key: str, leading: list[Argument], batched: list[Argument]
    ) -> None:
        """Add a command with any number of values, split into several commands."""
        for start in range(0, len(batched), MAX_COMMAND_ARGUMENTS):
            self.add_command(name, key, *leading, *batched[start : start + MAX_COMMAND_ARGUMENTS])


class WritePlan:
    """All steps of one write.

    `frame_number` is 0 for a write that is no frame and may be repeated.
    """

    def __init__(self, frame_number: int = 0) -> None:
        self.frame_number = frame_number
        self.are_bodies_written = False  # a retry does not write bodies again
        self.log = ScriptSteps()
        self.bodies: dict[str, ScriptSteps] = {}  # by base key of the partition
        self.views: dict[str, ScriptSteps] = {}

    def body_steps(self, base: str) -> ScriptSteps:
        return self.bodies.setdefault(base, ScriptSteps())

    def view_steps(self, base: str) -> ScriptSteps:
        return self.views.setdefault(base, ScriptSteps())


def make_stamp(token: int, write_number: int) -> int:
    """Return an even stamp; the next odd one is for the second half of a frame."""
    return token * STAMP_UNIT + write_number * 2


def partition_write_command(
    base: str, steps: ScriptSteps, token: int, stamp: int
) -> list[Argument]:
    return script_command(
        WRITE_PARTITION, list({fence_key(base): None, **steps.keys}), token, stamp, *steps.arguments
    )


class PlanWriter(Protocol):
    def write(self, channel: RedisChannel, plan: WritePlan, token: int, write_number: int) -> None:
        """Execute all steps or raise.

        A retry with the same write number does the remaining steps.
        """


class SinglePlanWriter:
    """Writes everything with one script. A frame then waits for `acks` in the same pipeline."""

    def __init__(self, keys: RedisKeys, acks: ReplicaAcks | None = None) -> None:
        self._keys = keys
        self._acks = acks

    def write(self, channel: RedisChannel, plan: WritePlan, token: int, write_number: int) -> None:
        names: dict[str, None] = {self._keys.fence: None, self._keys.log: None}
        arguments: list[Argument] = [
            token,
            make_stamp(token, write_number),
            plan.frame_number or "",
        ]
        for steps in (plan.log, *plan.bodies.values(), *plan.views.values()):
            names.update(steps.keys)
            arguments += steps.arguments
        channel.execute(
            [(self._keys.log, script_command(WRITE, list(names), *arguments))],
            self._acks if plan.frame_number else None,
        )


class ClusterPlanWriter:
    """Writes bodies, then the log, then views.

    Bodies and log of a frame each wait for `acks` of the replicas of their nodes, so that the log
    never has a frame whose bodies a failover can lose.
    """

    def __init__(self, keys: RedisKeys, acks: ReplicaAcks | None = None) -> None:
        self._keys = keys
        self._acks = acks

    def write(self, channel: RedisChannel, plan: WritePlan, token: int, write_number: int) -> None:
        stamp = make_stamp(token, write_number)
        acks = self._acks if plan.frame_number else None
        if not plan.are_bodies_written:
            self._write_partitions(channel, plan.bodies, token, stamp, acks)
            plan.are_bodies_written = True
        if plan.log.arguments:
            names = {self._keys.fence: None, self._keys.log: None, **plan.log.keys}
            arguments = (token, stamp, plan.frame_number or "", *plan.log.arguments)
            command = script_command(WRITE, list(names), *arguments)
            channel.execute([(self._keys.log, command)], acks)
        self._write_partitions(channel, plan.views, token, stamp + 1, None)

    def _write_partitions(
        self,
        channel: RedisChannel,
        steps_by_base: dict[str, ScriptSteps],
        token: int,
        stamp: int,
        acks: ReplicaAcks | None,
    ) -> None:
        commands: list[tuple[str, Command]] = []
        for base, steps in steps_by_base.items():
            if not steps.arguments:
                continue
            commands.append((base, partition_write_command(base, steps, token, stamp)))
        if commands:
            channel.execute(commands, acks)

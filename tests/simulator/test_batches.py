"""The simulator with batches: held frames, with other work and crashes."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.simulator.oracle import Violation
from tests.simulator.world import World

APP = "spark"


class Batch:
    def __init__(self, number: int, frame: int) -> None:
        self.number = number
        self.frame = frame
        self.locations: list[tuple[int, int]] = []  # pid and sequence


class WorldWithBatches(World):
    def __init__(self, seed: int, **fixed: Any) -> None:
        self.batch_rng = random.Random(seed)
        self.batches: list[Batch] = []
        super().__init__(seed, **fixed)

    def step(self) -> None:
        if self.batch_rng.random() < 0.06:
            self.engine.now = self.loop.now
            self.batch()
        super().step()

    def batch(self) -> None:
        """Write messages and a fence in one frame, with other actions and crashes in between."""
        batch = Batch(len(self.batches) + 1, self.oracle.frame)
        self.batches.append(batch)
        self._log_step(f"batch {batch.number} begins, in frame {batch.frame}")
        self.is_armed = False
        self.commit_loop.hold_frame()
        self.engine.batches.write_batch_note(APP, batch.number, 0)
        for _ in range(self.batch_rng.randrange(1, 6)):
            before = {pid: int(one.next_seq) for pid, one in self.engine.partitions.items()}
            self.publish()
            for pid, one in self.engine.partitions.items():
                batch.locations += [
                    (pid, seq) for seq in range(before.get(pid, 0), int(one.next_seq))
                ]
            if self.batch_rng.random() < 0.5:
                self.settle()
            if self.batch_rng.random() < 0.5:
                self.commit_loop.end_turn()
                self._run_some()
            if self.batch_rng.random() < 0.05:
                self._count("crashes within a batch")
                self.acked_now = set()  # the crash may undo these
                self.crash()
                return
            self.engine.now = self.loop.now
        if self.oracle.frame != batch.frame:
            raise Violation(f"batch {batch.number} is in two frames")
        self.commit_loop.release_frame()
        self._count("batches")
        effects = self.engine.state.effects
        self._report(effects.alerts, effects.warnings)
        effects.alerts = []
        effects.warnings = []
        self.check()

    def _reopen(self) -> None:
        super()._reopen()
        fence = self.engine.batches.fences.get(APP)
        last = 0 if fence is None else int(fence.batch)
        for batch in self.batches:
            is_stored = batch.number <= last
            if (
                batch.frame <= self.oracle.durable
                and not is_stored
                and batch.number != self._interrupted_batch()
            ):
                raise Violation(f"batch {batch.number} was committed, and its fence is lost")
            for pid, seq in batch.locations:
                partition = self.engine.partitions.get(pid)
                if partition is not None and (partition.next_seq > seq) != is_stored:
                    raise Violation(
                        f"batch {batch.number}: fence {last}, and {pid}-{seq} does not agree"
                    )
        self.batches = [batch for batch in self.batches if batch.number <= last]
        for batch in self.batches:
            batch.locations = []  # checked to be complete; from here on it is like other messages

    def _interrupted_batch(self) -> int:
        """Return the batch that the crash has interrupted."""
        return self.batches[-1].number


LONG = 40 if os.environ.get("SLUICE_LONG") else 1


@pytest.mark.parametrize("seed", range(4 * LONG))
def test_batches_are_atomic_during_other_actions(seed: int) -> None:
    world = WorldWithBatches(seed)
    try:
        for _ in range(500):
            world.step()
        world.drain()
    except Exception as error:
        raise Violation(
            f"seed {seed}, step {world.steps}: {error}\n" + "\n".join(world.log[-60:])
        ) from error
    assert world.counts["batches"] > 10

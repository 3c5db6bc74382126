"""State that all parts of the engine share: time, queues, open frame and effects."""

from __future__ import annotations

from mypy_extensions import i64

from sluice.queues.log import FrameBuilder, SegmentUsage
from sluice.queues.model.effects import Effects
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue


class EngineState:
    def __init__(self) -> None:
        self.now: float = 0.0
        # When recovery finished; older deliveries are from a previous run.
        self.started_at: float = 0.0
        self.queues: dict[str, Queue] = {}
        self.partitions: dict[int, Partition] = {}
        self.groups: dict[int, Group] = {}
        self.next_qid: i64 = 1
        self.next_pid: i64 = 1
        self.next_gid: i64 = 1
        self.frame_builder: FrameBuilder = FrameBuilder()
        self.segment_usage: SegmentUsage = SegmentUsage()
        self.effects: Effects = Effects()

    def now_ms(self) -> i64:
        return int(self.now * 1000.0)

    def write_settlements(self) -> None:
        """Write the collected settlements: the next note changes their meaning."""
        self.frame_builder.write_collected_notes(self.now_ms())

    def warn(self, text: str) -> None:
        self.effects.warnings.append(text)

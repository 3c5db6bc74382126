"""Drives the engine against a store: commits, reads, timers, snapshots and compaction."""

from sluice.queues.commit_loop.listener import CommitListener
from sluice.queues.commit_loop.loop import CommitLoop

__all__ = [
    "CommitListener",
    "CommitLoop",
]

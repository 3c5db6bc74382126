"""Drives the engine against a store: commits, reads, timers, snapshots and compaction."""

from sluice.queues.commit_loop.listener import CommitListener
from sluice.queues.commit_loop.loop import CommitLoop
from sluice.queues.commit_loop.message_reads import read_messages

__all__ = [
    "CommitListener",
    "CommitLoop",
    "read_messages",
]

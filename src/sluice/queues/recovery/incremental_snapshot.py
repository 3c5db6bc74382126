"""A snapshot of the state at one moment, written in steps while the broker works.

Queues, groups and settlements are few and change all the time: they are written at once. Last
values are many and rarely change. They are written in steps, or preserved before they change:
owners of exclusive queues are written (`Owners.save_owner`); for shared queues, the shards of the
key index (`last_values`) and the addresses of blocks (`AddressSnapshot`) are copied, which is
faster than writing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mypy_extensions import i64

from sluice.queues.engine import Engine
from sluice.queues.log import NoteWriter
from sluice.queues.model import (
    BLOCK_SIZE,
    NO_ADDRESS,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    AddressSnapshot,
    LastValues,
    Partition,
    Queue,
)
from sluice.queues.recovery.snapshot import write_state

CHUNK_BYTES: Final = 1_048_576


class SharedQueueState:
    """The last values of a shared queue, and which of its messages are stored."""

    def __init__(self, queue: Queue) -> None:
        self.qid: i64 = queue.qid
        self.last_values: LastValues = queue.last_values
        self.key_count: int = len(queue.last_values)
        self.partition_ends: list[tuple[int, int]] = []  # pid and next sequence
        self.address_snapshots: list[list[AddressSnapshot]] = []
        self.last_values.begin_snapshot()
        for partition in queue.partitions:
            self.partition_ends.append((int(partition.pid), int(partition.next_seq)))
            self.address_snapshots.append(snapshot_addresses(partition))


def snapshot_addresses(partition: Partition) -> list[AddressSnapshot]:
    return [AddressSnapshot(block) for block in partition.all_blocks() if block.live_count]


class IncrementalSnapshot:
    """Call `write_step` until it returns True, then `chunks`.

    Each step writes about `values_per_step` values. The written bytes are split into chunks:
    joining all of them would take longer than any step.
    """

    def __init__(self, engine: Engine, values_per_step: int) -> None:
        self._values_per_step: int = values_per_step
        self._engine: Engine = engine
        self._state: NoteWriter = write_state(engine)
        self._owners: NoteWriter = NoteWriter(0)
        self._owners.take_bytes()  # it follows the state, without a header of its own
        self._state_chunks: list[bytes] = []
        self._owner_chunks: list[bytes] = []
        shared_queues = [
            SharedQueueState(queue) for queue in engine.queues.values() if queue.rules.is_compacted
        ]
        self._last_value_steps: Iterator[None] | None = write_last_values(
            self._state, shared_queues, values_per_step
        )
        engine.exclusive.begin_snapshot(self._owners)

    def write_step(self) -> bool:
        """Write the next part; return whether the snapshot is complete."""
        if self._state.size() >= CHUNK_BYTES:
            self._state_chunks.append(self._state.take_bytes())
        if self._owners.size() >= CHUNK_BYTES:
            self._owner_chunks.append(self._owners.take_bytes())
        if self._last_value_steps is not None:
            for _ in self._last_value_steps:
                return False
            self._last_value_steps = None
        return self._engine.exclusive.save_some_owners(self._values_per_step)

    def chunks(self) -> list[bytes]:
        return [
            *self._state_chunks,
            self._state.take_bytes(),
            *self._owner_chunks,
            self._owners.take_bytes(),
        ]


def write_last_values(
    out: NoteWriter, shared_queues: list[SharedQueueState], values_per_step: int
) -> Iterator[None]:
    """Write the last message of each key, and the gaps of deleted messages.

    The keys themselves are in the bodies, which recovery does not read. Yields after each step.
    """
    out.write_int(len(shared_queues))
    remaining = values_per_step
    for queue in shared_queues:
        out.write_int(queue.qid)
        out.write_int(queue.key_count)
        shard = queue.last_values.next_snapshot_shard()
        while shard is not None:
            for key_hash, location in shard.items():
                out.write_int(key_hash)
                out.write_int(location >> SEQUENCE_BITS)
                out.write_int(location & SEQUENCE_MASK)
                remaining -= 1
                if remaining <= 0:
                    remaining = values_per_step
                    yield
            shard = queue.last_values.next_snapshot_shard()
        out.write_int(len(queue.partition_ends))
        for nth, (pid, end) in enumerate(queue.partition_ends):
            gaps = NoteWriter(0)
            next_seq: i64 = 0
            for address_snapshot in queue.address_snapshots[nth]:
                next_seq = write_gaps(gaps, address_snapshot, next_seq)
                remaining -= BLOCK_SIZE
                if remaining <= 0:
                    remaining = values_per_step
                    yield
            if next_seq < end:
                gaps.write_int(next_seq)
                gaps.write_int(end - next_seq)
            out.write_int(pid)
            out.write_bytes(gaps.to_bytes())


def write_gaps(out: NoteWriter, address_snapshot: AddressSnapshot, next_seq: i64) -> i64:
    """Write the gaps between `next_seq` and the last live message of a block; return its end."""
    address = address_snapshot.take_addresses()
    at: i64 = 0
    while at < len(address):
        if address[at] != NO_ADDRESS:
            seq = (
                address_snapshot.base + at
                if address_snapshot.base >= 0
                else address_snapshot.seqs[at]
            )
            if seq > next_seq:
                out.write_int(next_seq)
                out.write_int(seq - next_seq)
            next_seq = seq + 1
        at += 1
    return next_seq

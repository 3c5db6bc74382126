"""Parts of a queue that snapshots store and load."""

from __future__ import annotations

import pytest

from sluice.queues.log.notes import NoteReader, NoteWriter
from sluice.queues.model.cursor import SEQUENCE_BITS
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from tests.queues.kit import rules_of

KIND = 1  # of a note; not read here


def queue_with_partition(pid: int) -> Queue:
    queue = Queue(1, rules_of("orders", {}))
    queue.partitions.append(Partition(queue, pid, 0))
    return queue


def ids_of(pid: int) -> NoteReader:
    note = NoteWriter(KIND)
    note.write_int(1)
    note.write_bytes(b"order-1")
    note.write_int(pid << SEQUENCE_BITS | 5)
    return NoteReader(note.to_bytes())


def test_ids_of_delayed_messages_are_loaded() -> None:
    queue = queue_with_partition(7)
    queue.load_delayed_ids(ids_of(7))
    assert queue.delayed_ids == {b"order-1": 7 << SEQUENCE_BITS | 5}


@pytest.mark.parametrize("pid", [0, 8, -1])
def test_id_in_a_partition_of_another_queue_is_refused(pid: int) -> None:
    """The next snapshot could not check whether its message is stored."""
    with pytest.raises(ValueError, match="another queue"):
        queue_with_partition(7).load_delayed_ids(ids_of(pid))

"""Marks of QoS 2 publishes from other cells: known until their publisher says that they are over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.queues.log.cross_node_dedup import (
    INBOX_RECORDED,
    MAX_ORIGINS,
    PART_BITS,
    CrossNodeDedup,
)
from sluice.queues.log.frame_builder import FrameBuilder, NoteReader, NoteWriter

CELL, SESSION = 3, 77


def key(dedup_id: int, part: int = 0) -> int:
    return dedup_id << PART_BITS | part


def take(
    once: CrossNodeDedup, lowest: int, *keys: int, cell: int = CELL, session: int = SESSION
) -> None:
    once.record_inbox(cell, session, lowest, list(keys), 0)


def known(once: CrossNodeDedup, *marks: int) -> list[int]:
    return [mark for mark in marks if once.has_in_inbox(CELL, SESSION, key(mark))]


def as_it_is(once: CrossNodeDedup) -> CrossNodeDedup:
    return once


def from_snapshot(once: CrossNodeDedup) -> CrossNodeDedup:
    out = NoteWriter(0)
    once.write_snapshot(out)
    restored = CrossNodeDedup(FrameBuilder())
    restored.load_snapshot(NoteReader(out.to_bytes()))
    return restored


@pytest.fixture(params=[as_it_is, from_snapshot])
def survivor(request: pytest.FixtureRequest) -> Callable[[CrossNodeDedup], CrossNodeDedup]:
    """What has the marks afterwards: the same process, or one that has loaded the snapshot."""
    found: Callable[[CrossNodeDedup], CrossNodeDedup] = request.param
    return found


def test_lowest_open_dedup_id_is_known_after_a_later_one_was_received(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    """Two publishes are open and both arrive; the first one comes again after a crash."""
    once = CrossNodeDedup(FrameBuilder())
    take(once, 1, key(1))
    take(once, 1, key(2))
    assert known(survivor(once), 1, 2) == [1, 2]


def test_dedup_ids_below_the_lowest_open_one_are_forgotten(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    once = CrossNodeDedup(FrameBuilder())
    take(once, 1, key(1))
    take(once, 1, key(2))
    take(once, 3, key(3))
    assert known(survivor(once), 1, 2, 3) == [3]
    assert once.count_inbox() == 1


def test_dedup_id_received_out_of_order_is_known_while_an_earlier_one_is_open() -> None:
    once = CrossNodeDedup(FrameBuilder())
    take(once, 1, key(2))
    assert known(once, 1, 2) == [2]
    take(once, 1, key(1))
    assert known(once, 1, 2) == [1, 2]
    take(once, 2, key(3))
    assert known(once, 1, 2, 3) == [2, 3]


def test_each_part_of_a_message_has_its_own_key() -> None:
    last = (1 << PART_BITS) - 1
    once = CrossNodeDedup(FrameBuilder())
    take(once, 1, key(1), key(1, last))
    take(once, 1, key(2))
    assert once.has_in_inbox(CELL, SESSION, key(1, last)) and not once.has_in_inbox(
        CELL, SESSION, key(1, 5)
    )
    take(once, 2, key(2, 1))
    assert not once.has_in_inbox(CELL, SESSION, key(1)) and not once.has_in_inbox(
        CELL, SESSION, key(1, last)
    )
    assert once.has_in_inbox(CELL, SESSION, key(2))


def test_publishers_do_not_share_dedup_ids() -> None:
    once = CrossNodeDedup(FrameBuilder())
    take(once, 1, key(1))
    take(once, 9, key(9), session=SESSION + 1)
    take(once, 9, key(9), cell=CELL + 1)
    assert known(once, 1, 9) == [1]


def test_replayed_note_restores_the_same_entries() -> None:
    once = CrossNodeDedup(FrameBuilder())
    for lowest, dedup_id in ((1, 1), (1, 2)):
        note = NoteWriter(INBOX_RECORDED)
        for number in (CELL, SESSION, lowest, key(dedup_id)):
            note.write_int(number)
        once.apply_inbox(NoteReader(note.to_bytes()))
    assert known(once, 1, 2) == [1, 2]


def test_least_recently_seen_publisher_is_forgotten_first() -> None:
    once = CrossNodeDedup(FrameBuilder())
    for session in range(MAX_ORIGINS):
        take(once, 1, key(1), session=session)
    take(once, 1, key(2), session=0)
    take(once, 1, key(1), session=MAX_ORIGINS)
    assert once.has_in_inbox(CELL, 0, key(1)) and not once.has_in_inbox(CELL, 1, key(1))
    assert once.count_inbox() == MAX_ORIGINS + 1


def test_dedup_id_is_open_until_closed_and_issued_once(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    once = CrossNodeDedup(FrameBuilder())
    first, second = once.new_dedup_id(), once.new_dedup_id()
    once.record_outbox(SESSION, 10, first, 0)
    once.record_outbox(SESSION, 11, second, 0)
    once.remove_outbox(SESSION, 11)
    after = survivor(once)
    assert after.outbox == {SESSION: {10: first}}
    assert after.new_dedup_id() > second
    after.remove_outbox(SESSION, 10)
    assert after.outbox == {}

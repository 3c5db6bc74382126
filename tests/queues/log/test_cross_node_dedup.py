"""Dedup ids of QoS 2 publishes from other cells: known until their publisher closes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.queues.log.cross_node_dedup import MAX_ORIGINS, PART_BITS, CrossNodeDedup
from sluice.queues.log.frame_builder import FrameBuilder
from sluice.queues.log.notes import INBOX_RECORDED, NoteReader, NoteWriter

CELL, SESSION = 3, 77


def key(dedup_id: int, part: int = 0) -> int:
    return dedup_id << PART_BITS | part


def receive(
    dedup: CrossNodeDedup, lowest: int, *keys: int, cell: int = CELL, session: int = SESSION
) -> None:
    dedup.record_inbox(cell, session, lowest, list(keys), 0)


def known_ids(dedup: CrossNodeDedup, *dedup_ids: int) -> list[int]:
    return [dedup_id for dedup_id in dedup_ids if dedup.has_in_inbox(CELL, SESSION, key(dedup_id))]


def same_process(dedup: CrossNodeDedup) -> CrossNodeDedup:
    return dedup


def from_snapshot(dedup: CrossNodeDedup) -> CrossNodeDedup:
    out = NoteWriter(0)
    dedup.write_snapshot(out)
    restored = CrossNodeDedup(FrameBuilder())
    restored.load_snapshot(NoteReader(out.to_bytes()))
    return restored


@pytest.fixture(params=[same_process, from_snapshot])
def survivor(request: pytest.FixtureRequest) -> Callable[[CrossNodeDedup], CrossNodeDedup]:
    """Return the state afterwards: of the same process, or loaded from a snapshot."""
    found: Callable[[CrossNodeDedup], CrossNodeDedup] = request.param
    return found


def test_lowest_open_dedup_id_is_known_after_a_later_one_was_received(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    """Two publishes are open and both arrive; the first one is repeated after a crash."""
    dedup = CrossNodeDedup(FrameBuilder())
    receive(dedup, 1, key(1))
    receive(dedup, 1, key(2))
    assert known_ids(survivor(dedup), 1, 2) == [1, 2]


def test_dedup_ids_below_the_lowest_open_one_are_forgotten(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    receive(dedup, 1, key(1))
    receive(dedup, 1, key(2))
    receive(dedup, 3, key(3))
    assert known_ids(survivor(dedup), 1, 2, 3) == [3]
    assert dedup.count_inbox() == 1


def test_dedup_id_received_out_of_order_is_known_while_an_earlier_one_is_open() -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    receive(dedup, 1, key(2))
    assert known_ids(dedup, 1, 2) == [2]
    receive(dedup, 1, key(1))
    assert known_ids(dedup, 1, 2) == [1, 2]
    receive(dedup, 2, key(3))
    assert known_ids(dedup, 1, 2, 3) == [2, 3]


def test_each_part_of_a_message_has_its_own_key() -> None:
    last = (1 << PART_BITS) - 1
    dedup = CrossNodeDedup(FrameBuilder())
    receive(dedup, 1, key(1), key(1, last))
    receive(dedup, 1, key(2))
    assert dedup.has_in_inbox(CELL, SESSION, key(1, last)) and not dedup.has_in_inbox(
        CELL, SESSION, key(1, 5)
    )
    receive(dedup, 2, key(2, 1))
    assert not dedup.has_in_inbox(CELL, SESSION, key(1)) and not dedup.has_in_inbox(
        CELL, SESSION, key(1, last)
    )
    assert dedup.has_in_inbox(CELL, SESSION, key(2))


def test_publishers_do_not_share_dedup_ids() -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    receive(dedup, 1, key(1))
    receive(dedup, 9, key(9), session=SESSION + 1)
    receive(dedup, 9, key(9), cell=CELL + 1)
    assert known_ids(dedup, 1, 9) == [1]


def test_replayed_note_restores_the_same_entries() -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    for lowest, dedup_id in ((1, 1), (1, 2)):
        note = NoteWriter(INBOX_RECORDED)
        for number in (CELL, SESSION, lowest, key(dedup_id)):
            note.write_int(number)
        dedup.apply_inbox(NoteReader(note.to_bytes()))
    assert known_ids(dedup, 1, 2) == [1, 2]


def test_least_recently_seen_publisher_is_forgotten_first() -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    for session in range(MAX_ORIGINS):
        receive(dedup, 1, key(1), session=session)
    receive(dedup, 1, key(2), session=0)
    receive(dedup, 1, key(1), session=MAX_ORIGINS)
    assert dedup.has_in_inbox(CELL, 0, key(1)) and not dedup.has_in_inbox(CELL, 1, key(1))
    assert dedup.count_inbox() == MAX_ORIGINS + 1


def test_dedup_id_is_open_until_closed_and_issued_once(
    survivor: Callable[[CrossNodeDedup], CrossNodeDedup],
) -> None:
    dedup = CrossNodeDedup(FrameBuilder())
    first, second = dedup.new_dedup_id(), dedup.new_dedup_id()
    dedup.record_outbox(SESSION, 10, first, 0)
    dedup.record_outbox(SESSION, 11, second, 0)
    dedup.remove_outbox(SESSION, 11)
    after = survivor(dedup)
    assert after.outbox == {SESSION: {10: first}}
    assert after.new_dedup_id() > second
    after.remove_outbox(SESSION, 10)
    assert after.outbox == {}

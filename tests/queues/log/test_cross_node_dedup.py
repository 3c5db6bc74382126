"""Marks of QoS 2 publishes from other cells: known until their publisher says that they are over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.queues.log.frame_builder import Journal, Note, NoteWriter
from sluice.queues.log.cross_node_dedup import KEY_BITS, MOST_ORIGINS, TAKEN, Once

CELL, SESSION = 3, 77


def key(mark: int, part: int = 0) -> int:
    return mark << KEY_BITS | part


def take(once: Once, lowest: int, *keys: int, cell: int = CELL, session: int = SESSION) -> None:
    once.note_taken(cell, session, lowest, list(keys), 0)


def known(once: Once, *marks: int) -> list[int]:
    return [mark for mark in marks if once.has(CELL, SESSION, key(mark))]


def as_it_is(once: Once) -> Once:
    return once


def from_snapshot(once: Once) -> Once:
    out = NoteWriter(0)
    once.write_snapshot(out)
    restored = Once(Journal())
    restored.load_snapshot(Note(out.value()))
    return restored


@pytest.fixture(params=[as_it_is, from_snapshot])
def survivor(request: pytest.FixtureRequest) -> Callable[[Once], Once]:
    """What has the marks afterwards: the same process, or one that has loaded the snapshot."""
    found: Callable[[Once], Once] = request.param
    return found


def test_the_lowest_open_mark_is_still_known_after_a_later_one_was_taken(
    survivor: Callable[[Once], Once],
) -> None:
    """Two publishes are open and both arrive; the first one comes again after a crash."""
    once = Once(Journal())
    take(once, 1, key(1))
    take(once, 1, key(2))
    assert known(survivor(once), 1, 2) == [1, 2]


def test_marks_below_the_lowest_open_one_are_forgotten(survivor: Callable[[Once], Once]) -> None:
    once = Once(Journal())
    take(once, 1, key(1))
    take(once, 1, key(2))
    take(once, 3, key(3))
    assert known(survivor(once), 1, 2, 3) == [3]
    assert once.count_taken() == 1


def test_a_mark_taken_out_of_order_is_known_while_an_earlier_one_is_open() -> None:
    once = Once(Journal())
    take(once, 1, key(2))
    assert known(once, 1, 2) == [2]
    take(once, 1, key(1))
    assert known(once, 1, 2) == [1, 2]
    take(once, 2, key(3))
    assert known(once, 1, 2, 3) == [2, 3]


def test_each_part_of_a_message_has_a_key_of_its_own() -> None:
    last = (1 << KEY_BITS) - 1
    once = Once(Journal())
    take(once, 1, key(1), key(1, last))
    take(once, 1, key(2))
    assert once.has(CELL, SESSION, key(1, last)) and not once.has(CELL, SESSION, key(1, 5))
    take(once, 2, key(2, 1))
    assert not once.has(CELL, SESSION, key(1)) and not once.has(CELL, SESSION, key(1, last))
    assert once.has(CELL, SESSION, key(2))


def test_publishers_do_not_share_marks() -> None:
    once = Once(Journal())
    take(once, 1, key(1))
    take(once, 9, key(9), session=SESSION + 1)
    take(once, 9, key(9), cell=CELL + 1)
    assert known(once, 1, 9) == [1]


def test_a_note_that_is_read_again_takes_what_it_took() -> None:
    once = Once(Journal())
    for lowest, mark in ((1, 1), (1, 2)):
        note = NoteWriter(TAKEN)
        for number in (CELL, SESSION, lowest, key(mark)):
            note.number(number)
        once.apply(Note(note.value()))
    assert known(once, 1, 2) == [1, 2]


def test_the_publisher_not_heard_of_for_longest_is_forgotten_first() -> None:
    once = Once(Journal())
    for session in range(MOST_ORIGINS):
        take(once, 1, key(1), session=session)
    take(once, 1, key(2), session=0)
    take(once, 1, key(1), session=MOST_ORIGINS)
    assert once.has(CELL, 0, key(1)) and not once.has(CELL, 1, key(1))
    assert once.count_taken() == MOST_ORIGINS + 1


def test_a_mark_is_open_until_it_is_closed_and_is_given_out_once(survivor: Callable[[Once], Once]) -> None:
    once = Once(Journal())
    first, second = once.new_mark(), once.new_mark()
    once.note_passed(SESSION, 10, first, 0)
    once.note_passed(SESSION, 11, second, 0)
    once.close(SESSION, 11)
    after = survivor(once)
    assert after.passed == {SESSION: {10: first}}
    assert after.new_mark() > second
    after.close(SESSION, 10)
    assert after.passed == {}

"""Exclusive compacted queues: the last value of each key, for one owner, on every store."""

from __future__ import annotations

import random

import pytest

from sluice.errors import MessageTooLarge, QueueFull
from sluice.queues.compacted.owner_lookup import Finder
from sluice.queues.log.frame_builder import Note, NoteWriter
from sluice.queues.compacted.owner import SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.slab import Space
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest
from tests.queues.compacted.owner_kit import Taker, kept, leave, seek, subscribe, write


def test_an_owner_that_is_there_gets_a_value_at_once(engine: EngineUnderTest) -> None:
    taker = subscribe(engine, "car-1")
    write(engine, "car-1", b"speed", b"80")
    assert taker.values() == [b"80"]


def test_a_value_is_not_given_to_its_owner_before_the_store_has_it(engine: EngineUnderTest) -> None:
    there = subscribe(engine, "car-1")
    engine.runner.hold()
    write(engine, "car-1", b"speed", b"80")
    write(engine, "car-2", b"speed", b"90")
    late = subscribe(engine, "car-2")
    assert there.inbox == [] and late.inbox == []
    engine.runner.release()
    assert there.values() == [b"80"] and late.values() == [b"90"]


def test_an_owner_that_was_away_gets_the_last_value_of_each_key_in_the_order_of_writing(
    engine: EngineUnderTest,
) -> None:
    for number in range(5):
        write(engine, "car-1", b"speed", b"%d" % number)
        write(engine, "car-1", b"fuel/left", b"f%d" % number)
    write(engine, "car-1", b"speed", b"last")
    taker = subscribe(engine, "car-1")
    assert taker.values() == [b"f4", b"last"]


def test_an_older_value_of_a_key_is_removed_at_once(engine: EngineUnderTest) -> None:
    for number in range(1000):
        owner = write(engine, "car-1", b"speed", b"%d" % number, at_once=number % 50 == 0)
    engine.settle_down()
    assert owner.live == 1
    assert kept(engine, "car-1") == {b"speed": b"999"}
    assert owner.next == 1001


def test_each_owner_counts_its_own_sequences(engine: EngineUnderTest) -> None:
    first, second = subscribe(engine, "car-1"), subscribe(engine, "car-2")
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-2", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    engine.settle_down()
    assert first.sequences == [1, 2]
    assert second.sequences == [1]


@pytest.mark.parametrize("end", ["stop", "crash", "reconnect"])
def test_what_was_acknowledged_is_not_given_again(engine: EngineUnderTest, end: str) -> None:
    for number in range(6):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    taker = subscribe(engine, "car-1", window=3)
    assert taker.values() == [b"0", b"1", b"2"]
    taker.ack()
    taker.ack()
    if end == "reconnect":
        leave(engine, taker)
    elif end == "stop":
        engine.restart()
    else:
        engine.crash_and_restart()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.acked, owner.depth(), owner.live) == (2, 4, 6)
    assert owner.acked_at > 0
    assert subscribe(engine, "car-1").take() == [b"2", b"3", b"4", b"5"]


def test_what_was_acknowledged_out_of_turn_is_not_given_again_either(engine: EngineUnderTest) -> None:
    for number in range(4):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    taker = subscribe(engine, "car-1")
    taker.ack(2)
    taker.ack(1)
    engine.crash_and_restart()
    again = subscribe(engine, "car-1")
    assert again.values() == [b"0", b"3"]
    again.ack()
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 3 and not owner.done


def test_a_value_that_is_replaced_while_its_owner_has_it_holds_nothing_up(engine: EngineUnderTest) -> None:
    taker = subscribe(engine, "car-1", window=2)
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    assert taker.values() == [b"1", b"2"]
    write(engine, "car-1", b"a", b"3")
    taker.ack(1)
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 2
    taker.ack()
    assert taker.take() == [b"3"]
    assert owner.acked == 3 and owner.depth() == 0


def test_an_owner_can_be_rewound_to_whatever_is_kept(engine: EngineUnderTest) -> None:
    for number in range(5):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    taker = subscribe(engine, "car-1")
    assert len(taker.take()) == 5
    seek(engine, "car-1", 2)
    assert taker.values() == [b"2", b"3", b"4"]
    engine.crash_and_restart()
    assert subscribe(engine, "car-1").take() == [b"2", b"3", b"4"]


def test_an_acknowledgement_from_before_a_rewind_does_not_count(engine: EngineUnderTest) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    taker = subscribe(engine, "car-1")
    taker.ack()
    before = taker.epoch
    seek(engine, "car-1", 0)
    engine.engine.exclusive.ack(taker, 1, before, engine.loop.now)
    engine.settle_down()
    assert engine.engine.exclusive.owners["car-1"].acked == 0


@pytest.mark.parametrize("again", [False, True])
def test_an_acknowledgement_counts_when_its_reader_has_left_meanwhile(
    engine: EngineUnderTest, again: bool
) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    taker = subscribe(engine, "car-1")
    leave(engine, taker)
    if again:
        assert subscribe(engine, "car-1").values() == [b"0", b"1", b"2"]
    taker.ack(1)
    taker.ack(0)
    assert engine.engine.exclusive.owners["car-1"].acked == 2
    engine.crash_and_restart()
    assert subscribe(engine, "car-1").take() == [b"2"]


def test_an_acknowledgement_of_a_reader_that_has_left_does_not_count_behind_a_rewind(
    engine: EngineUnderTest,
) -> None:
    write(engine, "car-1", b"a", b"1")
    taker = subscribe(engine, "car-1")
    leave(engine, taker)
    seek(engine, "car-1", 0)
    taker.ack()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.acked, owner.acked_at) == (0, 0)
    assert subscribe(engine, "car-1").take() == [b"1"]


def test_an_acknowledgement_to_an_owner_that_is_forgotten_does_not_count_for_its_heir(
    engine: EngineUnderTest,
) -> None:
    write(engine, "car-1", b"a", b"1")
    taker = subscribe(engine, "car-1")
    engine.engine.exclusive.forget(engine.engine.exclusive.owners["car-1"], engine.loop.now)
    heir = write(engine, "car-1", b"a", b"2")
    taker.ack()
    assert heir.acked_at == 0 and engine.engine.exclusive.acked == 0
    assert subscribe(engine, "car-1").take() == [b"2"]


@pytest.mark.parametrize("how", ["replaced", "swept", "purged"])
def test_who_acknowledges_what_is_gone_meanwhile_has_come_so_far(engine: EngineUnderTest, how: str) -> None:
    exclusive = engine.engine.exclusive
    exclusive.rules.retention = 3600.0
    taker = subscribe(engine, "car-1", window=2)
    owner = write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    assert taker.values() == [b"1", b"2"]
    if how == "replaced":
        write(engine, "car-1", b"a", b"3")
        write(engine, "car-1", b"b", b"4")
    elif how == "purged":
        exclusive.purge(owner, engine.loop.now)
    else:
        engine.advance(hours=2)
    taker.ack()
    assert owner.acked_at == int(engine.loop.now * 1000)
    assert (owner.acked, exclusive.acked) == (2, 1)  # of what it has not acknowledged, nothing is kept
    assert owner.depth() == (2 if how == "replaced" else 0)
    engine.crash_and_restart()
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 2 and owner.acked_at > 0
    assert subscribe(engine, "car-1").take() == ([b"3", b"4"] if how == "replaced" else [])


def test_who_acknowledges_what_is_gone_has_not_passed_what_is_kept_before_it(engine: EngineUnderTest) -> None:
    taker = subscribe(engine, "car-1", window=3)
    for number in range(3):
        owner = write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    write(engine, "car-1", b"key-1", b"new")
    taker.ack(1)  # replaced
    assert owner.acked == 0
    taker.ack(1)  # key-2, out of turn
    assert owner.acked == 0 and owner.done == {3}
    taker.ack(0)
    assert owner.acked == 3 and not owner.done
    assert taker.take() == [b"new"]


def test_the_owner_of_a_key_that_changes_all_the_time_is_seen_to_follow(engine: EngineUnderTest) -> None:
    taker = subscribe(engine, "car-1", window=1)
    for number in range(20):
        owner = write(engine, "car-1", b"speed", b"%d" % number)
        if number % 3 == 2:
            before = owner.acked
            taker.ack()
            assert owner.acked > before
    assert taker.take() == [b"17", b"19"]
    assert (owner.acked, owner.depth()) == (20, 0)


def test_a_tombstone_is_given_to_the_owner_and_then_forgotten(engine: EngineUnderTest) -> None:
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    owner = write(engine, "car-1", b"a", b"")
    taker = subscribe(engine, "car-1")
    assert taker.take() == [b"2", b""]
    assert kept(engine, "car-1") == {b"b": b"2"}
    engine.crash_and_restart()
    assert kept(engine, "car-1") == {b"b": b"2"}
    assert owner.tombstones == 0


def test_what_is_older_than_the_retention_is_swept_out(engine: EngineUnderTest) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    write(engine, "car-1", b"old", b"1")
    engine.advance(minutes=50)
    write(engine, "car-1", b"young", b"2")
    engine.advance(minutes=15)
    assert kept(engine, "car-1") == {b"young": b"2"}
    engine.crash_and_restart()
    assert kept(engine, "car-1") == {b"young": b"2"}


def test_an_owner_of_whom_nothing_is_left_is_forgotten_and_its_sequences_are_not_used_again(
    engine: EngineUnderTest,
) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    for number in range(7):
        write(engine, "car-1", b"key", b"%d" % number)
    engine.advance(hours=4)
    assert engine.engine.exclusive.owners == {}
    engine.crash_and_restart()
    assert engine.engine.exclusive.owners == {}
    taker = subscribe(engine, "car-1")
    write(engine, "car-1", b"key", b"again")
    assert taker.values() == [b"again"]
    assert taker.sequences == [8]


def test_an_owner_to_whom_nothing_was_written_says_so_and_is_forgotten_all_the_same(
    engine: EngineUnderTest,
) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    taker = subscribe(engine, "car-1")
    leave(engine, taker)
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.heard_at == 0
    write(engine, "car-2", b"a", b"1")
    engine.advance(minutes=50)
    assert engine.engine.exclusive.owners["car-1"] is owner
    write(engine, "car-2", b"a", b"2")
    engine.advance(minutes=20)
    assert list(engine.engine.exclusive.owners) == ["car-2"]
    taker = subscribe(engine, "car-3")
    owner = write(engine, "car-3", b"a", b"")
    written = int(engine.loop.now)
    assert owner.heard_at == written
    taker.take()
    assert owner.live == 0 and owner.heard_at == written


def test_a_purge_takes_every_value_and_keeps_the_place(engine: EngineUnderTest) -> None:
    for number in range(5):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    owner = engine.engine.exclusive.owners["car-1"]
    assert engine.engine.exclusive.purge(owner, engine.loop.now) == 5
    engine.settle_down()
    engine.crash_and_restart()
    assert kept(engine, "car-1") == {}
    taker = subscribe(engine, "car-1")
    write(engine, "car-1", b"key-1", b"new")
    assert taker.values() == [b"new"]
    assert taker.sequences == [6]


def test_a_value_that_is_too_large_or_one_key_too_many_is_not_kept(engine: EngineUnderTest) -> None:
    rules = engine.engine.exclusive.rules
    rules.max_message_size = 10
    rules.max_keys = 2
    with pytest.raises(MessageTooLarge, match="max_message_size"):
        write(engine, "car-1", b"a", b"x" * 11)
    assert engine.engine.exclusive.owners == {}
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    with pytest.raises(QueueFull, match="max_keys"):
        write(engine, "car-1", b"c", b"3")
    write(engine, "car-1", b"a", b"4")
    assert kept(engine, "car-1") == {b"a": b"4", b"b": b"2"}


def test_a_value_whose_time_is_over_is_not_given(engine: EngineUnderTest) -> None:
    write(engine, "car-1", b"a", b"short", ttl=10)
    write(engine, "car-1", b"b", b"long", ttl=1000)
    engine.advance(seconds=60)
    assert subscribe(engine, "car-1").take() == [b"long"]


def test_a_value_that_expires_while_its_owner_has_no_room_is_not_given_and_is_removed(
    engine: EngineUnderTest,
) -> None:
    taker = subscribe(engine, "car-1", window=2)
    write(engine, "car-1", b"a", b"1", at_once=False)
    write(engine, "car-1", b"b", b"short", ttl=10, at_once=False)  # at hand, and there is room for it no more
    taker.window = 1
    engine.settle_down()
    assert taker.values() == [b"1"]
    write(engine, "car-1", b"c", b"2")
    engine.advance(seconds=60)
    assert taker.take() == [b"1", b"2"]
    assert kept(engine, "car-1") == {b"a": b"1", b"c": b"2"}
    engine.crash_and_restart()
    assert kept(engine, "car-1") == {b"a": b"1", b"c": b"2"}


def test_a_value_that_expires_before_the_store_has_it_is_not_given(engine: EngineUnderTest) -> None:
    taker = subscribe(engine, "car-1")
    engine.runner.hold()
    write(engine, "car-1", b"a", b"short", ttl=10)
    engine.advance(seconds=60)
    engine.runner.release()
    assert taker.values() == []
    assert engine.engine.exclusive.cached == 0
    assert kept(engine, "car-1") == {}


def test_who_takes_nothing_now_has_nothing_at_hand(engine: EngineUnderTest) -> None:
    """What is there for all owners is not filled for those who are away or slow."""
    exclusive = engine.engine.exclusive
    taker = subscribe(engine, "car-1", window=1)
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    assert exclusive.cached == 0 and not taker.bodies
    assert taker.take() == [b"0", b"1", b"2"]


def test_an_owner_of_many_keys_finds_each_of_them(engine: EngineUnderTest) -> None:
    chance = random.Random(3)
    expected: dict[bytes, bytes] = {}
    for step in range(3000):
        key = b"key/%d" % chance.randrange(700)
        expected[key] = b"%d" % step
        write(engine, "car-1", key, expected[key], at_once=step % 500 == 0)
    engine.settle_down()
    assert kept(engine, "car-1") == expected
    engine.crash_and_restart()
    assert kept(engine, "car-1") == expected
    assert subscribe(engine, "car-1", window=7).take() == sorted(expected.values(), key=int)


def test_the_disk_holds_no_more_than_twice_what_lives(make: MakeEngine) -> None:
    """Segments of a megabyte, values of about 2 KB: forty times overwritten at random, then left alone."""
    bench = make(cache_bytes=0)
    chance = random.Random(7)
    expected: dict[bytes, bytes] = {}
    for step in range(8000):
        key = b"%d" % chance.randrange(1000)
        expected[key] = b"%d:" % step + b"x" * 2000
        write(bench, "car-%d" % (int(key) % 5), key, expected[key], at_once=step % 20 == 0)
    for _ in range(10):
        bench.advance(minutes=1)
    live = sum(int(owner.kept_bytes) for owner in bench.engine.exclusive.owners.values())
    assert sum(bench.store.segment_sizes().values()) <= 1.5 * live + (1 << 20)  # and the segment that is open
    bench.crash_and_restart()
    found: dict[bytes, bytes] = {}
    for number in range(5):
        found |= kept(bench, "car-%d" % number)
    assert found == expected


def test_the_disk_does_not_grow_while_values_are_written_without_a_pause(make: MakeEngine) -> None:
    """Old segments lose a little all the time, and never the last of it: nobody waits for that."""
    bench = make(cache_bytes=0)
    chance = random.Random(9)
    most = 0
    for _ in range(15):
        for _ in range(2000):
            write(bench, "car-1", b"%d" % chance.randrange(3000), b"x" * 800, at_once=False)
        bench.advance(seconds=1)
        most = max(most, sum(bench.store.segment_sizes().values()))
    assert most <= 1.8 * int(bench.engine.exclusive.owners["car-1"].kept_bytes)


@pytest.mark.parametrize("kept_before", [True, False])
def test_a_snapshot_in_parts_says_how_things_stood_when_it_was_begun(
    make: MakeEngine, kept_before: bool
) -> None:
    """Whatever happens while it is written comes again from the log, once and not twice. A crash before it is whole
    finds the one before."""
    bench = make(cache_bytes=0)
    for number in range(12):
        for key in (b"a", b"b", b"c"):
            write(bench, f"car-{number}", key, b"old")
    taker = subscribe(bench, "car-9", window=3)
    exclusive = bench.engine.exclusive
    bench.runner.save_at_once = 1
    bench.runner._snapshot()
    assert exclusive.saving
    write(bench, "car-8", b"a", b"new")
    write(bench, "car-8", b"d", b"new")
    write(bench, "car-new", b"a", b"new")
    exclusive.purge(exclusive.owners["car-7"], bench.loop.now)
    write(bench, "car-7", b"b", b"new")
    exclusive.forget(exclusive.owners["car-6"], bench.loop.now)
    write(bench, "car-6", b"c", b"new")
    assert taker.ack() == b"old"
    seek(bench, "car-5", 2)
    write(bench, "car-4", b"a", b"")
    assert subscribe(bench, "car-4").take() == [b"old", b"old", b""]
    if kept_before:
        bench.advance(seconds=1)
        assert not exclusive.saving
    bench.crash_and_restart()
    assert kept(bench, "car-8") == {b"a": b"new", b"b": b"old", b"c": b"old", b"d": b"new"}
    assert kept(bench, "car-7") == {b"b": b"new"}
    assert kept(bench, "car-6") == {b"c": b"new"}
    assert kept(bench, "car-4") == {b"b": b"old", b"c": b"old"}
    assert kept(bench, "car-new") == {b"a": b"new"}
    owners = bench.engine.exclusive.owners
    assert [int(owners[f"car-{number}"].acked) for number in (9, 5, 4, 3)] == [1, 2, 4, 0]
    assert int(owners["car-6"].next) == 5 and int(owners["car-8"].next) == 6
    assert bench.warnings == []


def test_who_still_reads_an_owner_that_is_gone_does_not_disturb_the_one_in_its_place(
    engine: EngineUnderTest,
) -> None:
    exclusive = engine.engine.exclusive
    write(engine, "car-1", b"a", b"1")
    taker = Taker(engine, 10)
    old = exclusive.join(taker, "car-1", engine.loop.now)
    exclusive.feed_all(engine.loop.now)
    assert taker.fetching
    exclusive.forget(old, engine.loop.now)
    new = write(engine, "car-2", b"a", b"2", at_once=False)
    old.slot_of(1)  # puts in order what is no more there, as the answer to its read does
    engine.settle_down()
    write(engine, "car-2", b"a", b"3")
    assert (new.number, old.next, new.next) == (2, 2, 4)
    assert not taker.got
    assert kept(engine, "car-2") == {b"a": b"3"}
    assert subscribe(engine, "car-2").take() == [b"3"]


def test_a_read_that_is_never_answered_is_asked_for_again(engine: EngineUnderTest) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    exclusive = engine.engine.exclusive
    taker = Taker(engine, 10)
    exclusive.join(taker, "car-1", engine.loop.now)
    exclusive.feed_all(engine.loop.now)
    (lost,) = exclusive.reads
    exclusive.reads = []
    assert not exclusive.heal(taker)  # it may be under way
    engine.settle_down()
    assert taker.inbox == []
    assert exclusive.heal(taker)
    assert taker.values() == [b"0", b"1", b"2"]
    assert not exclusive.heal(taker)
    records: list[bytes | None] = []
    engine.runner.read(lost.addresses, records.extend)
    engine.settle_down()
    engine.engine.owned_fetched(lost, records)  # answered after all
    assert taker.values() == [b"0", b"1", b"2"] and exclusive.cached == 0


def test_a_snapshot_with_sequences_in_order_is_still_read(engine: EngineUnderTest) -> None:
    """As the version before wrote it: an owner with the values 3, 5 and 300."""
    out = NoteWriter(4)
    for number in (1, 1, 1, 2, 1, 1):
        out.number(number)
    out.text("car-1")
    for number in (301, 7, 1, 4, 5, 0):
        out.number(number)
    out.data(bytes([3, 2, 0xA7, 0x02]))
    owners = engine.engine.exclusive
    note = Note(out.value())
    for _ in range(3):
        note.number()
    owners.load_snapshot(note, both_ways=False)
    owner = owners.owners["car-1"]
    assert [int(owner.seq(slot)) for slot in range(3)] == [3, 5, 300]
    assert (owner.next, owner.acked, owner.acked_at, owner.heard_at) == (301, 4, 5, 7)


@pytest.mark.parametrize("seed", range(3))
def test_every_key_of_every_owner_is_found_again(seed: int) -> None:
    """With keys that come and go, of which many have marks that differ little."""
    chance = random.Random(seed)
    space = Space()
    finder = Finder(space)
    owners = [Owner(f"car-{number}", number, 1, space) for number in range(200)]
    for owner in owners:
        finder.admit(owner)
    for owner in owners[5:]:
        finder.dismiss(owner)
    model: dict[tuple[int, int], int] = {}
    marks = [chance.getrandbits(20) << 27 | chance.getrandbits(2) for _ in range(200)] + [0, -1]
    for _ in range(8000):
        owner, mark = chance.choice(owners[:5]), chance.choice(marks)
        place = (int(owner.place), mark)
        found = finder.find(owner.hash, mark)
        assert finder.find_numbered(owner.number, mark) == found
        assert (found >= 0) == (place in model)
        if found < 0:
            model[place] = int(owner.next)
            owner.add(owner.next, 1, mark, 1, 1, False)
            continue
        assert found >> SLOT_BITS == owner.place
        slot = found & SLOT_MASK
        assert owner.seq(slot) == finder.seq(found) == model[place]
        if chance.random() < 0.7:
            del model[place]
            owner.remove(slot)
        if chance.random() < 0.1 and owner.is_sparse():
            owner.pack()
    for owner in owners[:5]:
        kept_here = sorted(int(owner.seq(slot)) for slot in range(owner.slots()) if owner.seq(slot))
        assert kept_here == sorted(seq for (place, _), seq in model.items() if place == owner.place)
    assert all(finder.find(owner.hash, marks[0]) == -1 for owner in owners[5:])


def test_an_owner_is_found_by_its_number_whoever_comes_and_goes() -> None:
    chance = random.Random(7)
    space = Space()
    finder = Finder(space)
    here: dict[int, Owner] = {}
    for step in range(6000):
        number = chance.randrange(1, 400) * chance.choice([1, 64, 4096])  # many of which meet in the table
        if number in here:
            assert finder.numbered(number) is here[number]
            if chance.random() < (0.3 if step < 3000 else 0.9):
                finder.dismiss(here.pop(number))
        else:
            assert finder.numbered(number) is None
            here[number] = Owner(f"car-{number}", number, 1, space)
            finder.admit(here[number])
    assert all(finder.numbered(number) is owner for number, owner in here.items())


def test_an_owner_whose_keys_are_gone_gives_their_room_back(engine: EngineUnderTest) -> None:
    for number in range(300):
        write(engine, "car-1", b"%d" % number, b"x", at_once=False)
    taker = subscribe(engine, "car-1", window=1000)
    taker.take()
    for number in range(290):
        write(engine, "car-1", b"%d" % number, b"", at_once=False)
    taker.take()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.live, owner.tombstones) == (10, 0)
    assert owner.slots() <= 40
    assert kept(engine, "car-1") == {b"%d" % number: b"x" for number in range(290, 300)}
    write(engine, "car-1", b"295", b"y")
    assert taker.take() == [b"y"]

"""Exclusive compacted queues: the last value of each key, for one owner, on every store."""

from __future__ import annotations

import random

import pytest

from sluice.errors import MessageTooLarge, QueueFull
from sluice.queues.compacted.owner import SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.owner_lookup import OwnerLookup
from sluice.queues.compacted.slab import Slab
from tests.queues.compacted.owner_kit import (
    OwnerReader,
    leave,
    seek,
    stored_values,
    subscribe,
    write,
)
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest


def test_online_owner_gets_a_value_at_once(engine: EngineUnderTest) -> None:
    subscriber = subscribe(engine, "car-1")
    write(engine, "car-1", b"speed", b"80")
    assert subscriber.values() == [b"80"]


def test_value_is_not_delivered_before_commit(engine: EngineUnderTest) -> None:
    early = subscribe(engine, "car-1")
    engine.commit_loop.hold_frame()
    write(engine, "car-1", b"speed", b"80")
    write(engine, "car-2", b"speed", b"90")
    late = subscribe(engine, "car-2")
    assert early.inbox == [] and late.inbox == []
    engine.commit_loop.release_frame()
    assert early.values() == [b"80"] and late.values() == [b"90"]


def test_returning_owner_gets_the_last_value_of_each_key_in_write_order(
    engine: EngineUnderTest,
) -> None:
    for number in range(5):
        write(engine, "car-1", b"speed", b"%d" % number)
        write(engine, "car-1", b"fuel/left", b"f%d" % number)
    write(engine, "car-1", b"speed", b"last")
    subscriber = subscribe(engine, "car-1")
    assert subscriber.values() == [b"f4", b"last"]


def test_older_value_of_a_key_is_deleted_at_once(engine: EngineUnderTest) -> None:
    for number in range(1000):
        owner = write(engine, "car-1", b"speed", b"%d" % number, at_once=number % 50 == 0)
    engine.run_until_idle()
    assert owner.live_values == 1
    assert stored_values(engine, "car-1") == {b"speed": b"999"}
    assert owner.next_seq == 1001


def test_each_owner_has_its_own_sequences(engine: EngineUnderTest) -> None:
    first, second = subscribe(engine, "car-1"), subscribe(engine, "car-2")
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-2", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    engine.run_until_idle()
    assert first.sequences == [1, 2]
    assert second.sequences == [1]


@pytest.mark.parametrize("end", ["stop", "crash", "reconnect"])
def test_acknowledged_value_is_not_redelivered(engine: EngineUnderTest, end: str) -> None:
    for number in range(6):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    subscriber = subscribe(engine, "car-1", window=3)
    assert subscriber.values() == [b"0", b"1", b"2"]
    subscriber.ack()
    subscriber.ack()
    if end == "reconnect":
        leave(engine, subscriber)
    elif end == "stop":
        engine.restart()
    else:
        engine.crash_and_restart()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.acked, owner.count_unacked(), owner.live_values) == (2, 4, 6)
    assert owner.acked_at > 0
    assert subscribe(engine, "car-1").take() == [b"2", b"3", b"4", b"5"]


def test_value_acknowledged_out_of_order_is_not_redelivered(engine: EngineUnderTest) -> None:
    for number in range(4):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    subscriber = subscribe(engine, "car-1")
    subscriber.ack(2)
    subscriber.ack(1)
    engine.crash_and_restart()
    again = subscribe(engine, "car-1")
    assert again.values() == [b"0", b"3"]
    again.ack()
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 3 and not owner.acked_out_of_order


def test_value_replaced_while_in_flight_blocks_nothing(engine: EngineUnderTest) -> None:
    subscriber = subscribe(engine, "car-1", window=2)
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    assert subscriber.values() == [b"1", b"2"]
    write(engine, "car-1", b"a", b"3")
    subscriber.ack(1)
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 2
    subscriber.ack()
    assert subscriber.take() == [b"3"]
    assert owner.acked == 3 and owner.count_unacked() == 0


def test_owner_can_be_rewound_to_stored_values(engine: EngineUnderTest) -> None:
    for number in range(5):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    subscriber = subscribe(engine, "car-1")
    assert len(subscriber.take()) == 5
    seek(engine, "car-1", 2)
    assert subscriber.values() == [b"2", b"3", b"4"]
    engine.crash_and_restart()
    assert subscribe(engine, "car-1").take() == [b"2", b"3", b"4"]


def test_acknowledgement_from_before_a_rewind_does_not_count(engine: EngineUnderTest) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    subscriber = subscribe(engine, "car-1")
    subscriber.ack()
    before = subscriber.epoch
    seek(engine, "car-1", 0)
    engine.engine.exclusive.ack(subscriber, 1, before, engine.loop.now)
    engine.run_until_idle()
    assert engine.engine.exclusive.owners["car-1"].acked == 0


@pytest.mark.parametrize("again", [False, True])
def test_acknowledgement_counts_after_its_reader_has_left(
    engine: EngineUnderTest, again: bool
) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    subscriber = subscribe(engine, "car-1")
    leave(engine, subscriber)
    if again:
        assert subscribe(engine, "car-1").values() == [b"0", b"1", b"2"]
    subscriber.ack(1)
    subscriber.ack(0)
    assert engine.engine.exclusive.owners["car-1"].acked == 2
    engine.crash_and_restart()
    assert subscribe(engine, "car-1").take() == [b"2"]


def test_acknowledgement_of_a_departed_reader_does_not_count_after_a_rewind(
    engine: EngineUnderTest,
) -> None:
    write(engine, "car-1", b"a", b"1")
    subscriber = subscribe(engine, "car-1")
    leave(engine, subscriber)
    seek(engine, "car-1", 0)
    subscriber.ack()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.acked, owner.acked_at) == (0, 0)
    assert subscribe(engine, "car-1").take() == [b"1"]


def test_acknowledgement_to_a_forgotten_owner_does_not_count_for_its_successor(
    engine: EngineUnderTest,
) -> None:
    write(engine, "car-1", b"a", b"1")
    subscriber = subscribe(engine, "car-1")
    engine.engine.exclusive.delete_owner(engine.engine.exclusive.owners["car-1"], engine.loop.now)
    successor = write(engine, "car-1", b"a", b"2")
    subscriber.ack()
    assert successor.acked_at == 0 and engine.engine.exclusive.acked == 0
    assert subscribe(engine, "car-1").take() == [b"2"]


@pytest.mark.parametrize("removal", ["replaced", "swept", "purged"])
def test_acknowledgement_of_a_replaced_value_advances_the_position(
    engine: EngineUnderTest, removal: str
) -> None:
    exclusive = engine.engine.exclusive
    exclusive.rules.retention = 3600.0
    subscriber = subscribe(engine, "car-1", window=2)
    owner = write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    assert subscriber.values() == [b"1", b"2"]
    if removal == "replaced":
        write(engine, "car-1", b"a", b"3")
        write(engine, "car-1", b"b", b"4")
    elif removal == "purged":
        exclusive.purge(owner, engine.loop.now)
    else:
        engine.advance(hours=2)
    subscriber.ack()
    assert owner.acked_at == int(engine.loop.now * 1000)
    # All values that it has not acknowledged are deleted.
    assert (owner.acked, exclusive.acked) == (
        2,
        1,
    )
    assert owner.count_unacked() == (2 if removal == "replaced" else 0)
    engine.crash_and_restart()
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.acked == 2 and owner.acked_at > 0
    assert subscribe(engine, "car-1").take() == ([b"3", b"4"] if removal == "replaced" else [])


def test_acknowledgement_of_a_replaced_value_does_not_skip_earlier_stored_ones(
    engine: EngineUnderTest,
) -> None:
    subscriber = subscribe(engine, "car-1", window=3)
    for number in range(3):
        owner = write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    write(engine, "car-1", b"key-1", b"new")
    subscriber.ack(1)  # replaced value
    assert owner.acked == 0
    subscriber.ack(1)  # key-2, out of order
    assert owner.acked == 0 and owner.acked_out_of_order == {3}
    subscriber.ack(0)
    assert owner.acked == 3 and not owner.acked_out_of_order
    assert subscriber.take() == [b"new"]


def test_owner_of_a_constantly_changing_key_is_seen_to_progress(engine: EngineUnderTest) -> None:
    subscriber = subscribe(engine, "car-1", window=1)
    for number in range(20):
        owner = write(engine, "car-1", b"speed", b"%d" % number)
        if number % 3 == 2:
            before = owner.acked
            subscriber.ack()
            assert owner.acked > before
    assert subscriber.take() == [b"17", b"19"]
    assert (owner.acked, owner.count_unacked()) == (20, 0)


def test_tombstone_is_delivered_to_the_owner_and_then_forgotten(engine: EngineUnderTest) -> None:
    write(engine, "car-1", b"a", b"1")
    write(engine, "car-1", b"b", b"2")
    owner = write(engine, "car-1", b"a", b"")
    subscriber = subscribe(engine, "car-1")
    assert subscriber.take() == [b"2", b""]
    assert stored_values(engine, "car-1") == {b"b": b"2"}
    engine.crash_and_restart()
    assert stored_values(engine, "car-1") == {b"b": b"2"}
    assert owner.tombstones == 0


def test_values_older_than_the_retention_are_deleted(engine: EngineUnderTest) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    write(engine, "car-1", b"old", b"1")
    engine.advance(minutes=50)
    write(engine, "car-1", b"young", b"2")
    engine.advance(minutes=15)
    assert stored_values(engine, "car-1") == {b"young": b"2"}
    engine.crash_and_restart()
    assert stored_values(engine, "car-1") == {b"young": b"2"}


def test_empty_owner_is_forgotten_and_its_sequences_are_not_reused(
    engine: EngineUnderTest,
) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    for number in range(7):
        write(engine, "car-1", b"key", b"%d" % number)
    engine.advance(hours=4)
    assert engine.engine.exclusive.owners == {}
    engine.crash_and_restart()
    assert engine.engine.exclusive.owners == {}
    subscriber = subscribe(engine, "car-1")
    write(engine, "car-1", b"key", b"again")
    assert subscriber.values() == [b"again"]
    assert subscriber.sequences == [8]


def test_owner_without_any_write_is_reported_as_such_and_forgotten(
    engine: EngineUnderTest,
) -> None:
    engine.engine.exclusive.rules.retention = 3600.0
    subscriber = subscribe(engine, "car-1")
    leave(engine, subscriber)
    owner = engine.engine.exclusive.owners["car-1"]
    assert owner.last_write_at == 0
    write(engine, "car-2", b"a", b"1")
    engine.advance(minutes=50)
    assert engine.engine.exclusive.owners["car-1"] is owner
    write(engine, "car-2", b"a", b"2")
    engine.advance(minutes=20)
    assert list(engine.engine.exclusive.owners) == ["car-2"]
    subscriber = subscribe(engine, "car-3")
    owner = write(engine, "car-3", b"a", b"")
    written = int(engine.loop.now)
    assert owner.last_write_at == written
    subscriber.take()
    assert owner.live_values == 0 and owner.last_write_at == written


def test_purge_deletes_every_value_and_keeps_the_position(engine: EngineUnderTest) -> None:
    for number in range(5):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    owner = engine.engine.exclusive.owners["car-1"]
    assert engine.engine.exclusive.purge(owner, engine.loop.now) == 5
    engine.run_until_idle()
    engine.crash_and_restart()
    assert stored_values(engine, "car-1") == {}
    subscriber = subscribe(engine, "car-1")
    write(engine, "car-1", b"key-1", b"new")
    assert subscriber.values() == [b"new"]
    assert subscriber.sequences == [6]


def test_oversized_value_or_one_key_too_many_is_not_stored(engine: EngineUnderTest) -> None:
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
    assert stored_values(engine, "car-1") == {b"a": b"4", b"b": b"2"}


def test_expired_value_is_not_delivered(engine: EngineUnderTest) -> None:
    write(engine, "car-1", b"a", b"short", ttl=10)
    write(engine, "car-1", b"b", b"long", ttl=1000)
    engine.advance(seconds=60)
    assert subscribe(engine, "car-1").take() == [b"long"]


def test_value_that_expires_while_its_owner_has_no_capacity_is_deleted(
    engine: EngineUnderTest,
) -> None:
    subscriber = subscribe(engine, "car-1", window=2)
    write(engine, "car-1", b"a", b"1", at_once=False)
    # cached, and then there is no capacity for it
    write(engine, "car-1", b"b", b"short", ttl=10, at_once=False)
    subscriber.window = 1
    engine.run_until_idle()
    assert subscriber.values() == [b"1"]
    write(engine, "car-1", b"c", b"2")
    engine.advance(seconds=60)
    assert subscriber.take() == [b"1", b"2"]
    assert stored_values(engine, "car-1") == {b"a": b"1", b"c": b"2"}
    engine.crash_and_restart()
    assert stored_values(engine, "car-1") == {b"a": b"1", b"c": b"2"}


def test_value_that_expires_before_commit_is_not_delivered(engine: EngineUnderTest) -> None:
    subscriber = subscribe(engine, "car-1")
    engine.commit_loop.hold_frame()
    write(engine, "car-1", b"a", b"short", ttl=10)
    engine.advance(seconds=60)
    engine.commit_loop.release_frame()
    assert subscriber.values() == []
    assert engine.engine.exclusive.cached_bytes == 0
    assert stored_values(engine, "car-1") == {}


def test_owner_without_capacity_has_nothing_prefetched(engine: EngineUnderTest) -> None:
    """Bodies are not cached for absent or slow owners."""
    exclusive = engine.engine.exclusive
    subscriber = subscribe(engine, "car-1", window=1)
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    assert exclusive.cached_bytes == 0 and not subscriber.pending_bodies
    assert subscriber.take() == [b"0", b"1", b"2"]


def test_owner_of_many_keys_finds_each_of_them(engine: EngineUnderTest) -> None:
    rng = random.Random(3)
    expected: dict[bytes, bytes] = {}
    for step in range(3000):
        key = b"key/%d" % rng.randrange(700)
        expected[key] = b"%d" % step
        write(engine, "car-1", key, expected[key], at_once=step % 500 == 0)
    engine.run_until_idle()
    assert stored_values(engine, "car-1") == expected
    engine.crash_and_restart()
    assert stored_values(engine, "car-1") == expected
    assert subscribe(engine, "car-1", window=7).take() == sorted(expected.values(), key=int)


def test_disk_holds_at_most_twice_the_live_data(make_engine: MakeEngine) -> None:
    """Segments of a megabyte, values of about 2 KB, overwritten at random, then idle."""
    under_test = make_engine(cache_bytes=0)
    rng = random.Random(7)
    expected: dict[bytes, bytes] = {}
    for step in range(8000):
        key = b"%d" % rng.randrange(1000)
        expected[key] = b"%d:" % step + b"x" * 2000
        write(under_test, "car-%d" % (int(key) % 5), key, expected[key], at_once=step % 20 == 0)
    for _ in range(10):
        under_test.advance(minutes=1)
    live = sum(int(owner.stored_bytes) for owner in under_test.engine.exclusive.owners.values())
    # plus the open segment
    assert sum(under_test.store.segment_sizes().values()) <= 1.5 * live + (1 << 20)
    under_test.crash_and_restart()
    found: dict[bytes, bytes] = {}
    for number in range(5):
        found |= stored_values(under_test, "car-%d" % number)
    assert found == expected


def test_disk_does_not_grow_while_values_are_written_continuously(make_engine: MakeEngine) -> None:
    """Old segments shrink slowly and never become empty: compaction does not wait for that."""
    under_test = make_engine(cache_bytes=0)
    rng = random.Random(9)
    peak = 0
    for _ in range(15):
        for _ in range(2000):
            write(under_test, "car-1", b"%d" % rng.randrange(3000), b"x" * 800, at_once=False)
        under_test.advance(seconds=1)
        peak = max(peak, sum(under_test.store.segment_sizes().values()))
    assert peak <= 1.8 * int(under_test.engine.exclusive.owners["car-1"].stored_bytes)


@pytest.mark.parametrize("is_completed", [True, False])
def test_incremental_snapshot_has_the_state_of_its_start(
    make_engine: MakeEngine, is_completed: bool
) -> None:
    """The log has the changes made meanwhile; a crash falls back to the previous one."""
    under_test = make_engine(cache_bytes=0)
    for number in range(12):
        for key in (b"a", b"b", b"c"):
            write(under_test, f"car-{number}", key, b"old")
    subscriber = subscribe(under_test, "car-9", window=3)
    exclusive = under_test.engine.exclusive
    under_test.commit_loop.housekeeping.snapshot_batch_size = 1
    under_test.commit_loop.housekeeping._start_snapshot()
    assert exclusive.is_saving
    write(under_test, "car-8", b"a", b"new")
    write(under_test, "car-8", b"d", b"new")
    write(under_test, "car-new", b"a", b"new")
    exclusive.purge(exclusive.owners["car-7"], under_test.loop.now)
    write(under_test, "car-7", b"b", b"new")
    exclusive.delete_owner(exclusive.owners["car-6"], under_test.loop.now)
    write(under_test, "car-6", b"c", b"new")
    assert subscriber.ack() == b"old"
    seek(under_test, "car-5", 2)
    write(under_test, "car-4", b"a", b"")
    assert subscribe(under_test, "car-4").take() == [b"old", b"old", b""]
    if is_completed:
        under_test.advance(seconds=1)
        assert not exclusive.is_saving
    under_test.crash_and_restart()
    assert stored_values(under_test, "car-8") == {
        b"a": b"new",
        b"b": b"old",
        b"c": b"old",
        b"d": b"new",
    }
    assert stored_values(under_test, "car-7") == {b"b": b"new"}
    assert stored_values(under_test, "car-6") == {b"c": b"new"}
    assert stored_values(under_test, "car-4") == {b"b": b"old", b"c": b"old"}
    assert stored_values(under_test, "car-new") == {b"a": b"new"}
    owners = under_test.engine.exclusive.owners
    assert [int(owners[f"car-{number}"].acked) for number in (9, 5, 4, 3)] == [1, 2, 4, 0]
    assert int(owners["car-6"].next_seq) == 5 and int(owners["car-8"].next_seq) == 6
    assert under_test.warnings == []


def test_reader_of_a_removed_owner_does_not_disturb_its_successor(
    engine: EngineUnderTest,
) -> None:
    exclusive = engine.engine.exclusive
    write(engine, "car-1", b"a", b"1")
    subscriber = OwnerReader(engine, 10)
    old = exclusive.subscribe(subscriber, "car-1", engine.loop.now)
    exclusive.dispatch_scheduled(engine.loop.now)
    assert subscriber.is_reading
    exclusive.delete_owner(old, engine.loop.now)
    new = write(engine, "car-2", b"a", b"2", at_once=False)
    # Builds the order of the deleted owner, as the answer to its read does.
    old.slot_of_sequence(1)
    engine.run_until_idle()
    write(engine, "car-2", b"a", b"3")
    assert (new.number, old.next_seq, new.next_seq) == (2, 2, 4)
    assert not subscriber.got
    assert stored_values(engine, "car-2") == {b"a": b"3"}
    assert subscribe(engine, "car-2").take() == [b"3"]


def test_unanswered_read_is_repeated(engine: EngineUnderTest) -> None:
    for number in range(3):
        write(engine, "car-1", b"key-%d" % number, b"%d" % number)
    exclusive = engine.engine.exclusive
    subscriber = OwnerReader(engine, 10)
    exclusive.subscribe(subscriber, "car-1", engine.loop.now)
    exclusive.dispatch_scheduled(engine.loop.now)
    (lost,) = exclusive.reads
    exclusive.reads = []
    assert not exclusive.restart_stalled_read(subscriber)  # it may be in progress
    engine.run_until_idle()
    assert subscriber.inbox == []
    assert exclusive.restart_stalled_read(subscriber)
    assert subscriber.values() == [b"0", b"1", b"2"]
    assert not exclusive.restart_stalled_read(subscriber)
    records: list[bytes | None] = []
    engine.commit_loop.read(lost.addresses, records.extend)
    engine.run_until_idle()
    engine.engine.on_owner_read_done(lost, records)  # answered late
    assert subscriber.values() == [b"0", b"1", b"2"] and exclusive.cached_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_every_key_of_every_owner_is_found_again(seed: int) -> None:
    """Keys are added and removed, and many have similar hashes."""
    rng = random.Random(seed)
    slab = Slab()
    lookup = OwnerLookup(slab)
    owners = [Owner(f"car-{number}", number, 1, slab) for number in range(200)]
    for owner in owners:
        lookup.admit(owner)
    for owner in owners[5:]:
        lookup.remove(owner)
    model: dict[tuple[int, int], int] = {}
    key_hashes = [rng.getrandbits(20) << 27 | rng.getrandbits(2) for _ in range(200)] + [0, -1]
    for _ in range(8000):
        owner, key_hash = rng.choice(owners[:5]), rng.choice(key_hashes)
        location = (int(owner.owner_index), key_hash)
        found = lookup.find_value(owner.client_hash, key_hash)
        assert lookup.find_value_of_number(owner.number, key_hash) == found
        assert (found >= 0) == (location in model)
        if found < 0:
            model[location] = int(owner.next_seq)
            owner.add(owner.next_seq, 1, key_hash, 1, 1, False)
            continue
        assert found >> SLOT_BITS == owner.owner_index
        slot = found & SLOT_MASK
        assert owner.seq(slot) == lookup.seq(found) == model[location]
        if rng.random() < 0.7:
            del model[location]
            owner.remove(slot)
        if rng.random() < 0.1 and owner.is_sparse():
            owner.shrink()
    for owner in owners[:5]:
        stored_seqs = sorted(
            int(owner.seq(slot)) for slot in range(owner.row_count()) if owner.seq(slot)
        )
        assert stored_seqs == sorted(
            seq for (location, _), seq in model.items() if location == owner.owner_index
        )
    assert all(lookup.find_value(owner.client_hash, key_hashes[0]) == -1 for owner in owners[5:])


def test_owner_is_found_by_its_number_while_others_join_and_leave() -> None:
    rng = random.Random(7)
    slab = Slab()
    lookup = OwnerLookup(slab)
    known: dict[int, Owner] = {}
    for step in range(6000):
        # Many of them collide in the table.
        number = rng.randrange(1, 400) * rng.choice([1, 64, 4096])
        if number in known:
            assert lookup.owner_of_number(number) is known[number]
            if rng.random() < (0.3 if step < 3000 else 0.9):
                lookup.remove(known.pop(number))
        else:
            assert lookup.owner_of_number(number) is None
            known[number] = Owner(f"car-{number}", number, 1, slab)
            lookup.admit(known[number])
    assert all(lookup.owner_of_number(number) is owner for number, owner in known.items())


def test_owner_whose_keys_are_gone_frees_their_space(engine: EngineUnderTest) -> None:
    for number in range(300):
        write(engine, "car-1", b"%d" % number, b"x", at_once=False)
    subscriber = subscribe(engine, "car-1", window=1000)
    subscriber.take()
    for number in range(290):
        write(engine, "car-1", b"%d" % number, b"", at_once=False)
    subscriber.take()
    owner = engine.engine.exclusive.owners["car-1"]
    assert (owner.live_values, owner.tombstones) == (10, 0)
    assert owner.row_count() <= 40
    assert stored_values(engine, "car-1") == {b"%d" % number: b"x" for number in range(290, 300)}
    write(engine, "car-1", b"295", b"y")
    assert subscriber.take() == [b"y"]

"""Tests of the store contract, on every store."""

from __future__ import annotations

import random
from functools import partial

import pytest
from librt.strings import BytesWriter

from sluice.errors import StoreError
from sluice.store.protocol import MESSAGE, NOTE, Record, copy_row, read_record, read_row, write_row
from sluice.store.snapshot_policy import LOG_BYTES_PER_SNAPSHOT_BYTE, SMALL_SNAPSHOT_BYTES
from tests.store.kit import (
    SEGMENT_BYTES,
    RecordingLoader,
    StoreUnderTest,
    frame_of,
    matches_sample,
    message,
    note,
)


def test_new_store_is_empty(store: StoreUnderTest) -> None:
    assert store.loaded.snapshot is None
    assert store.loaded.rows == [] and store.loaded.records == []
    assert store.report.warnings == []


def test_committed_message_is_read_back_by_its_address(store: StoreUnderTest) -> None:
    addresses = store.commit(message(1, b"one"), note(2, b"not for reading"), message(3, b""))
    assert store.bodies(addresses[:1]) == [b"one"]
    assert store.bodies([addresses[2], addresses[0]]) == [b"", b"one"]
    data = store.read(addresses[:1])[0]
    assert data is not None
    record = read_record(data, 0, len(data), addresses[0])
    assert record is not None and matches_sample(record)
    assert (record.kind, record.pid, record.seq) == (MESSAGE, 1, 1)


def test_restart_restores_every_record_in_write_order(store: StoreUnderTest) -> None:
    addresses = store.commit(message(1, b"a"), note(2, b"b"))
    addresses += store.commit(note(3, b"c"))
    addresses += store.commit(message(4, b"d"), sync=False)
    store.reopen()
    assert [(r.kind, r.seq, r.body, r.address) for r in store.loaded.records] == [
        (MESSAGE, 1, b"a", addresses[0]),
        (NOTE, 2, b"b", addresses[1]),
        (NOTE, 3, b"c", addresses[2]),
        (MESSAGE, 4, b"d", addresses[3]),
    ]
    assert all(matches_sample(record) for record in store.loaded.records)
    assert (store.report.frames, store.report.records, store.report.messages) == (3, 4, 2)
    assert store.bodies([addresses[3]]) == [b"d"]


def test_commits_complete_in_order(store: StoreUnderTest) -> None:
    answers: list[int] = []
    for seq in range(200):
        store.start_commit(
            message(seq, b"x" * 500), sync=seq % 3 == 0, done=partial(answers.append, seq)
        )
    store.loop.turn_until(lambda: len(answers) == 200)
    assert answers == list(range(200))
    assert [record.seq for record in store.reopen().loaded.records] == list(range(200))


def test_next_frame_is_predicted_across_segments(store: StoreUnderTest) -> None:
    expected = {}
    for seq in range(300):
        expected[1, seq] = store.commit(message(seq, b"y" * (seq * 7 % 1500)))[0]
    assert len({address >> 32 for address in expected.values()}) > 2
    assert store.reopen().loaded.addresses() == expected
    assert store.bodies(list(expected.values())) == [b"y" * (seq * 7 % 1500) for seq in range(300)]


def test_no_record_has_the_address_0(store: StoreUnderTest) -> None:
    assert store.store.next_frame_address() > 0xFFFF_FFFF


def test_frame_larger_than_a_segment_is_stored(store: StoreUnderTest) -> None:
    store.commit(message(1, b"before"))
    big = bytes(range(256)) * (SEGMENT_BYTES // 256 * 3)
    addresses = store.commit(message(2, big), message(3, b"beside it"))
    addresses += store.commit(message(4, b"after it"))
    assert store.bodies(addresses) == [big, b"beside it", b"after it"]
    assert store.reopen().bodies(addresses) == [big, b"beside it", b"after it"]


def test_frame_larger_than_one_read_is_stored(store: StoreUnderTest) -> None:
    bodies = [random.Random(seq).randbytes(700_000) for seq in range(5)]
    addresses = store.commit(*[message(seq, body) for seq, body in enumerate(bodies)])
    assert store.bodies(addresses) == bodies
    assert store.reopen().bodies(addresses[::-1]) == bodies[::-1]


def test_many_addresses_are_read_in_the_requested_order(store: StoreUnderTest) -> None:
    draw = random.Random(7)
    bodies: dict[int, bytes] = {}
    for start in range(0, 3000, 50):
        made = [draw.randbytes(draw.choice([0, 10, 300, 3000, 9000])) for _ in range(50)]
        addresses = store.commit(*[message(start + nth, body) for nth, body in enumerate(made)])
        bodies.update(zip(addresses, made))
    for count in (1, 10, 500, 3000):
        wanted = draw.sample(list(bodies), count)
        assert store.bodies(wanted) == [bodies[address] for address in wanted]
    again = draw.choices(list(bodies), k=100)
    assert store.bodies(again + again) == [bodies[address] for address in again + again]


def test_address_without_a_record_reads_as_none(store: StoreUnderTest) -> None:
    good = store.commit(message(1, b"good"))[0]
    wrong = [good + 1, good + 39, good + 10_000, good + (7 << 32), 5]
    assert store.read(wrong) == [None] * 5
    assert store.bodies([wrong[0], good, wrong[2]]) == [None, b"good", None]
    assert store.read([]) == []


def test_after_a_snapshot_older_messages_are_restored_as_rows(store: StoreUnderTest) -> None:
    before = store.fill_segment(0)
    before += store.commit(message(1000, b"same segment"), note(5000), message(1001, b"as well"))[
        ::2
    ]
    store.snapshot(b"the state")
    later = store.commit(message(2000, b"later"), note(6000))
    store.reopen()
    assert store.loaded.snapshot == b"the state"
    assert [row.address for row in store.loaded.rows] == before
    assert all(
        matches_sample(row) and row.body == b"" and row.kind == MESSAGE for row in store.loaded.rows
    )
    assert [record.address for record in store.loaded.records] == later
    assert store.report.messages == len(before) + 1
    sizes = [len(data or b"") for data in store.read(before)]
    assert [row.size for row in store.loaded.rows] == sizes


def test_snapshot_covers_the_state_of_its_start(store: StoreUnderTest) -> None:
    """Frames and whole segments that follow during the write are replayed."""
    before = store.fill_segment(0)
    before += store.commit(message(1000, b"same segment"))
    store.store.begin_snapshot()
    assert not store.store.is_snapshot_due()
    later = store.fill_segment(2000)
    later += store.commit(message(3000, b"later"), note(6000))
    store.snapshot(b"the state", free=[1])
    later += store.commit(message(3001, b"much later"))
    store.reopen()
    assert store.loaded.snapshot == b"the state"
    assert [row.address for row in store.loaded.rows] == before[-1:]
    assert [record.address for record in store.loaded.records] == later


def test_snapshot_that_was_only_begun_does_not_count(store: StoreUnderTest) -> None:
    before = store.commit(message(1))
    store.snapshot(b"first")
    later = store.commit(message(2))
    store.store.begin_snapshot()
    later += store.commit(message(3))
    store.reopen()
    assert store.loaded.snapshot == b"first"
    assert [row.address for row in store.loaded.rows] == before
    assert [record.address for record in store.loaded.records] == later


def test_newest_snapshot_is_used(store: StoreUnderTest) -> None:
    store.commit(message(1))
    store.snapshot(b"first")
    store.commit(message(2))
    store.snapshot(b"second")
    store.snapshot(b"third, with nothing in between")
    store.reopen()
    assert store.loaded.snapshot == b"third, with nothing in between"
    assert [row.seq for row in store.loaded.rows] == [1, 2]
    assert store.loaded.records == []


def test_snapshot_may_be_empty_and_may_be_large(store: StoreUnderTest) -> None:
    store.snapshot(b"")
    assert store.reopen().loaded.snapshot == b""
    state = random.Random(1).randbytes(3_000_000)
    store.snapshot(state)
    assert store.reopen().loaded.snapshot == state


def test_snapshot_in_more_pieces_than_iov_max_is_restored_as_one(
    store: StoreUnderTest,
) -> None:
    state = random.Random(1).randbytes(5_000)
    store.snapshot(state, pieces=2_500)
    assert store.reopen().loaded.snapshot == state


def test_freed_segment_is_deleted_and_its_neighbors_are_not(store: StoreUnderTest) -> None:
    first, second, third = store.fill_segment(0), store.fill_segment(1000), store.fill_segment(2000)
    store.snapshot(b"s", free=[second[0] >> 32])
    assert list(store.store.segment_sizes()) == [1, 3, 4]
    assert store.read(second[:1]) == [None]
    assert None not in store.read(first + third)
    store.reopen()
    assert [row.address for row in store.loaded.rows] == first + third
    assert list(store.store.segment_sizes()) == [1, 3, 4]


def test_numbers_of_freed_segments_are_not_reused(store: StoreUnderTest) -> None:
    store.fill_segment(0)
    store.fill_segment(1000)
    store.snapshot(b"s", free=[1, 2])
    store.reopen()
    assert store.store.next_frame_address() >> 32 == 3
    address = store.commit(message(1, b"new"))[0]
    assert store.reopen().bodies([address]) == [b"new"]


def test_active_segment_is_never_freed(store: StoreUnderTest) -> None:
    address = store.commit(message(1, b"here"))[0]
    store.snapshot(b"s", free=[1, 99])
    assert store.bodies([address]) == [b"here"]
    assert [row.address for row in store.reopen().loaded.rows] == [address]


def test_two_snapshots_may_be_written_at_once(store: StoreUnderTest) -> None:
    store.fill_segment(0)
    answers: list[str] = []
    store.store.snapshot([b"one"], [1], lambda: answers.append("one"))
    assert not store.store.is_snapshot_due()
    store.store.snapshot([b"two"], [], lambda: answers.append("two"))
    store.loop.turn_until(lambda: len(answers) == 2)
    assert answers == ["one", "two"]
    assert store.reopen().loaded.snapshot == b"two"


def test_snapshot_is_requested_once_a_segment_is_full(store: StoreUnderTest) -> None:
    store.commit(message(1))
    assert not store.store.is_snapshot_due()
    store.fill_segment(2)
    assert store.store.is_snapshot_due()
    assert store.reopen().store.is_snapshot_due(), "a restart does not make the log shorter"
    store.snapshot(b"s")
    assert not store.store.is_snapshot_due()
    assert not store.reopen().store.is_snapshot_due()


def test_large_snapshot_is_requested_after_a_multiple_of_its_own_size(
    store: StoreUnderTest,
) -> None:
    # Due after three segments.
    store.snapshot(bytes(SMALL_SNAPSHOT_BYTES + 3 * SEGMENT_BYTES // LOG_BYTES_PER_SNAPSHOT_BYTE))
    store.fill_segment(0)
    assert not store.store.is_snapshot_due()
    assert not store.reopen().store.is_snapshot_due(), (
        "the size of a snapshot is known after a restart"
    )
    store.fill_segment(100)
    assert not store.store.is_snapshot_due()
    store.fill_segment(200)
    assert store.store.is_snapshot_due()
    assert store.reopen().store.is_snapshot_due()
    store.snapshot(b"small again")
    store.fill_segment(300)
    assert store.store.is_snapshot_due()


def test_segment_sealed_early_is_read_and_freed_like_a_full_one(store: StoreUnderTest) -> None:
    before = store.commit(message(1, b"before"), note(2))
    if not store.store.seal_segment():
        assert store.redis, "only Redis does not seal segments"
        return
    assert not store.store.seal_segment(), "nothing was written since"
    assert store.store.is_snapshot_due()
    later = store.commit(message(3, b"later"))
    assert later[0] >> 32 == (before[0] >> 32) + 1
    assert [row.seq for row in store.scan(1)] == [1]
    store.reopen()
    assert [record.seq for record in store.loaded.records] == [1, 2, 3]
    assert store.bodies([before[0], later[0]]) == [b"before", b"later"]
    store.snapshot(b"s", free=[1])
    assert list(store.store.segment_sizes()) == [2]
    assert [row.seq for row in store.reopen().loaded.rows] == [3]


def test_segment_sizes_lists_every_segment_with_the_active_one_last(store: StoreUnderTest) -> None:
    store.fill_segment(0)
    store.commit(message(1000, b"z" * 100))
    sizes = store.store.segment_sizes()
    assert list(sizes) == [1, 2]
    assert SEGMENT_BYTES <= sizes[1] <= SEGMENT_BYTES + 1100
    assert 100 < sizes[2] < 300
    assert store.reopen().store.segment_sizes() == sizes


def test_scan_lists_all_messages_of_a_sealed_segment(store: StoreUnderTest) -> None:
    store.commit(note(1), message(2, b"two"))
    addresses = store.fill_segment(100)
    rows = store.scan(1)
    assert [row.address for row in rows][1:] == addresses
    assert rows[0].seq == 2 and all(matches_sample(row) for row in rows)
    assert [row.address for row in store.reopen().scan(1)][1:] == addresses
    assert store.scan(77) == []


def test_closed_store_raises(store: StoreUnderTest) -> None:
    store.store.close()
    with pytest.raises(StoreError, match="not open"):
        store.store.commit(b"", 0, True, lambda: None)
    store.store.close()  # a second call is allowed
    store.store.open(RecordingLoader())
    with pytest.raises(StoreError, match="open already"):
        store.store.open(RecordingLoader())


def test_row_preserves_every_field_at_its_limits() -> None:
    for flags, number, seq, time in (
        (0, 0, 0, 0),
        (127, 1, 2, 3),
        (255, 0xFFFF_FFFF, 2**63 - 1, 2**56 - 1),
    ):
        record = Record(MESSAGE, flags, number, seq, number, number, time, b"", 1, 40)
        rows = BytesWriter()
        write_row(rows, 123 << 32, record)
        found = read_row(rows.getvalue(), 0)
        assert (found.flags, found.pid, found.seq, found.key_hash, found.expires, found.time) == (
            flags,
            number,
            seq,
            number,
            number,
            time,
        )
        assert (found.address, found.size) == (123 << 32, 40)


def test_row_is_the_same_from_a_record_and_from_its_bytes() -> None:
    for seq in (1, 127, 128, 255, 10**12):
        data = frame_of([message(seq, b"body", pid=0xFFFF_FFFF)])
        record = read_record(data, 0, len(data), 77)
        assert record is not None
        ours, theirs = BytesWriter(), BytesWriter()
        write_row(ours, 77, record)
        copy_row(theirs, data, 0, 77)
        assert ours.getvalue() == theirs.getvalue()

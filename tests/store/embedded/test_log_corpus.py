"""Tests of logs and snapshots with valid checksums and invalid content: a start raises an error."""

from __future__ import annotations

import struct
from random import Random

import pytest
from google_crc32c import value as crc32c
from librt.strings import BytesWriter

from sluice.errors import StoreDamaged, StoreError, UnusableRecord
from sluice.queues.bodies.body_reads import decode_message
from sluice.queues.log import notes
from sluice.queues.log.broker_state import FIRST_OWNER_PID
from sluice.queues.log.notes import OWNER_CREATED, NoteWriter
from sluice.queues.recovery.loader import EngineLoader
from sluice.store.embedded.log_recovery import LogRecovery
from sluice.store.protocol import HEADER_BYTES, MESSAGE, NOTE, write_record
from sluice.store.snapshot_policy import SnapshotPolicy
from tests.store.embedded import log_corpus
from tests.store.embedded.simulated_disk import Disk


def record(kind: int, body: bytes, pid: int = 1, seq: int = 0) -> bytes:
    frame = BytesWriter()
    write_record(frame, kind, 0, pid, seq, 0, 0, 0, body)
    return frame.getvalue()


def refusal_of(files: dict[str, bytes], salvage: bool = False) -> StoreError | None:
    disk = Disk(Random(1))
    for name, data in files.items():
        disk.put(f"/disk/{name}", data)
    loader = EngineLoader(log_corpus.new_engine(), log_corpus.rules_from)
    try:
        LogRecovery(
            disk,
            "/disk",
            log_corpus.SALT,
            64 << 20,
            salvage,
            loader,
            SnapshotPolicy(64 << 20),
            True,
        ).run()
    except StoreError as refusal:
        return refusal
    return None


def settled(first: int, count: int) -> bytes:
    note = NoteWriter(notes.SETTLED)
    for number in (1, 1, 0, first, count):
        note.write_int(number)
    return note.to_bytes()


def made(count: int, config: str = "{}") -> bytes:
    note = NoteWriter(notes.QUEUE_CREATED)
    for number in (99, 1000, count):
        note.write_int(number)
    note.write_text("more")
    note.write_text(config)
    note.write_seconds(0.0)
    note.write_int(0)
    return note.to_bytes()


UNUSABLE = {
    "an empty note": b"",
    "a note that ends early": bytes([notes.QUEUE_CREATED]) + b"\1\0",
    "a name of negative length": bytes([notes.QUEUE_CREATED]) + struct.pack("<3qi", 99, 1, 1, -5),
    "a configuration that is no JSON": made(1, "{"),
    "a configuration that is none": made(1, '{"partitions": "many"}'),
    "more partitions than there can be": made(1 << 40),
}


@pytest.mark.parametrize("sequence", [1 << 48, (1 << 63) - 1])
def test_value_of_an_exclusive_queue_with_an_impossible_sequence_is_refused(sequence: int) -> None:
    """The next snapshot could not store the sequence."""
    note = NoteWriter(OWNER_CREATED)
    note.write_int(5)
    note.write_text("car")
    note.write_int(1)
    value = record(MESSAGE, bytes(40), FIRST_OWNER_PID + 5, sequence)
    files = {"00000001.log": log_corpus.log_of([record(NOTE, note.to_bytes()), value], 1)}
    assert isinstance(refusal_of(files), StoreDamaged)


@pytest.mark.parametrize("body", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_invalid_note_is_refused_with_file_and_position(body: bytes) -> None:
    frames = log_corpus.history().frames[:8]
    before = log_corpus.log_of(frames)
    log = log_corpus.log_of([*frames, record(NOTE, body)])
    refusal = refusal_of({"00000001.log": log})
    assert isinstance(refusal, StoreDamaged)
    assert (refusal.path, refusal.offset) == ("/disk/00000001.log", len(before) + 28)
    assert "a record contains invalid data" in str(refusal) and "--salvage" in str(refusal)
    assert refusal_of({"00000001.log": log}, salvage=True) is None, "salvage continues without it"


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1 << 62), (-(1 << 62), 1 << 62), (5, -1), (1 << 60, 1 << 60)]
)
def test_absurd_sequence_ranges_take_no_time(first: int, count: int) -> None:
    with log_corpus.in_time():
        frames = [*log_corpus.history().frames, record(NOTE, settled(first, count))]
        assert refusal_of({"00000001.log": log_corpus.log_of(frames)}) is None


def test_message_far_ahead_of_its_partition_is_fast_and_one_beyond_the_limit_refused() -> None:
    frames = log_corpus.history().frames
    body = bytes(28)
    with log_corpus.in_time():
        ahead = record(MESSAGE, body, seq=1 << 47)
        assert refusal_of({"00000001.log": log_corpus.log_of([*frames, ahead])}) is None
        beyond = record(MESSAGE, body, seq=1 << 50)
        assert isinstance(
            refusal_of({"00000001.log": log_corpus.log_of([*frames, beyond])}), StoreDamaged
        )


@pytest.mark.parametrize("cut", [41, 48, 60, 300, 1000])
def test_invalid_snapshot_is_refused_with_its_file_and_a_remedy(cut: int) -> None:
    history = log_corpus.history()
    body = history.snapshot[:cut] + b"\xff" * 40
    name = f"{len(history.frames):016x}.state"
    data = b"SLS1" + crc32c(body).to_bytes(4, "little") + body
    refusal = refusal_of({"00000001.log": log_corpus.log_before(len(history.frames)), name: data})
    assert isinstance(refusal, StoreError)
    if isinstance(refusal, StoreDamaged):
        assert refusal.path == f"/disk/{name}"
        assert "move this file away" in str(refusal)


def test_message_with_fields_longer_than_itself_reads_as_damaged() -> None:
    good = record(MESSAGE, bytes(28) + b"payload")
    assert decode_message(good, log_corpus.new_engine().codec) is not None
    for sizes in (
        (1 << 20, 0, 0, 0, 0),
        (-1, 0, 0, 0, 0),
        (0, 0, -(1 << 31), 0, 0),
        (0, 0, 0, 0, 8),
    ):
        bad = record(MESSAGE, bytes(8) + struct.pack("<5i", *sizes) + b"payload")
        assert decode_message(bad, log_corpus.new_engine().codec) is None
    assert decode_message(good[: HEADER_BYTES + 4], log_corpus.new_engine().codec) is None


def test_invalid_index_raises_the_same_error() -> None:
    with pytest.raises(UnusableRecord, match="an index contains invalid data"):
        EngineLoader(log_corpus.new_engine(), log_corpus.rules_from).load_rows(b"short")


@pytest.mark.parametrize("target", ["notes", "snapshots"])
def test_any_contents_end_in_a_start_or_an_error_message(target: str) -> None:
    """A short run of `fuzz/fuzz_store.py`."""
    draw = Random(3)
    history = log_corpus.history()
    others = [*history.frames, history.snapshot]
    outcomes = set()
    for _ in range(150):
        nth = draw.randrange(len(history.frames))
        if target == "notes":
            outcome = log_corpus.open_notes(
                nth, log_corpus.mutated(history.frames[nth], draw, others)
            )
        else:
            outcome = log_corpus.open_snapshot(log_corpus.mutated(history.snapshot, draw, others))
        outcomes.add(outcome.partition(":")[0])
    assert outcomes == {"opened", "refused"}

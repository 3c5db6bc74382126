"""Logs and snapshots with valid checksums and arbitrary content, and what a start must guarantee.

The start succeeds or ends with a `StoreError` for the operator, and with nothing else: no other
exception, no endless loop. Accepted content can be checked (`verify`), written as a snapshot and
read again.

`history()` is a short run of a broker with all kinds of records. `open_notes` and `open_snapshot`
replace a part of it with any bytes, with valid checksums.
The fuzzer (`fuzz/fuzz_store.py`) and `tests/store/embedded/test_log_corpus.py` share this file.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from random import Random
from types import FrameType

from google_crc32c import value as crc32c

from sluice.errors import StoreError
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.commit_loop import CommitListener
from sluice.queues.engine import Engine
from sluice.queues.log import Frame
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.recovery.incremental_snapshot import IncrementalSnapshot
from sluice.queues.recovery.loader import EngineLoader
from sluice.queues.service.queue_config import QueueConfig, read_config
from sluice.store.embedded.frame_format import encode_frame_header
from sluice.store.embedded.log_recovery import LogRecovery
from sluice.store.protocol import HEADER_BYTES
from sluice.store.snapshot_policy import SnapshotPolicy
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, put, settle, take
from tests.store.embedded.simulated_disk import Disk

SALT = 0
MOST_SECONDS = 10.0  # for one input: a thousand times the duration for a valid one
NOW = 1_800_000_000.0
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    255,
    1 << 16,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 47,
    1 << 48,
    1 << 62,
    -(1 << 63),
)


class TooSlow(BaseException):
    """Not an `Exception`, so that no code that reads a store takes it for damage."""


class History:
    """Frames of a log, and the content of a snapshot file that covers them."""

    def __init__(self, frames: list[bytes], snapshot: bytes) -> None:
        self.frames = frames
        self.snapshot = snapshot


@lru_cache(64)
def config_from(name: str, text: str) -> QueueConfig:
    return read_config(json.loads(text), name)


def rules_from(name: str, text: str) -> QueueRules:
    return config_from(name, text).rules()


def no_queue(name: str) -> tuple[QueueRules, str]:
    raise StoreError(f"queue {name!r} cannot be created here")


def new_engine() -> Engine:
    engine = Engine(no_queue, lambda: 0.5, codec=ZstdCodec())
    engine.now = engine.state.started_at = NOW
    return engine


def exercise(harness: BrokerHarness) -> None:
    """Use all features: queues of each kind, groups, failures, sessions, last values."""
    clerk = harness.connect_persistent("clerk")
    for config in (
        {"name": "jobs", "partitions": 2, "retry_policy": {"max_retries": 2}},
        {"name": "states", "type": "compacted", "partitions": 2},
        {"name": "kept", "limits": {"retention": "1h"}},
    ):
        put(clerk, "$admin/queue/create", json.dumps(config).encode())
    worker = harness.connect("worker")
    join(worker, "$queue/jobs", consumer_group="one")
    join(worker, "$queue/states", consumer_group="one")
    join(harness.connect("other"), "$queue/jobs", consumer_group="two")
    for nth in range(12):
        put(
            clerk,
            "$queue/jobs",
            b"job %d" % nth,
            options={"partition-key": f"k{nth % 3}", "message-id": f"m{nth}"},
        )
        put(
            clerk,
            "$queue/states",
            b"%d" % nth if nth % 4 else b"",
            options={"partition-key": f"k{nth % 3}"},
        )
    put(clerk, "$queue/jobs", b"later", options={"delay": "1h", "priority": "3"})
    put(clerk, "$queue/kept", b"x" * 600)
    for nth, message in enumerate(take(worker)):
        settle(worker, ("ack", "nack", "reject", "release", "ack")[nth % 5], message)
    harness.advance(20)
    for message in take(worker)[:3]:
        settle(worker, "nack", message)
    clerk.subscribe("mail/#", qos=2)
    clerk.drop()
    maker = harness.connect_persistent("maker")
    for nth in range(3):
        maker.publish(f"mail/{nth}", b"item %d" % nth, 2, retain=nth > 0)
    for nth in range(6):
        put(maker, f"$ECQ/w/car-{nth % 2}/key-{nth % 3}", b"value %d" % nth)
    put(maker, "$ECQ/w/car-1/key-1", b"")
    join(harness.connect("car-0"), "$ECQ/car-0/#", 1)
    engine = harness.engine
    engine.batches.write_batch_note("app", 3, 10)
    engine.lifecycle.seek_group(engine.queues["jobs"].groups["two"], [1, 1])
    engine.removal.purge_queue(engine.queues["kept"])
    put(maker, "$queue/gone", b"x")
    engine.lifecycle.delete_queue(engine.queues["gone"])
    engine.lifecycle.delete_group(engine.queues["jobs"].groups["two"])
    put(maker, "$queue/jobs", b"last")
    harness.advance(1)


@cache
def history() -> History:
    harness = BrokerHarness()
    frames: list[bytes] = []

    class FrameRecorder(CommitListener):
        def on_frame_committed(self, frame: Frame) -> None:
            frames.append(frame.data)

    harness.commit_loop.add_listener(FrameRecorder())
    exercise(harness)
    saving = IncrementalSnapshot(harness.engine, 1000)
    while not saving.write_step():
        pass
    stored = [frame for frame in frames if frame]
    place = struct.pack("<5q", len(stored), 1, len(log_of(stored)), 1, 1)
    return History(stored, place + b"".join(saving.chunks()))


def fix_checksums(body: bytes) -> tuple[bytes, int]:
    """Split `body` into records by their sizes, set their checksums, and count them."""
    out = bytearray()
    count = 0
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at + 4 : at + 8], "little")
        if size < HEADER_BYTES or at + size > len(body):
            size = len(body) - at
        record = bytearray(body[at : at + size].ljust(HEADER_BYTES, b"\0"))
        record[4:8] = len(record).to_bytes(4, "little")
        record[:4] = crc32c(bytes(record[4:])).to_bytes(4, "little")
        out += record
        count += 1
        at += size
    return bytes(out), count


def log_of(bodies: list[bytes], first: int = 1) -> bytes:
    parts: list[bytes] = []
    for lsn, body in enumerate(bodies, first):
        sound, count = fix_checksums(body)
        parts += [encode_frame_header(len(sound), count, 0, lsn, SALT), sound]
    return b"".join(parts)


@cache
def log_before(nth: int) -> bytes:
    return log_of(history().frames[:nth])


@contextmanager
def in_time() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def start(files: dict[str, bytes], again: bool) -> str:
    """Read a directory as a start does; with `again`, save accepted content and read it again.

    Return `opened`, or the kind of error.
    """
    disk = Disk(Random(1))
    for name, data in files.items():
        disk.put(f"/disk/{name}", data)
    with in_time():
        engine = new_engine()
        loader = EngineLoader(engine, rules_from)
        try:
            LogRecovery(
                disk, "/disk", SALT, 64 << 20, False, loader, SnapshotPolicy(64 << 20), True
            ).run()
            loader.finish()
        except StoreError as refusal:
            return f"refused: {type(refusal).__name__} {first_cause(refusal)}"
        verify(engine.queues)
        engine.broker_state.restore([])
        if again:
            save_and_load(engine)
    return f"opened: {len(engine.queues)} {len(engine.groups)} {len(engine.state.effects.warnings)}"


def first_cause(error: BaseException) -> str:
    """Return the class of the first exception in a chain, and the function that raised it."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{type(error).__name__} {trace.tb_frame.f_code.co_name if trace is not None else ''}"


def save_and_load(engine: Engine) -> None:
    saving = IncrementalSnapshot(engine, 1000)
    while not saving.write_step():
        pass
    try:
        loader = EngineLoader(new_engine(), rules_from)
        loader.load_snapshot(b"".join(saving.chunks()))
        loader.finish()
    except StoreError as refusal:
        raise AssertionError("accepted content cannot be read again") from refusal


def open_notes(nth: int, body: bytes) -> str:
    """Start with `body` as frame `nth` of the history; the next two are unchanged."""
    frames = history().frames
    nth %= len(frames)
    log = log_before(nth) + log_of([body, *frames[nth + 1 : nth + 3]], nth + 1)
    return start({"00000001.log": log}, crc32c(log) % 8 == 0)


def open_snapshot(body: bytes) -> str:
    """Start with a snapshot file that contains `body` after its checksum."""
    name = f"{len(history().frames):016x}.state"
    data = b"SLS1" + crc32c(body).to_bytes(4, "little") + body
    return start(
        {"00000001.log": log_before(len(history().frames)), name: data}, crc32c(data) % 8 == 0
    )


def mutated(data: bytes, draw: Random, others: list[bytes]) -> bytes:
    """Return `data` with a few mutations: absurd numbers, lengths, flipped bits, foreign parts."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        size = draw.choice((1, 4, 8, 8, 16))
        match draw.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(out):
                out[at] = draw.randrange(256)
            case 2:
                out[at : at + 8] = draw.choice(NUMBERS).to_bytes(8, "little", signed=True)
            case 3:
                out[at : at + 4] = draw.choice((0, 1, -1, 5, 1 << 16, -(1 << 31))).to_bytes(
                    4, "little", signed=True
                )
            case 4:
                del out[at : at + size]
            case 5:
                out[at:at] = out[at : at + size * 4]
            case _:
                other = draw.choice(others)
                start_at = draw.randrange(len(other) + 1)
                out[at:at] = other[start_at : start_at + draw.choice((8, 40, 120))]
    return bytes(out)

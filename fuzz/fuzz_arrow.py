"""Feed bytes to the size check of Arrow uploads: the size must be known before unpacking.

An input is the body of an upload. Each one must be accepted or refused with `InvalidBatch` or
`BatchTooLarge`, and Arrow must never allocate much more than the limit for it. Options: see
`harness.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

harness.find_sources()

import pyarrow as pa

from sluice.bulk.row_decoder import decode_messages, inspect_stage, list_queues
from sluice.bulk.staging import Stage
from sluice.errors import BatchTooLarge, InvalidBatch, SluiceError
from tests.bulk import test_ipc_sizes

LIMIT = 256 << 10
MAX_ROWS = 10_000
SLACK = 256 << 10  # for memory besides the columns
NUMBERS = [
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff" * 4,
    b"\x7f" + b"\xff" * 7,
    (1 << 40).to_bytes(8, "little"),
]
TOKENS = [
    *NUMBERS, *(bytes([one]) for one in (0, 1, 2, 3, 4, 5, 8, 0x7F, 0x80, 0xFF)), b"\x03\x00",
    b"\x04\x00", b"\xff\xff\xff\xff\x00\x00\x00\x00", b"ARROW:experimental_compression",
]  # fmt: skip


class Target:
    max_message_size = 1 << 20
    fault_of_payload = None
    has_priorities = True


def seeds() -> list[bytes]:
    found = []
    tables = [table.slice(0, 20) for table in test_ipc_sizes.TABLES]
    tables.append(pa.table({"value": [b"a", b"b"], "queue": ["x", "y"], "delay": ["1s", None]}))
    tables.append(pa.table({"value": pa.array([bytes(20_000)], pa.large_binary())}))
    tables.append(
        pa.table({"value": pa.array([b""] * (MAX_ROWS + 1)), "key": pa.nulls(MAX_ROWS + 1)})
    )
    for table in tables:
        for codec in (None, "zstd", "lz4"):
            for version in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
                for metadata in (None, test_ipc_sizes.KEY):
                    sink = pa.BufferOutputStream()
                    options = pa.ipc.IpcWriteOptions(metadata_version=version, compression=codec)
                    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
                        for batch in table.to_batches(
                            max_chunksize=8 if table.num_rows < MAX_ROWS else None
                        ):
                            writer.write_batch(batch, custom_metadata=metadata)
                    found.append(bytes(sink.getvalue()))
    return [one for one in found if len(one) < 20_000]


def change(pool: list[bytes], draw: Random) -> bytes:
    return harness.changed_bytes(draw.choice(pool), draw, TOKENS)


def check(data: bytes) -> str:
    stage = Stage("one", "app", 1, "jobs", None)
    stage.data = data
    default_pool = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default_pool)
    pa.set_memory_pool(pool)
    try:
        try:
            rows, size = inspect_stage(stage, LIMIT, MAX_ROWS)
            accepted = True
        except (InvalidBatch, BatchTooLarge) as refusal:
            outcome = f"{type(refusal).__name__} {refusal.what.partition('(')[0][:40]}"
            accepted = False
    finally:
        pa.set_memory_pool(default_pool)
    peak = pool.max_memory() or 0
    assert peak <= LIMIT + SLACK, f"{peak} bytes were allocated for {len(data)}"
    if not accepted:
        return outcome
    assert rows <= MAX_ROWS, f"{rows} rows in {len(data)} bytes were accepted"
    try:  # accepted batches can also be read
        names = list_queues([stage])
        decode_messages([stage], dict.fromkeys(names, Target()), 1.0)
    except SluiceError as refusal:
        return f"accepted, then {type(refusal).__name__}"
    return f"accepted, {min(rows, 3)} rows, {size.bit_length()} bits"


if __name__ == "__main__":
    harness.main("Fuzz the size check of Arrow uploads.", harness.Fuzzer(seeds, change, check))

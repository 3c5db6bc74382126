"""Read logs and snapshots with valid checksums and invalid contents: a start must end with a clear
error.

    python fuzz/fuzz_store.py notes --inputs 1000000 --seed 1   records of the log
    python fuzz/fuzz_store.py snapshots --inputs 1000000        the snapshot file

An input of `notes` is two bytes that choose a frame of the history, and the contents of that frame.
An input of `snapshots` is the contents of the file after its checksum. The properties that must
hold are in `tests/store/embedded/log_corpus.py`. Other options: `harness`.
"""

from __future__ import annotations

from random import Random
from re import sub

import harness

harness.find_sources()

from sluice.queues.compacted import owner_lookup, slab
from tests.store.embedded import log_corpus

POOL_BYTES = 65_536
# An engine is created for each input: smaller tables take less time.
if not harness.is_compiled():
    vars(slab).update(FIRST_CHUNK_BITS=4)
    vars(owner_lookup).update(SHARDS=1, SHARD_BITS=0)


def check_notes(data: bytes) -> str:
    if len(data) <= 2:
        return ""
    return without_numbers(log_corpus.open_notes(int.from_bytes(data[:2], "little"), data[2:]))


def check_snapshot(data: bytes) -> str:
    return without_numbers(log_corpus.open_snapshot(data))


def without_numbers(outcome: str) -> str:
    return sub(r"\d+", "n", outcome)  # numbers do not make a new outcome


def note_seeds() -> list[bytes]:
    return [
        nth.to_bytes(2, "little") + body for nth, body in enumerate(log_corpus.history().frames)
    ]


def change_notes(pool: list[bytes], draw: Random) -> bytes:
    data = draw.choice(pool)
    return data[:2] + mutated(data[2:], draw)


def change_snapshot(pool: list[bytes], draw: Random) -> bytes:
    return mutated(draw.choice(pool), draw)


def mutated(data: bytes, draw: Random) -> bytes:
    history = log_corpus.history()
    return log_corpus.mutated(data, draw, [*history.frames, history.snapshot])


if __name__ == "__main__":
    harness.main(
        "Fuzz the recovery of Sluice's store.",
        {
            "notes": harness.Fuzzer(note_seeds, change_notes, check_notes, POOL_BYTES),
            "snapshots": harness.Fuzzer(
                lambda: [log_corpus.history().snapshot],
                change_snapshot,
                check_snapshot,
                POOL_BYTES,
            ),
        },
    )

"""Feed bytes to the wire code: the result must be packets, "not yet" or a protocol violation.

An input is a byte for the version, a byte for where the stream is cut, and the stream. The
properties that must hold are in `tests/wire/corpus.py` (`check_input`), beside the seeds that both
this program and the tests start from. Options: `harness`.
"""

from __future__ import annotations

from random import Random
from re import sub

import harness

harness.find_sources()

from tests.wire import corpus


def check(data: bytes) -> str:
    if len(data) < 2:
        return ""
    stream = data[2:]
    cuts = [data[1], data[1] * 7 + 3, len(stream) - 1]
    # Numbers do not make a new outcome.
    return sub(r"(?<!0x)\b\d+", "n", corpus.check_input(stream, 5 if data[0] & 1 else 4, cuts))


def seeds() -> list[bytes]:
    return [bytes([version, 3]) + data for version, data in corpus.SEEDS]


def change(pool: list[bytes], draw: Random) -> bytes:
    data = draw.choice(pool)
    stream = corpus.mutated(data[2:], draw)
    if draw.random() < 0.1:
        stream += draw.choice(pool)[2:]
    version = data[0] if draw.random() < 0.95 else draw.randrange(256)
    return bytes([version, draw.randrange(256)]) + stream


if __name__ == "__main__":
    harness.main("Fuzz the wire code of Sluice.", harness.Fuzzer(seeds, change, check, 4096))

"""Feed bytes to the links between nodes: the result must be frames or a protocol error.

An input is a byte for its reader, a byte for where the stream is cut, and the stream. The
properties that must hold are in `tests/cluster/transport/link_corpus.py`, beside the seeds.
Options: `harness`.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random
from re import sub

import harness

harness.find_sources()

from tests.cluster.transport import link_corpus as corpus

INPUTS_PER_TARGET = 5000  # a target keeps what it accepts


class LinkCheck:
    """Checks inputs in an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._target: corpus.LinkFuzzTarget | None = None
        self._count = 0

    def check(self, data: bytes) -> str:
        if len(data) < 2:
            return ""
        # Names and numbers do not make a new outcome.
        return sub(r"'[^']*'|\d+", "n", self._loop.run_until_complete(self._check(data)))

    async def _check(self, data: bytes) -> str:
        if self._target is not None and self._count % INPUTS_PER_TARGET == 0:
            await self._target.close()
            self._target = None
        if self._target is None:
            self._target = await corpus.LinkFuzzTarget().open()
        self._count += 1
        return await self._target.check(data[0] % len(corpus.READERS), data[1], data[2:])


def seeds() -> list[bytes]:
    return [bytes([reader, 3]) + data for reader, data in corpus.ALL_SEEDS]


def change(pool: list[bytes], draw: Random) -> bytes:
    data = draw.choice(pool)
    reader = data[0] % len(corpus.READERS)
    stream = corpus.mutated(reader, data[2:], draw)
    if draw.random() < 0.1:
        stream += draw.choice([one for one in pool if one[0] % len(corpus.READERS) == reader])[2:]
    return bytes([reader, draw.randrange(256)]) + stream


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    harness.main(
        "Fuzz the links between the nodes of Sluice.",
        harness.Fuzzer(seeds, change, LinkCheck().check, 4096),
    )

"""The process that test_embedded_store kills: commits, settles and snapshots, and prints each step.

It runs as a separate program, so it does not import other tests.
"""

from __future__ import annotations

import queue
import random
import struct
import sys
from collections.abc import Callable, Sequence

from librt.strings import BytesWriter

from sluice.store.embedded import EmbeddedStore
from sluice.store.protocol import (
    HEADER_BYTES,
    MESSAGE,
    NOTE,
    ROW_BYTES,
    Record,
    read_row,
    write_record,
)


def body_for(seq: int) -> bytes:
    return seq.to_bytes(4, "big") * (seq * 37 % 500)


class Live:
    """A loader that collects the address of each unsettled message by seq."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self._known: set[int] = set()

    def load_snapshot(self, snapshot: bytes) -> None:
        self._known = {seq for (seq,) in struct.iter_unpack("<q", snapshot)}

    def load_rows(self, rows: bytes) -> None:
        found = [read_row(rows, at) for at in range(0, len(rows), ROW_BYTES)]
        self.addresses.update({row.seq: row.address for row in found if row.seq in self._known})

    def load_record(self, record: Record) -> None:
        if record.kind == NOTE:
            for (seq,) in struct.iter_unpack("<q", record.body):
                self.addresses.pop(seq, None)
        else:
            self.addresses[record.seq] = record.address


def frame_of(new: Sequence[int], settled: Sequence[int]) -> bytes:
    frame = BytesWriter()
    for seq in new:
        write_record(frame, MESSAGE, 0, 1, seq, 0, 0, 0, body_for(seq))
    write_record(frame, NOTE, 0, 1, 0, 0, 0, 0, struct.pack(f"<{len(settled)}q", *settled))
    return frame.getvalue()


def say(word: str, numbers: Sequence[int]) -> None:
    sys.stdout.write("".join(f"{word} {number}\n" for number in numbers))
    sys.stdout.flush()


def main(directory: str, seed: int, seq: int) -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    store = EmbeddedStore(
        directory, calls.put, lambda fault: sys.exit(str(fault)), segment_bytes=64 << 10
    )
    past = Live()
    store.open(past)
    live = past.addresses
    draw = random.Random(seed)
    done: list[int] = []
    while True:
        new = list(range(seq, seq + draw.choice((1, 2, 10))))
        seq = new[-1] + 1
        settled = draw.sample(sorted(live), min(len(live), draw.randrange(8)))
        say("settling", settled)
        at = store.next_frame_address()
        store.commit(frame_of(new, settled), len(new) + 1, True, lambda: done.append(1))
        while not done:
            calls.get()()
        done.clear()
        say("kept", new)
        say("settled", settled)
        for number in new:
            live[number] = at
            at += HEADER_BYTES + len(body_for(number))
        for number in settled:
            del live[number]
        if store.is_snapshot_due():
            homes = {address >> 32 for address in live.values()}
            free = [segment for segment in store.segment_sizes() if segment not in homes]
            store.snapshot([struct.pack(f"<{len(live)}q", *live)], free, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""FIFO of sequences on a native array."""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

# Fewer freed slots are not worth a copy.
MIN_FREED_TO_COMPACT: Final = 64


class SeqFifo:
    def __init__(self) -> None:
        self._seqs: vec[i64] = vec[i64]()
        self._front: i64 = 0

    def push(self, seq: i64) -> None:
        self._seqs = append(self._seqs, seq)

    def peek(self) -> i64:
        """Return the first sequence, or -1 if there is none."""
        return self._seqs[self._front] if self._front < len(self._seqs) else -1

    def count(self) -> i64:
        return i64(len(self._seqs)) - self._front

    def pop(self) -> None:
        """Remove the first sequence."""
        self._front += 1
        if self._front > MIN_FREED_TO_COMPACT and self._front * 2 > len(self._seqs):
            remaining = vec[i64]()
            at = self._front
            while at < len(self._seqs):
                remaining = append(remaining, self._seqs[at])
                at += 1
            self._seqs = remaining
            self._front = 0

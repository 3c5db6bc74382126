"""Sequences in a row: put at its end, taken from its front, and nobody else moves."""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

KEPT: Final = 64  # places of taken ones that are not worth a move


class Row:
    def __init__(self) -> None:
        self._places: vec[i64] = vec[i64]()
        self._front: i64 = 0

    def put(self, seq: i64) -> None:
        self._places = append(self._places, seq)

    def first(self) -> i64:
        """-1 when there is none."""
        return self._places[self._front] if self._front < len(self._places) else -1

    def take(self) -> None:
        """Take the first one away."""
        self._front += 1
        if self._front > KEPT and self._front * 2 > len(self._places):
            left = vec[i64]()
            at = self._front
            while at < len(self._places):
                left = append(left, self._places[at])
                at += 1
            self._places = left
            self._front = 0

"""Messages by partition and sequence: sequences that lie close together are asked for as one range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google_crc32c import value as crc32c

from sluice.store.protocol import HEADER_BYTES
from sluice.store.redis.keys import again, entry_id, sequence_of
from sluice.store.redis.connection import Command, Link

_GAP: Final = 4  # settled messages between two that are wanted: cheaper to read than another range
_RANGE: Final = 256  # messages asked for as one range, at most
_AT_ONCE: Final = 64  # ranges on their way together

Place = tuple[str, int]  # the base of a partition's keys, and a sequence


def fetch(link: Link, places: Sequence[Place]) -> dict[Place, bytes]:
    """The records that are there, whole and undamaged."""
    wanted: dict[str, list[int]] = {}
    for base, seq in places:
        wanted.setdefault(base, []).append(seq)
    ranges: list[tuple[str, int, int]] = []
    for base, seqs in wanted.items():
        ranges += [(base, first, last) for first, last in _ranges(sorted(set(seqs)))]
    found: dict[Place, bytes] = {}
    for start in range(0, len(ranges), _AT_ONCE):
        some = ranges[start : start + _AT_ONCE]
        commands: list[tuple[str, Command]] = [
            (base, ["XRANGE", base, entry_id(first), entry_id(last)]) for base, first, last in some
        ]
        for (base, _, _), entries in zip(some, link.ask(commands)):
            for entry, fields in entries:  # a few that nobody asked for are among them
                if is_whole(fields[1]):
                    found[base, sequence_of(entry)] = fields[1]
    missing = [place for place in dict.fromkeys(places) if place not in found]
    for start in range(0, len(missing), 1000):
        few = missing[start : start + 1000]
        answers = link.ask([(base, ["HGET", again(base), seq]) for base, seq in few])
        for place, data in zip(few, answers):
            if data is not None and is_whole(data):
                found[place] = data
    return found


def is_whole(record: bytes) -> bool:
    """Whether it is as it was written: nobody else may have put it there."""
    return len(record) >= HEADER_BYTES and int.from_bytes(record[:4], "little") == crc32c(record[4:])


def _ranges(seqs: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    first = last = seqs[0]
    for seq in seqs[1:]:
        if seq - last > _GAP or seq - first >= _RANGE:
            ranges.append((first, last))
            first = seq
        last = seq
    ranges.append((first, last))
    return ranges

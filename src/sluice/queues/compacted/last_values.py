"""Where the last message of each key of a shared compacted queue stands, by the key's mark.

One dict would be simpler. With ten million keys nobody is served for half a second while it grows, and for as long
again while a snapshot makes its copy. So it is cut into parts, by the mark, as soon as it is large: each grows by
itself, and a snapshot copies one at a time. A part that changes before its turn has come is copied first, so that the
snapshot still says how things stood when it was begun.
"""

from __future__ import annotations

from typing import Final

MOST_IN_ONE: Final = 65_536  # keys that need no parts
PARTS: Final = 64  # of more than those


class Latest:
    def __init__(self) -> None:
        self.parts: list[dict[int, int]] = [{}]
        self._saving: int = 0  # parts that there were when the snapshot was begun,
        self._saved: int = 0  # how many of them it has
        self._copies: dict[int, dict[int, int]] = {}  # and those that have changed since, as they were

    def __len__(self) -> int:
        return sum([len(part) for part in self.parts])

    def nth(self, mark: int) -> int:
        """Which part a key belongs to."""
        return mark & (len(self.parts) - 1)

    def get(self, mark: int) -> int:
        """The place of a key's last message; -1 when there is none."""
        return self.parts[self.nth(mark)].get(mark, -1)

    def put(self, mark: int, place: int) -> None:
        nth = self.nth(mark)
        if self._saving:
            self._keep(nth)
        part = self.parts[nth]
        part[mark] = place
        if len(self.parts) == 1 and len(part) > MOST_IN_ONE:
            self._cut()

    def replace(self, nth: int, part: dict[int, int]) -> None:
        """What is left of a part."""
        if self._saving:
            self._keep(nth)
        self.parts[nth] = part

    def _cut(self) -> None:
        whole = self.parts[0]
        self.parts = [{} for _ in range(PARTS)]
        for mark, place in whole.items():
            self.parts[mark & (PARTS - 1)][mark] = place

    # ---- in a snapshot

    def begin(self) -> None:
        """A snapshot is begun, which is to say how things stand now."""
        self._saving = len(self.parts)
        self._saved = 0
        self._copies = {}

    def _keep(self, nth: int) -> None:
        """A part is about to change."""
        nth &= self._saving - 1  # while there was one part, all that are cut from it are that one
        if nth >= self._saved and nth not in self._copies:
            self._copies[nth] = dict(self.parts[nth])

    def next_part(self) -> dict[int, int] | None:
        """The next part as it was, which is the caller's own; None when it has all."""
        if self._saved >= self._saving:
            self._saving = 0
            return None
        self._keep(self._saved)
        part = self._copies.pop(self._saved)
        self._saved += 1
        return part

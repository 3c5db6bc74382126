"""A key that is held for repair.

One of its messages became a dead letter, and later ones wait for it.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

# A held key counts as many active messages more than any `batch_size` allows.
HOLD: Final = 1 << 24


class HeldKey:
    """One key of one group. Messages are named by partition id and sequence."""

    def __init__(
        self, gid: i64, key_hash: i64, key: bytes, message_id: bytes, held_at: float
    ) -> None:
        self.gid: i64 = gid
        self.key_hash: i64 = key_hash
        self.key: bytes = key  # for display, as is the id of the dead-lettered one
        self.message_id: bytes = message_id
        self.held_at: float = held_at
        # Dead letters that are neither redriven nor discarded, and those that were redriven and are
        # not settled. The key is released when there are none.
        self.dead_letters: set[tuple[int, int]] = set()
        self.repaired: set[tuple[int, int]] = set()

    def is_over(self) -> bool:
        return not self.dead_letters and not self.repaired

    def release_at(self, timeout: float) -> float:
        """Return when the key is released in any case; 0.0: never."""
        return self.held_at + timeout if timeout > 0.0 else 0.0


NO_HELD_KEYS: Final[dict[int, HeldKey]] = {}  # shared, and never modified

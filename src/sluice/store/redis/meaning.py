"""What the store asks the side that knows what records are about.

A store keeps frames without understanding them; Redis, however, is looked into by people and their tools, and there a
queue should be what it is: groups that `XINFO` shows, pending deliveries, retries by their time. So whoever builds the
store may hand it a `Meaning`. Called in the loop's thread, when a frame is committed.
"""

from __future__ import annotations

from sluice.store.redis.places import Places
from sluice.store.redis.plan import Plan


class Meaning:
    """This one knows nothing: every frame is kept and given back, and no view is made."""

    def name_partition(self, pid: int, places: Places) -> None:
        """A partition is written to for the first time: say what it is called."""

    def fields_of(self, pid: int, record: bytes) -> list[tuple[str, bytes]]:
        """What a message has besides its record, for those who look into the stream."""
        return []

    def show(self, notes: list[bytes], plan: Plan, places: Places) -> list[int]:
        """Add to the plan what the notes of a frame change in the views; the partitions that are no more."""
        return []

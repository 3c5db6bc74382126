"""What became of each group's messages in the last five minutes, for verdicts that are steady.

At any one moment a healthy queue may be empty, or have nothing but a message that waits for its
retry. So the diagnosis asks how many messages were acknowledged and dead-lettered lately. The
samples are those of the charts: nothing on the path of a message knows of them.
"""

from __future__ import annotations

from typing import Final

from sluice.queues.service import GroupInspector

WINDOW_SECONDS: Final = 300.0
MOMENT_SECONDS: Final = 60.0
STEP_SECONDS: Final = 15.0
# A larger share of dead letters is a fault.
MAX_DEAD_SHARE: Final = 0.1

Mark = tuple[float, int, int]  # time, acknowledged, dead-lettered


class _GroupFlow:
    def __init__(self, first: Mark) -> None:
        self.marks = [first]  # oldest first
        self.acked_at = 0.0  # when the counters were first seen to have grown
        self.died_at = 0.0

    def add(self, now: float, acked: int, dead: int) -> None:
        _, last_acked, last_dead = self.marks[-1]
        if acked > last_acked:
            self.acked_at = now
        if dead > last_dead:
            self.died_at = now
        if now - self.marks[-1][0] >= STEP_SECONDS:
            self.marks.append((now, acked, dead))
        while len(self.marks) > 1 and (
            now - self.marks[1][0] >= WINDOW_SECONDS or self.marks[0][1:] == self.marks[1][1:]
        ):
            del self.marks[0]

    def since(self, time: float) -> Mark:
        """Return the last mark at or before `time`, or the first one."""
        found = self.marks[0]
        for mark in self.marks:
            if mark[0] <= time:
                found = mark
        return found


class RecentFlow:
    def __init__(self) -> None:
        self._groups: dict[int, _GroupFlow] = {}
        self._seen: dict[int, _GroupFlow] = {}
        self._has_samples = False

    def add(self, group: GroupInspector, now: float) -> int:
        """Add a sample of a group; return how many messages it has acknowledged."""
        acked, dead = group.acked(), group.dead()
        flow = self._groups.get(group.gid)
        if flow is None:
            # The counters of a group that is new since the last samples began with zero.
            flow = _GroupFlow((now, 0, 0) if self._has_samples else (now, acked, dead))
        flow.add(now, acked, dead)
        self._seen[group.gid] = flow
        return acked

    def end_samples(self) -> None:
        """Forget the groups that were not sampled this time: they are deleted."""
        self._groups, self._seen = self._seen, {}
        self._has_samples = True

    def _of_last(self, group: GroupInspector, now: float, seconds: float) -> tuple[int, int]:
        acked, dead = group.acked(), group.dead()
        flow = self._groups.get(group.gid)
        if flow is None:
            return (acked, dead) if self._has_samples else (0, 0)
        _, first_acked, first_dead = flow.since(now - seconds)
        return acked - first_acked, dead - first_dead

    def has_acked(self, group: GroupInspector, now: float) -> bool:
        """Return whether the group has acknowledged anything in the last minute."""
        return self._of_last(group, now, MOMENT_SECONDS)[0] > 0

    def loses_messages(self, group: GroupInspector, now: float) -> bool:
        """Return whether a large share of its messages is dead-lettered.

        If nothing was settled in the last minutes, the last settlement decides.
        """
        acked, dead = self._of_last(group, now, WINDOW_SECONDS)
        if acked or dead:
            return dead > MAX_DEAD_SHARE * (acked + dead)
        flow = self._groups.get(group.gid)
        return flow is None or flow.died_at >= flow.acked_at

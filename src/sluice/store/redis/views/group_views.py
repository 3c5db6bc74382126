"""What a frame changes for those who look into Redis: groups, pending deliveries, retries, counters, the queues' names.

Everything here is made from what the log says, and goes with the frame it belongs to. What is pending is known to this
object too, so that a settlement says no more than it must: a message that was delivered and settled before the next
look at deliveries never was in a pending list, and needs not be taken out of it. What nobody misses for half a second,
counters and the trimming of streams, is gathered and told with the next look: at a high rate that is most of the work.
"""

from __future__ import annotations

import json

from sluice.store.changes import (
    Change,
    GroupGone,
    GroupPlaced,
    Meaning,
    QueueGone,
    QueueMade,
    Removed,
    Retried,
    Settled,
    Standing,
)
from sluice.store.redis.keys import Keys, again, counters, entry_id, fence_of, retries, retry
from sluice.store.redis.connection import Word
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.write_plan import Plan, Steps

OWNER = "sluice"  # the consumer that has what is pending and with nobody

_Cell = tuple[int, str]  # a partition and a group


class Views:
    """`counts_reads`: Redis takes the number of entries read (7.0 and later), from which it tells a group's lag."""

    def __init__(
        self,
        keys: Keys,
        places: Places,
        meaning: Meaning,
        batch: int,
        counts_reads: bool,
        max_length: int = 0,
    ) -> None:
        self._keys = keys
        self._places = places
        self._meaning = meaning
        self._batch = batch
        self._counts_reads = counts_reads
        self._max_length = max_length
        self.pending: dict[_Cell, dict[int, str]] = {}  # who has what, as Redis knows it
        self.waiting: dict[_Cell, set[int]] = {}  # what waits for its retry, as Redis knows it
        self.is_sure = (
            False  # until it was compared with Redis after a start, what is pending there is not known
        )
        self._fresh: dict[_Cell, int] = {}
        self._groups: dict[int, set[str]] = {}  # by partition: the same as above
        self._consumed: dict[_Cell, int] = {}
        self._trimmed: dict[int, int] = {}
        self._untrimmed: dict[int, int] = {}  # the first message that lives, by partition
        self._uncounted: dict[int, dict[str, int]] = {}

    # ---- frames

    def show(self, notes: list[bytes], plan: Plan) -> list[int]:
        """Add to the plan of a frame what its notes change; the partitions that are no more."""
        gone: list[int] = []
        touched: set[int] = set()
        for change in self._meaning.changes_of(notes):
            if isinstance(change, Settled):
                self._settled(change, plan)
                touched.add(change.pid)
            elif isinstance(change, Retried):
                self._retried(change, plan)
            elif isinstance(change, QueueGone):
                gone += change.pids
                self._queue_gone(change, plan)
            else:
                touched.update(self._other(change, plan))
        for pid in gone:
            self._untrimmed.pop(pid, None)
        for pid in touched.difference(gone):
            # As of this frame: what is settled in the next one must be there until that is kept.
            self._untrimmed[pid] = self._meaning.first_live(pid)
            if self._max_length:  # a promise, not a habit
                self.trim(pid, plan)
        return gone

    def count(self, pid: int, what: str, by: int) -> None:
        counted = self._uncounted.get(pid)
        if counted is None:
            counted = self._uncounted[pid] = {}
        counted[what] = counted.get(what, 0) + by

    def tell_gathered(self, plan: Plan) -> None:
        """What frames have left for the next look."""
        for pid, counted in self._uncounted.items():
            base = self._base(pid)
            steps = plan.view(base)
            for what, by in counted.items():
                steps.command("HINCRBY", counters(base), what, by)
        self._uncounted.clear()
        for pid, first in self._untrimmed.items():
            if first > self._trimmed.get(pid, 0):
                self._trimmed[pid] = first
                base = self._base(pid)
                plan.view(base).command("XTRIM", base, "MINID", f"{first}-0")
        self._untrimmed.clear()

    def name(self, pid: int) -> None:
        if not self._places.knows(pid):
            self._places.name(pid, self._meaning.place_of(pid))

    def _base(self, pid: int) -> str:
        self.name(pid)
        return self._places.base(pid)

    def _settled(self, change: Settled, plan: Plan) -> None:
        cell = (change.pid, change.group)
        pending = self.pending.get(cell)
        waiting = self.waiting.get(cell)
        count = 0
        acked: list[Word] = []
        ended: list[Word] = []
        for first, many in change.ranges:
            count += many
            if not self.is_sure or pending or waiting:
                for seq in range(first, first + many):
                    was_waiting = waiting is not None and seq in waiting
                    if not self.is_sure or was_waiting or (pending is not None and seq in pending):
                        acked.append(entry_id(seq))
                        if pending is not None:
                            pending.pop(seq, None)
                    if waiting is not None and was_waiting:
                        waiting.discard(seq)
                        ended.append(seq)
        self.count(change.pid, change.how, count)
        if acked:
            base = self._base(change.pid)
            steps = plan.view(base)
            steps.many("XACK", base, [change.group], acked)
            self._end_waiting(steps, base, change.group, ended)

    def _end_waiting(self, steps: Steps, base: str, group: str, seqs: list[Word]) -> None:
        steps.many("ZREM", retry(base, group), [], seqs)
        steps.many("HDEL", retries(base, group), [], seqs)

    def _retried(self, change: Retried, plan: Plan) -> None:
        """Acknowledge and schedule: one step, like everything in a frame."""
        cell = (change.pid, change.group)
        base = self._base(change.pid)
        steps = plan.view(base)
        self.pending.get(cell, {}).pop(change.seq, None)
        steps.command("XACK", base, change.group, entry_id(change.seq))
        self.schedule(steps, base, change)
        self.count(change.pid, "retried", 1)

    def schedule(self, steps: Steps, base: str, change: Retried) -> None:
        self.waiting.setdefault((change.pid, change.group), set()).add(change.seq)
        story = json.dumps(
            {"failures": change.failures, "due": change.due, "description": change.description}
        )
        steps.command("ZADD", retry(base, change.group), round(change.due * 1000), change.seq)
        steps.command("HSET", retries(base, change.group), change.seq, story)

    def _queue_gone(self, change: QueueGone, plan: Plan) -> None:
        plan.log.command("HDEL", self._keys.queues, change.queue)
        for pid in change.pids:
            base = self._base(pid)
            steps = plan.view(base)
            for group in list(self._groups.get(pid, ())):
                self._forget((pid, group), base, steps)
                self._consumed.pop((pid, group), None)
            self._groups.pop(pid, None)
            # The fence stays for a while: a late copy of an earlier write must not bring the stream back.
            for key in (base, again(base), counters(base)):
                steps.command("UNLINK", key)
            steps.command("EXPIRE", fence_of(base), 86400)
            self._trimmed.pop(pid, None)
            self._uncounted.pop(pid, None)

    def _forget(self, cell: _Cell, base: str, steps: Steps) -> None:
        self.pending.pop(cell, None)
        self.waiting.pop(cell, None)
        self._fresh.pop(cell, None)
        self._groups.get(cell[0], set()).discard(cell[1])
        steps.command("UNLINK", retry(base, cell[1]))
        steps.command("UNLINK", retries(base, cell[1]))

    def _other(self, change: Change, plan: Plan) -> list[int]:
        """The partitions in which messages may be gone by it."""
        if isinstance(change, QueueMade):
            for pid in change.pids:
                self.name(pid)
            told = {"partitions": len(change.pids), "config": json.loads(change.config or "{}")}
            plan.log.command("HSET", self._keys.queues, change.queue, json.dumps(told))
            return change.pids
        if isinstance(change, GroupPlaced):
            for pid, floor in change.floors:
                base = self._base(pid)
                steps = plan.view(base)
                steps.try_command(base, "XGROUP", "DESTROY", base, change.group)
                self._forget((pid, change.group), base, steps)
                self.make_group(steps, base, pid, change.group, floor)
            return [pid for pid, _ in change.floors]
        if isinstance(change, GroupGone):
            for pid in change.pids:
                base = self._base(pid)
                steps = plan.view(base)
                steps.try_command(base, "XGROUP", "DESTROY", base, change.group)
                self._forget((pid, change.group), base, steps)
                self._consumed.pop((pid, change.group), None)
            return change.pids
        if isinstance(change, Removed):
            self.removed(change, plan)
            return [change.pid]
        return []

    def removed(self, change: Removed, plan: Plan) -> None:
        base = self._base(change.pid)
        steps = plan.view(base)
        seqs: list[int] = []
        for first, many in change.ranges:
            seqs += range(first, first + many)
        ids: list[Word] = [entry_id(seq) for seq in seqs]
        steps.many("XDEL", base, [], ids)
        for group in self._groups.get(change.pid, ()):
            cell = (change.pid, group)
            pending = self.pending.get(cell, {})
            waiting = self.waiting.get(cell, set())
            if not self.is_sure:
                steps.many("XACK", base, [group], ids)
            elif pending or waiting:  # one that waits may have become due, and pending, a moment ago
                held: list[Word] = [entry_id(seq) for seq in seqs if seq in pending or seq in waiting]
                steps.many("XACK", base, [group], held)
            for seq in seqs:
                pending.pop(seq, None)
            if waiting:
                self._end_waiting(steps, base, group, [seq for seq in seqs if seq in waiting])
                waiting.difference_update(seqs)

    def make_group(self, steps: Steps, base: str, pid: int, group: str, fresh: int) -> None:
        self._fresh[pid, group] = fresh
        self._groups.setdefault(pid, set()).add(group)
        words: list[Word] = ["XGROUP", "CREATE", base, group, _before(fresh), "MKSTREAM"]
        if self._counts_reads:
            words += ["ENTRIESREAD", fresh]
        steps.try_command(base, *words)

    def trim(self, pid: int, plan: Plan) -> None:
        """Let go of everything below the first message that lives, at a commit or before the first one. Where a length
        is set and reached, Redis is told the length: the engine has let go of what is beyond it, and what a stranger
        put in front goes too."""
        first = self._meaning.first_live(pid)
        if first > self._trimmed.get(pid, 0):
            self._trimmed[pid] = first
            base = self._base(pid)
            length = self._meaning.length(pid) if self._max_length else 0
            if length and length >= self._max_length:
                plan.view(base).command("XTRIM", base, "MAXLEN", length)
            else:
                plan.view(base).command("XTRIM", base, "MINID", f"{first}-0")

    # ---- deliveries

    def follow(self, standing: Standing, plan: Plan) -> None:
        """Make what Redis knows of a group's deliveries what it is now. One whose frame is still to come has none."""
        cell = (standing.pid, standing.group)
        if cell not in self._fresh:
            return
        pending = self.pending.setdefault(cell, {})
        waiting = self.waiting.get(cell)
        by_holder: dict[tuple[str, int], list[Word]] = {}
        ended: list[Word] = []
        for seq, holder in standing.held.items():
            name = holder or "-"
            if pending.get(seq) != name:
                pending[seq] = name
                by_holder.setdefault((name, standing.attempts.get(seq, 1)), []).append(entry_id(seq))
                if waiting is not None and seq in waiting:
                    waiting.discard(seq)
                    ended.append(seq)
        base = self._base(standing.pid)
        moved = self._fresh.get(cell) != standing.fresh
        seen = self._consumed.get(cell, 0)
        consumed = standing.delivered - seen if standing.delivered >= seen else standing.delivered
        if consumed:
            self._consumed[cell] = standing.delivered
            self.count(standing.pid, "consumed", consumed)
        if not by_holder and not moved:
            return
        steps = plan.view(base)
        if moved:
            self._fresh[cell] = standing.fresh
            words: list[Word] = ["XGROUP", "SETID", base, standing.group, _before(standing.fresh)]
            if self._counts_reads:
                words += ["ENTRIESREAD", standing.fresh]
            steps.try_command(base, *words)
        for (holder, attempt), ids in by_holder.items():
            self.claim(steps, base, standing.group, holder, ids, attempt)
        self._end_waiting(steps, base, standing.group, ended)

    def claim(
        self, steps: Steps, base: str, group: str, holder: str, ids: list[Word], attempt: int = 0
    ) -> None:
        """Without an attempt, Redis keeps the count it has."""
        count: list[Word] = ["RETRYCOUNT", attempt] if attempt else []
        for start in range(0, len(ids), self._batch):
            some = ids[start : start + self._batch]
            steps.try_command(base, "XCLAIM", base, group, holder, 0, *some, *count, "FORCE", "JUSTID")

    def refresh(self, plan: Plan) -> None:
        """Say again what is with consumers that live, so that a look for idle deliveries does not find it."""
        for (pid, group), pending in self.pending.items():
            by_holder: dict[str, list[Word]] = {}
            for seq, holder in pending.items():
                if holder != OWNER:
                    by_holder.setdefault(holder, []).append(entry_id(seq))
            for holder, ids in by_holder.items():
                base = self._base(pid)
                self.claim(plan.view(base), base, group, holder, ids)

    def moved(self, cell: _Cell, seqs: list[int]) -> None:
        """Retries that Redis has made pending again, unless they were delivered or settled meanwhile."""
        waiting = self.waiting.get(cell, set())
        pending = self.pending.setdefault(cell, {})
        for seq in seqs:
            if seq in waiting:
                waiting.discard(seq)
                pending[seq] = OWNER

    def found(self, cell: _Cell, seqs: list[int], plan: Plan) -> None:
        """Pending deliveries that were with nobody we know: ours to deliver again, or done long ago."""
        pending = self.pending.setdefault(cell, {})
        done: list[Word] = []
        for seq in seqs:
            if self._meaning.needs(cell[1], cell[0], seq):
                pending.setdefault(seq, OWNER)
            else:
                done.append(entry_id(seq))
        base = self._base(cell[0])
        if done:
            plan.view(base).many("XACK", base, [cell[1]], done)


def _before(seq: int) -> str:
    """The last id that lies before a sequence."""
    return entry_id(seq - 1) if seq > 0 else "0"

"""What is done in Redis from time to time, besides frames: pending lists follow deliveries, due retries are moved, and
deliveries that nobody has any more are taken back.

All of it goes through the writer, behind the frames that were committed before and ahead of those that follow. After a
start the views are compared with the queues once: what was leased by the last owner is with nobody now, and views that
a crash cut off in a Cluster are made whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sluice.store.changes import Meaning, Removed, Standing
from sluice.store.redis.keys import Keys, fence_of, retries, retry, sequence_of
from sluice.store.redis.connection import Link, call
from sluice.store.redis.options import Options
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.write_plan import Plan, Scribe
from sluice.store.redis.scripts import CLAIM, MOVE, PART_UNIT
from sluice.store.redis.views.group_views import OWNER, Views
from sluice.store.redis.log.writer import AskJob, Job, WriteJob

_Cell = tuple[int, str]
_AT_ONCE = 500  # partitions whose views one script changes


class Showing:
    """Lives in the loop's thread; `put` hands a job to the writer."""

    def __init__(
        self,
        keys: Keys,
        places: Places,
        meaning: Meaning,
        views: Views,
        scribe: Scribe,
        options: Options,
        in_parts: bool,
        put: Callable[[Job], None],
    ) -> None:
        self._keys = keys
        self._places = places
        self._meaning = meaning
        self._views = views
        self._scribe = scribe
        self._options = options
        self._in_parts = in_parts  # each partition has a fence of its own
        self._unit = PART_UNIT if in_parts else 1
        self._put = put
        self._moves_under_way = 0
        self._looks_under_way = 0  # a Redis that is behind is not given more: the next look sees all the same
        self._next_move = 0.0
        self._next_scan = 0.0

    def begin(self) -> None:
        """The queues are back. Before the first frame."""
        plan = Plan()
        cells: list[_Cell] = []
        for standing in self._meaning.groups(True):
            self._restore(standing, plan)
            cells.append((standing.pid, standing.group))
            if len(cells) % _AT_ONCE == 0:
                self._write(plan)
                plan = Plan()
        self._write(plan)
        ask = partial(self._take_back, cells, 0)
        self._put(AskJob(ask, self._compared))
        compacted = self._meaning.compacted() if self._in_parts else {}
        for pid in compacted:
            self._views.name(pid)
        if compacted:  # on one Redis a message and the one that it replaced changed places in one step
            self._put(AskJob(partial(self._look_through, compacted), self._remove_gone))

    def _restore(self, standing: Standing, plan: Plan) -> None:
        views = self._views
        views.name(standing.pid)
        base = self._places.base(standing.pid)
        steps = plan.view(base)
        views.make_group(steps, base, standing.pid, standing.group, standing.fresh)
        views.trim(standing.pid, plan)
        steps.command("UNLINK", retry(base, standing.group))
        steps.command("UNLINK", retries(base, standing.group))
        for waiting in standing.waiting.values():
            views.schedule(steps, base, waiting)

    def _compared(self, found: dict[_Cell, list[int]]) -> None:
        self._views.is_sure = True
        self._found(found)

    def _claimed(self, found: dict[_Cell, list[int]]) -> None:
        self._looks_under_way -= 1
        self._found(found)

    def _remove_gone(self, found: dict[int, list[int]]) -> None:
        plan = Plan()
        for pid, seqs in found.items():
            self._views.removed(Removed(pid, [(seq, 1) for seq in seqs]), plan)
        self._write(plan)

    def _found(self, found: dict[_Cell, list[int]]) -> None:
        plan = Plan()
        for cell, seqs in found.items():
            self._views.found(cell, seqs, plan)
        self._write(plan)

    def look(self, now: float) -> None:
        """Called every `poll_seconds`; `now` is seconds since 1970."""
        if not self._views.is_sure or self._looks_under_way:
            return
        plan = Plan()
        for standing in self._meaning.groups(False):
            self._views.follow(standing, plan)
        self._views.tell_gathered(plan)
        if now >= self._next_scan:
            self._views.refresh(plan)
        self._write(plan)
        if now >= self._next_scan:
            self._next_scan = now + self._options.pending_scan_seconds
            cells = list(self._views.pending)
            ask = partial(self._take_back, cells, int(self._options.claim_idle_seconds * 1000))
            self._looks_under_way += 1
            self._put(AskJob(ask, self._claimed))
        if now >= self._next_move and self._moves_under_way == 0:
            self._next_move = now + self._options.mover_seconds
            self._move(now)

    def _move(self, now: float) -> None:
        for cell, seqs in self._views.waiting.items():
            if seqs:
                self._moves_under_way += 1
                self._put(AskJob(partial(self._ask_move, cell, int(now * 1000)), partial(self._moved, cell)))

    def _moved(self, cell: _Cell, seqs: list[int]) -> None:
        self._moves_under_way -= 1
        self._views.moved(cell, seqs)

    def _write(self, plan: Plan) -> None:
        """In portions: Redis does nothing else while it runs a script, and no view depends on another."""
        bases = list(plan.views)
        for start in range(0, len(bases), _AT_ONCE):
            portion = Plan()
            portion.views = {base: plan.views[base] for base in bases[start : start + _AT_ONCE]}
            self._looks_under_way += 1
            self._put(WriteJob(self._scribe, partial(_given, portion), self._written))

    def _written(self) -> None:
        self._looks_under_way -= 1

    # -- in the writer's thread

    def _fence(self, base: str) -> str:
        return fence_of(base) if self._in_parts else self._keys.fence

    def _ask_move(self, cell: _Cell, now: int, link: Link, token: int) -> list[int]:
        pid, group = cell
        base = self._places.base(pid)
        keys = [self._fence(base), base, retry(base, group), retries(base, group)]
        words = (token, self._unit, now, self._options.mover_batch, group, OWNER)
        answer = link.ask([(base, call(MOVE, keys, *words))])[0]
        return [int(seq) for seq in answer]

    def _look_through(self, compacted: dict[int, list[int]], link: Link, token: int) -> dict[int, list[int]]:
        """What is in the streams of compacted queues and should not be: views that a crash cut off. Compared with what
        they held when it was asked for: what is replaced since then goes with its own frame."""
        found: dict[int, list[int]] = {}
        bases = [self._places.base(pid) for pid in compacted]
        lengths = link.ask([(base, ["XLEN", base]) for base in bases])
        for (pid, held), base, length in zip(compacted.items(), bases, lengths):
            start = "-" if int(length) > len(held) else ""
            living = set(held) if start else set()
            while start:
                entries = link.ask([(base, ["XRANGE", base, start, "+", "COUNT", _AT_ONCE])])[0]
                seqs = [sequence_of(entry) for entry, _ in entries]
                found.setdefault(pid, []).extend(seq for seq in seqs if seq not in living)
                start = f"{seqs[-1] + 1}-0" if seqs else ""
        return found

    def _take_back(self, cells: list[_Cell], idle: int, link: Link, token: int) -> dict[_Cell, list[int]]:
        """Claim what has been pending for so long; by group, portion by portion."""
        found: dict[_Cell, list[int]] = {}
        todo: list[tuple[_Cell, Any]] = [(cell, b"0-0") for cell in cells]
        while todo:
            some, todo = todo[: self._options.claim_batch], todo[self._options.claim_batch :]
            commands = []
            for (pid, group), start in some:
                base = self._places.base(pid)
                words = (token, self._unit, group, OWNER, idle, start, self._options.claim_batch)
                commands.append((base, call(CLAIM, [self._fence(base), base], *words)))
            for (cell, _), answer in zip(some, link.ask(commands)):
                found.setdefault(cell, []).extend(sequence_of(entry) for entry in answer[1])
                if answer[0] != b"0-0":
                    todo.append((cell, answer[0]))
        return found


def _given(plan: Plan) -> Plan:
    """It is made already."""
    return plan

"""Searches for retained messages in the cells of this node, in slices.

A filter with wildcards may visit all topics of a cell, and a client may use many such filters. So
all searches of a node share a time slice of each turn of the event loop, round-robin. A search
reads the current tree at each step: its lookup skips topics that were published to since it began
(`RetainedLookup.published_topics`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from mypy_extensions import mypyc_attr

from sluice.broker.sessions import STEPS_PER_SLICE, Match, RetainedWalk
from sluice.broker.turn import MAX_SLICE_SECONDS
from sluice.clock import steady_time
from sluice.cluster.plain.local_cell import LocalCell
from sluice.wire.packets import Publish
from sluice.wire.topics import has_wildcard

NO_UPPER_BOUND: Final = (1 << 62) - 1  # no stored message is too new


@mypyc_attr(allow_interpreted_subclasses=True)
class SearchListener:
    """Receives the results of a search."""

    def is_wanted(self) -> bool:
        """Return whether the messages are still wanted."""
        return True

    def on_found(self, messages: list[Publish]) -> None:
        """Receive some of the messages."""

    def on_done(self, cell: int, has_moved: bool) -> None:
        """Handle the end of the search.

        `has_moved`: the cell is no longer here, and its next owner must be asked.
        """


class Search:
    """One search in one cell."""

    def __init__(self, cell: LocalCell, walk: RetainedWalk, listener: SearchListener) -> None:
        self.cell = cell
        self.walk = walk
        self.listener = listener


class RetainedSearches:
    """All searches of a node; together they use at most `slice_seconds` of a turn."""

    def __init__(self, slice_seconds: float = MAX_SLICE_SECONDS) -> None:
        self._slice_seconds = slice_seconds
        self._waiting: deque[Search] = deque()
        self._slice_ends = 0.0  # of the current turn; 0: no slice has begun

    def start(self, cell: LocalCell, topic_filter: bytes, listener: SearchListener) -> None:
        """Search a cell. The listener is called at once if this turn has time left."""
        retained = cell.broker.router.retained
        if not has_wildcard(topic_filter):
            message = retained.find(topic_filter, cell.broker.turn.begin())
            listener.on_found([message] if message is not None else [])
            listener.on_done(cell.number, False)
            return
        walk = retained.start_walk()
        walk.add(topic_filter, NO_UPPER_BOUND)
        self._waiting.append(Search(cell, walk, listener))
        self._run()

    def _run(self) -> None:
        """Use the rest of this turn's slice, and take at least one step of a new slice."""
        if not self._slice_ends:
            self._slice_ends = steady_time() + self._slice_seconds
            asyncio.get_running_loop().call_soon(self._next_turn)
            self._step_next()
        while self._waiting and steady_time() < self._slice_ends:
            self._step_next()

    def _step_next(self) -> None:
        search = self._waiting.popleft()
        if not self._step(search):
            self._waiting.append(search)

    def _next_turn(self) -> None:
        self._slice_ends = 0.0
        if self._waiting:
            self._run()

    def _step(self, search: Search) -> bool:
        """Do a part of one search; return whether it is over."""
        cell, listener = search.cell, search.listener
        if cell.is_closed or not listener.is_wanted():
            listener.on_done(cell.number, cell.is_closed)
            return True
        matches: list[Match] = []
        is_done = search.walk.advance(STEPS_PER_SLICE, matches)
        if matches:
            now = cell.broker.turn.begin()
            retained = cell.broker.router.retained
            current = [retained.get_current(match, now) for match in matches]
            listener.on_found([message for message in current if message is not None])
        if is_done:
            listener.on_done(cell.number, False)
        return is_done

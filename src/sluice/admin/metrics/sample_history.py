"""Five minutes of samples for charts: per node and per queue, in bounded memory.

A task of the admin loop copies the counters every five seconds, so nothing on the path of a message
knows of it. Rates are differences of counters over the time between two samples, by the broker's
clock. A queue gets a ring when something happens in it, and loses the ring after five quiet minutes
without messages; beyond `MAX_RINGS` queues the others have no history.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterator
from math import isnan, nan
from typing import Final

from sluice.admin.metrics.counter_sampling import CounterSample
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 5.0
TIMEOUT_SECONDS: Final = 30.0  # of one sample
SAMPLES: Final = 60  # five minutes
MAX_RINGS: Final = 1000  # about 1 KB each
MAX_QUEUES: Final = 10_000  # to take: counted for the sums of the node

QUEUE_FIELDS: Final = ("total_messages", "enqueue_rate", "dequeue_rate", "ack_rate")
NODE_FIELDS: Final = (*QUEUE_FIELDS, "publishes_in", "publishes_out")


class Ring:
    """The last values of some fields, one row of them per sample."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = fields
        self._values = array("f", [nan]) * (len(fields) * SAMPLES)
        self.moved_at = 0  # number of the last sample in which something happened

    def put(self, nth: int, row: tuple[float, ...]) -> None:
        start = (nth % SAMPLES) * len(self._fields)
        self._values[start : start + len(row)] = array("f", row)

    def columns(self, order: list[int]) -> Iterator[tuple[str, list[float | None]]]:
        width = len(self._fields)
        for column, name in enumerate(self._fields):
            values = (self._values[nth * width + column] for nth in order)
            yield name, [None if isnan(value) else round(value, 3) for value in values]


class SampleHistory:
    """The rings of the node and its queues; `take` takes one sample."""

    def __init__(self, take: Callable[[], Awaitable[CounterSample]]) -> None:
        self._take = take
        self._task: asyncio.Task[None] | None = None
        self._times = array("d", [0.0]) * SAMPLES
        self._count = 0
        self._whole = Ring(NODE_FIELDS)
        self._rings: dict[str, Ring] = {}
        self._last: CounterSample | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    self.add(await self._take())
            except (SluiceError, TimeoutError) as fault:  # such as a broker that is too busy
                log.debug("no sample for the charts", extra={"fault": str(fault)})
            await asyncio.sleep(INTERVAL_SECONDS)

    def add(self, sample: CounterSample) -> None:
        """Add a sample; the first one only has depths."""
        before, self._last = self._last, sample
        nth = self._count
        self._count += 1
        self._times[nth % SAMPLES] = sample.at
        seconds = 0.0 if before is None else sample.at - before.at
        sums = [0.0, 0.0, 0.0, 0.0]
        for name, now in sample.queues.items():
            earlier = None if before is None else before.queues.get(name)
            rates = _rates(earlier[1:] if earlier else None, now[1:], seconds)
            row = (float(now[0]), *rates)
            ring = self._rings.get(name)
            if ring is None and (now[0] or any(rate > 0 for rate in rates)):
                if len(self._rings) < MAX_RINGS:
                    ring = self._rings[name] = Ring(QUEUE_FIELDS)
            if ring is not None:
                ring.put(nth, row)
                if now[0] or any(rate > 0 for rate in rates):
                    ring.moved_at = nth
            for column, value in enumerate(row):
                if not isnan(value):
                    sums[column] += value
        for name, ring in list(self._rings.items()):
            if name not in sample.queues or nth - ring.moved_at >= SAMPLES:
                del self._rings[name]
        clients = _rates(
            None if before is None else (before.publishes_received, before.publishes_sent),
            (sample.publishes_received, sample.publishes_sent),
            seconds,
        )
        if before is None:
            sums[1:] = [nan, nan, nan]
        self._whole.put(nth, (*sums, *clients))

    def _order(self) -> list[int]:
        """Return the places of the samples in the rings, oldest first."""
        first = max(0, self._count - SAMPLES)
        return [nth % SAMPLES for nth in range(first, self._count)]

    def of_node(self) -> dict[str, list[float | None]]:
        return self._columns(self._whole)

    def of_queue(self, name: str) -> dict[str, list[float | None]]:
        """Return the samples of a queue; without values if it has none."""
        ring = self._rings.get(name)
        return self._columns(ring if ring is not None else Ring(QUEUE_FIELDS))

    def _columns(self, ring: Ring) -> dict[str, list[float | None]]:
        order = self._order()
        times: list[float | None] = [round(self._times[nth], 3) for nth in order]
        return {"times": times, **dict(ring.columns(order))}


def _rates(
    before: tuple[int, ...] | None, now: tuple[int, ...], seconds: float
) -> tuple[float, ...]:
    """Return the differences per second; a counter that fell belongs to another queue or group."""
    if before is None or seconds <= 0.0:
        return (nan,) * len(now)
    return tuple(
        (new - old) / seconds if new >= old else nan for old, new in zip(before, now, strict=True)
    )

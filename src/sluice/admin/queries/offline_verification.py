"""The books of a store whose broker does not run: opened to read only, counted one by one, and
closed again.

The store is read as a start would read it, and no file of it is changed: a torn end of the log
stays for the next start
to cut off and report, and what is missing (an index, the `layout` file) stays missing.
"""

from __future__ import annotations

import json
import queue as threads
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from sluice.admin.broker_facade import slices
from sluice.admin.queries.message_lookup import name_of, whole
from sluice.clock import steady_time
from sluice.errors import StoreDamaged, StoreError
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.config import read_config
from sluice.queues.engine import Engine
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue_rules import Rules
from sluice.queues.commit_loop import Runner

PATIENCE_SECONDS: Final = 60.0  # what a disk may take for one read


class OpenStore(Protocol):
    """A kind of store that is kept in a directory. Whoever puts the rooms together knows which: `EmbeddedStore`."""

    def __call__(
        self,
        directory: str,
        call_soon: Callable[..., object],
        on_failure: Callable[[Exception], None],
        /,
        *,
        read_only: bool,
    ) -> Any: ...


@dataclass
class StoreReport:
    directory: str
    queues: int = 0
    messages: int = 0
    segments: int = 0
    torn_bytes: int = 0  # behind the last whole frame: the next start cuts them off
    notes: list[str] = field(default_factory=list)  # what recovery found worth telling
    faults: list[str] = field(
        default_factory=list
    )  # what does not add up, or cannot be read; empty: all is well


def verify_store(directory: str | Path, open_store: OpenStore, bodies: bool = True) -> StoreReport:
    """Count everything that a stopped broker's store holds; with `bodies`, read every message too. Refuses a directory
    that a broker has open, and one that is no store."""
    folder = Path(directory)
    if not folder.is_dir():
        raise StoreError(
            f"there is no store in {folder}", "Give the directory that sluice serve --data was given"
        )
    report = StoreReport(str(folder))
    answers: threads.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = threads.SimpleQueue()
    failures: list[Exception] = []
    store = open_store(
        str(folder), lambda call, *args: answers.put((call, args)), failures.append, read_only=True
    )
    engine = Engine(_no_templates, lambda: 0.0, codec=ZstdCodec())
    runner = Runner(engine, store, steady_time, _never, _nothing, _report)
    try:
        recovery = runner.open(lambda name, text: read_config(json.loads(text), name).rules())
    except StoreDamaged as damage:
        report.faults.append(str(damage))
        return report
    try:
        report.queues = len(engine.queues)
        report.segments = recovery.segments
        report.torn_bytes = recovery.torn_bytes
        report.notes = list(recovery.notes)
        report.messages = sum(int(one.live) for one in engine.partitions.values())
        report.faults += engine.warnings
        report.faults += verify(engine)
        if bodies:
            report.faults += _unreadable(engine, runner, answers, failures)
        report.faults += [str(failure) for failure in failures]
    finally:
        store.close()
    return report


def _unreadable(
    engine: Engine, runner: Runner, answers: threads.SimpleQueue[Any], failures: list[Exception]
) -> list[str]:
    """Messages that the store cannot give back, up to the first that its disk does not let it look at."""
    found: list[str] = []
    for queue in engine.queues.values():
        for places in slices(whole(queue)):
            read: list[Any] = []
            runner.look(places, read.append)
            while not read:
                if failures:
                    return found
                call, args = answers.get(timeout=PATIENCE_SECONDS)
                call(*args)
            for (partition, seq), message in zip(places, read[0], strict=True):
                if message is None:
                    found.append(
                        f"queue {queue.name}: message {name_of(partition, seq, None)} cannot be read"
                    )
    return found


class _Timer:
    def cancel(self) -> None:
        """It will never ring: nothing waits in a store that is only looked at."""


def _never(seconds: float, call: Callable[[], None]) -> _Timer:
    return _Timer()


def _nothing() -> None:
    return None


def _report(alerts: object, warnings: object) -> None:
    return None


def _no_templates(name: str) -> tuple[Rules, str]:
    raise StoreError(f"queue {name!r} cannot be made while a store is verified")

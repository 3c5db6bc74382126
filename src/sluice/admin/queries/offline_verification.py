"""Verify the store of a stopped broker: open it read-only, check its ledgers, close it.

The store is read as a start reads it, and no file is changed: the next start cuts off and reports a
torn end of the log, and missing files (an index, the `layout` file) stay missing.
"""

from __future__ import annotations

import queue as threads
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from sluice.admin.broker_facade import split_into_batches
from sluice.clock import steady_time
from sluice.errors import StoreDamaged, StoreError
from sluice.queues.bodies import ZstdCodec
from sluice.queues.commit_loop import CommitLoop, read_messages
from sluice.queues.engine import Engine
from sluice.queues.model import QueueRules, verify
from sluice.queues.service import EngineInspector, parse_stored_rules, stored_messages

READ_TIMEOUT_SECONDS: Final = 60.0  # for one read


class OpenStore(Protocol):
    """Opens a store in a directory; the composition passes in which one (`EmbeddedStore`)."""

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
    torn_bytes: int = 0  # after the last complete frame: the next start cuts them off
    notes: list[str] = field(default_factory=list)  # reported by recovery
    # Inconsistencies and unreadable messages; empty if all is well.
    faults: list[str] = field(default_factory=list)


def verify_store(directory: str | Path, open_store: OpenStore, bodies: bool = True) -> StoreReport:
    """Check everything in the store of a stopped broker; with `bodies`, read every message too.

    Refuses a directory that a broker has open, and one that is not a store.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise StoreError(
            f"there is no store in {folder}",
            "Give the directory that sluice serve --data was given",
        )
    report = StoreReport(str(folder))
    callbacks: threads.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = (
        threads.SimpleQueue()
    )
    failures: list[Exception] = []
    store = open_store(
        str(folder),
        lambda call, *args: callbacks.put((call, args)),
        failures.append,
        read_only=True,
    )
    engine = Engine(_refuse_new_queue, lambda: 0.0, codec=ZstdCodec())
    commit_loop = CommitLoop(
        engine, store, steady_time, _ignore_timer, _ignore_wakeup, _ignore_report
    )
    try:
        recovery = commit_loop.open(parse_stored_rules)
    except StoreDamaged as damage:
        report.faults.append(str(damage))
        return report
    try:
        report.queues = len(engine.queues)
        report.segments = recovery.segments
        report.torn_bytes = recovery.torn_bytes
        report.notes = list(recovery.warnings)
        report.messages = sum(int(one.live_count) for one in engine.partitions.values())
        report.faults += engine.state.effects.warnings
        report.faults += verify(engine.queues)
        if bodies:
            report.faults += _find_unreadable(engine, commit_loop, callbacks, failures)
        report.faults += [str(failure) for failure in failures]
    finally:
        store.close()
    return report


def combine_reports(directory: str | Path, reports: Sequence[StoreReport]) -> StoreReport:
    """Combine the reports of the cells of a node with several processes."""
    combined = StoreReport(str(directory))
    for report in reports:
        combined.queues += report.queues
        combined.messages += report.messages
        combined.segments += report.segments
        combined.torn_bytes += report.torn_bytes
        combined.notes += [f"{report.directory}: {note}" for note in report.notes]
        combined.faults += [f"{report.directory}: {fault}" for fault in report.faults]
    return combined


def _find_unreadable(
    engine: Engine,
    commit_loop: CommitLoop,
    callbacks: threads.SimpleQueue[Any],
    failures: list[Exception],
) -> list[str]:
    """Return messages that the store cannot read, up to the first read that times out."""
    found: list[str] = []
    for queue in EngineInspector(engine).queues():
        for locations in split_into_batches(queue.locations()):
            read: list[Any] = []
            read_messages(commit_loop, locations, read.append)
            while not read:
                if failures:
                    return found
                call, args = callbacks.get(timeout=READ_TIMEOUT_SECONDS)
                call(*args)
            for location, message in zip(locations, read[0], strict=True):
                if message is None:
                    message_id = stored_messages.generated_id(location)
                    found.append(f"queue {queue.name}: message {message_id} cannot be read")
    return found


class _Timer:
    def cancel(self) -> None:
        """Do nothing: no timer runs in a store that is only read."""


def _ignore_timer(seconds: float, call: Callable[[], None]) -> _Timer:
    return _Timer()


def _ignore_wakeup() -> None:
    return None


def _ignore_report(alerts: object, warnings: object) -> None:
    return None


def _refuse_new_queue(name: str) -> tuple[QueueRules, str]:
    raise StoreError(f"queue {name!r} cannot be created while a store is verified")

"""One broker without I/O: the queue engine, connections, sessions and namespaces, wired once.

The app, the cells of a cluster, `sluice.testing`, the tests and the benchmarks all build this core
and differ in what they pass to it: an event loop, limits, a store. It knows no file, no Redis and
no settings; `broker_host` opens stores for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sluice.broker.acl import AccessControl, AnonymousAccess
from sluice.broker.broker import Broker
from sluice.broker.limits import Limits
from sluice.broker.namespaces import (
    AdminTopics,
    CreatedQueueListener,
    ExclusiveQueueHandler,
    PendingResponses,
    QueueHandler,
    ResponseTopics,
    SchemaChecks,
    read_content_type,
)
from sluice.broker.net import ConnectionLimits
from sluice.broker.routing import BackpressureListener, SessionRestore
from sluice.clock import Clock, steady_time
from sluice.json_schema import build_validator, find_schema_error
from sluice.queues.bodies import ZstdCodec
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.log import RestoredRecord
from sluice.queues.model import Alert, RowBudget
from sluice.queues.service import QueueService, QueueTemplates, parse_stored_rules
from sluice.store.protocol import RecoveryReport, Store

CACHE_BYTES = 16_777_216  # of message bodies

ReportEvents = Callable[[list[Alert], list[str]], None]
LogEvent = Callable[[str, dict[str, object]], None]


class BrokerCore:
    """The parts of one broker.

    `loop` is an asyncio event loop, or an object with its `call_soon` and `call_later`.
    `log` takes an event and its fields, `draw` returns random numbers from 0 to 1. `webhook_error`
    returns what is wrong with the URL of a webhook. In a cluster, `is_in_same_cell` compares the
    cells of two queues. `templates` and `connection_limits` may be shared with other cores.

    A store is attached by `open`, or by `attach_store`, `CommitLoop.load`, `start` and `restore`,
    before any client connects.
    """

    def __init__(
        self,
        loop: Any,
        templates: QueueTemplates,
        *,
        limits: Limits | None = None,
        access: AccessControl | None = None,
        log: LogEvent | None = None,
        clock: Clock = steady_time,
        draw: Callable[[], float] = random.random,
        queues_enabled: bool = True,
        cache_bytes: int = CACHE_BYTES,
        ack_rows: RowBudget | None = None,
        webhook_error: Callable[[str], str] | None = None,
        is_in_same_cell: Callable[[str, str], bool] | None = None,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        if access is None:
            access = AnonymousAccess(True)
        self.engine = Engine(
            templates.rules_for, draw, cache_bytes, ZstdCodec(), read_content_type, ack_rows
        )
        self.broker = Broker(
            loop,
            Limits() if limits is None else limits,
            access,
            _ignore_event if log is None else log,
            clock,
            connection_limits,
            self.engine.broker_state,
        )
        router = self.broker.router
        service = QueueService(
            self.engine, templates, find_schema_error, webhook_error, is_in_same_cell
        )
        schemas = SchemaChecks(self.engine, build_validator)
        self.queue_handler = QueueHandler(self.engine, router, service, schemas, access)
        self.exclusive_handler = ExclusiveQueueHandler(self.engine, router)
        self.responses = PendingResponses(router, self.broker.scheduler)
        self.queues_enabled = queues_enabled
        if queues_enabled:
            self._serve_queues()
        self.commit_loop: CommitLoop  # set by `attach_store`

    def _serve_queues(self) -> None:
        router, queue_handler = self.broker.router, self.queue_handler
        namespaces = router.namespaces
        responses = ResponseTopics(router, queue_handler, self.responses)
        namespaces.register(b"$queue/responses/", responses)  # before the shorter prefix
        namespaces.register(b"$queue/", queue_handler)
        namespaces.register(b"$ECQ/", self.exclusive_handler)
        namespaces.register(b"$admin/", AdminTopics(router, queue_handler, self.broker.scheduler))
        namespaces.bind_queues(queue_handler.bindings)

    def open(self, store: Store, report: ReportEvents) -> RecoveryReport:
        """Recover from a store that blocks nothing else.

        Sessions and retained messages are restored as soon as the store has returned their records.
        """
        commit_loop = self.attach_store(store, report)
        recovery = commit_loop.load(parse_stored_rules)
        self.start()
        commit_loop.restore_broker_state(self.restore)
        return recovery

    def attach_store(
        self,
        store: Store,
        report: ReportEvents,
        settlement_delay_seconds: float = 0.0,
        call_soon: Callable[[Callable[[], None]], Any] | None = None,
    ) -> CommitLoop:
        """Build the commit loop on `store`; its `load` recovers the queues."""
        self.commit_loop = CommitLoop(
            self.engine,
            store,
            self._clock,
            self._loop.call_later,
            self.broker.turn.flush_connections,
            report,
            settlement_delay_seconds,
            call_soon,
        )
        return self.commit_loop

    def start(self) -> None:
        """Start committing, after the queues are recovered."""
        self.commit_loop.start()
        self.commit_loop.add_listener(BackpressureListener(self.broker.router))
        self.broker.turn.commit_with(self.commit_loop)
        if self.queues_enabled:
            self.commit_loop.add_listener(CreatedQueueListener(self.queue_handler))
            self.queue_handler.rebuild_bindings()

    def restore(self, records: list[RestoredRecord]) -> None:
        """Restore sessions, retained messages and pending messages."""
        broker = self.broker
        SessionRestore(self.engine.broker_state, broker.router, broker.registry).restore(records)


def _ignore_event(event: str, facts: dict[str, object]) -> None:
    """Log nothing."""

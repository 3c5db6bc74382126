"""The job that the current handler runs, for log lines and for code far from the handler."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.client import Delivery
    from sluice.worker.task import AnyTask

CURRENT_JOB: ContextVar[tuple[Delivery, AnyTask] | None] = ContextVar("sluice_job", default=None)


def current_delivery() -> Delivery | None:
    """Return the delivery that the current handler processes; None outside of handlers."""
    job = CURRENT_JOB.get()
    return None if job is None else job[0]


class JobLogFilter(logging.Filter):
    """Adds `task`, `queue`, `message_id` and `attempt` to the log records of handlers.

    `sluice worker` installs it. In a program of your own: `handler.addFilter(JobLogFilter())`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        job = CURRENT_JOB.get()
        if job is not None and not hasattr(record, "message_id"):
            delivery, task = job
            record.task = task.name
            record.queue = delivery.queue
            record.message_id = delivery.id
            record.attempt = delivery.attempt
        return True

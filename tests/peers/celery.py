"""A stub of Celery for docs/migrating.md: a delayed task runs at once in the calling program.

A retry does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Retry(Exception):
    """What `self.retry` raises."""


class Task:
    def __init__(self, function: Callable[..., Any], max_retries: int) -> None:
        self._function = function
        self._left = max_retries

    def retry(self, exc: Exception, countdown: float) -> Retry:
        assert countdown > 0
        if not self._left:
            raise exc
        self._left -= 1
        return Retry()

    def delay(self, *arguments: Any) -> None:
        while True:
            try:
                self._function(self, *arguments)
            except Retry:
                continue
            return


class Celery:
    def __init__(self, name: str, broker: str) -> None:
        assert name and broker.startswith(("redis://", "amqp://"))

    def task(
        self, bind: bool, acks_late: bool, max_retries: int
    ) -> Callable[[Callable[..., Any]], Task]:
        assert bind and acks_late
        return lambda function: Task(function, max_retries)

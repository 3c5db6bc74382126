"""Telling somebody that a message has died: a POST to the queue's webhook, never in the way of a delivery.

Alerts wait in a bounded line for each webhook, behind a task that lives while there is something in it: one that does
not answer holds up its own alerts only. It is tried again with a growing pause, then given up with a line in the log:
the dead letter itself is safe in its queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Final

import httpx

from sluice.notation import show_duration
from sluice.queues.dead_letters import Alert

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1000  # for one webhook
TIMEOUT_SECONDS: Final = 5.0
PAUSES: Final = (0.5, 2.0, 8.0)  # before each further try


class AlertSender:
    """Owns its tasks: `close` ends them. `send` is called in the loop."""

    def __init__(self, pauses: tuple[float, ...] = PAUSES, timeout: float = TIMEOUT_SECONDS) -> None:
        self._waiting: dict[str, deque[Alert]] = {}  # by webhook
        self._pauses = pauses
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, alert: Alert) -> None:
        log.warning(
            "message died",
            extra={
                "queue": alert.queue,
                "message_id": alert.message_id,
                "reason": alert.reason,
                "kept_in": alert.dlq,
            },
        )
        if not alert.url:
            return
        waiting = self._waiting.get(alert.url)
        if waiting is None:
            waiting = self._waiting[alert.url] = deque()
            task = asyncio.get_running_loop().create_task(self._run(alert.url, waiting), name="alerts")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(waiting) >= MAX_WAITING:
            log.error("alert dropped", extra={"queue": alert.queue, "why": f"{MAX_WAITING} are waiting"})
        else:
            waiting.append(alert)

    async def _run(self, url: str, waiting: deque[Alert]) -> None:
        """All that waits for one webhook, in order."""
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout)
        try:
            while waiting:
                await self._deliver(self._client, waiting[0])
                waiting.popleft()
        finally:
            del self._waiting[url]

    async def _deliver(self, client: httpx.AsyncClient, alert: Alert) -> None:
        fault = ""
        for pause in (0.0, *self._pauses):
            await asyncio.sleep(pause)
            try:
                answer = await client.post(alert.url, json=body_of(alert))
                if answer.is_success:
                    return
                fault = f"it answered {answer.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fault = str(error) or type(error).__name__
        log.error(
            "alert not delivered",
            extra={
                "queue": alert.queue,
                "url": alert.url,
                "why": fault,
                "tried_for": show_duration(sum(self._pauses)),
            },
        )

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def body_of(alert: Alert) -> dict[str, object]:
    """What a webhook gets, as JSON."""
    story = alert.story
    return {
        "queue": alert.queue,
        "dead_letter_queue": alert.dlq,
        "message_id": alert.message_id,
        "group": alert.group,
        "failure_reason": alert.reason,
        "description": story.get("dead-description", ""),
        "retry_count": int(story.get("attempts", "0")),
        "first_attempt_at": story.get("first-attempt-at", ""),
        "last_attempt_at": story.get("last-attempt-at", ""),
        "moved_at": story.get("dead-at", ""),
        "original_topic": story.get("original-topic", ""),
    }

"""Telling somebody that a message has died: a POST to the queue's webhook, never in the way of a delivery.

Alerts wait in a bounded line behind one task. A webhook that does not answer is tried again with a growing pause, then
given up with a line in the log: the dead letter itself is safe in its queue.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

import httpx

from sluice.notation import show_duration
from sluice.queues.dead_letters import Alert

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1000
TIMEOUT_SECONDS: Final = 5.0
PAUSES: Final = (0.5, 2.0, 8.0)  # before each further try


class AlertSender:
    """Owns its task: `start` begins it, `close` ends it."""

    def __init__(self, pauses: tuple[float, ...] = PAUSES, timeout: float = TIMEOUT_SECONDS) -> None:
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(MAX_WAITING)
        self._pauses = pauses
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="alerts")

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
        if alert.url:
            try:
                self._waiting.put_nowait(alert)
            except asyncio.QueueFull:
                log.error("alert dropped", extra={"queue": alert.queue, "why": f"{MAX_WAITING} are waiting"})

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=self._timeout) as client:
            while True:
                await self._deliver(client, await self._waiting.get())

    async def _deliver(self, client: httpx.AsyncClient, alert: Alert) -> None:
        fault = ""
        for pause in (0.0, *self._pauses):
            await asyncio.sleep(pause)
            try:
                answer = await client.post(alert.url, json=body_of(alert))
                if answer.is_success:
                    return
                fault = f"it answered {answer.status_code}"
            except httpx.HTTPError as error:
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
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None


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

"""Sends an alert for each dead letter to the queue's webhook, without delaying deliveries.

Each webhook has a bounded queue of alerts and a task that exists while the queue is not empty. A
webhook that does not answer delays its own alerts only. An alert is retried with growing delays,
then dropped with a log line: the dead letter itself is safe in its queue.

Users who configure a queue choose the URL, and this machine may have access that they do not have.
So a webhook reaches public addresses only, unless the operator allows more. The name is resolved
once, the address is checked, and the connection goes to that address: a later change of the name
has no effect. Redirects are not followed.

An installed package can add handlers of its own: the entry point group `sluice.alert_handlers`
names functions that return an `AlertHandler`. Handlers get every alert, in order, as webhooks do.

Only the status of a response is used. Its body is never read: it could be endless, highly
compressed, or sent a byte at a time. One timeout covers the whole exchange, from name resolution to
the status. The connection is closed after each alert, with the body unread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol

from sluice.alerts.ssrf_guard import AddressRefused, Resolve, SsrfGuard, resolve_host
from sluice.backoff import Backoff
from sluice.errors import ConfigError
from sluice.queues.model import Alert
from sluice.units import format_duration

if TYPE_CHECKING:
    import httpx  # 20 MB that a broker without webhooks does not need: imported on first use

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1000  # alerts for one webhook
TIMEOUT_SECONDS: Final = 10.0  # from name resolution to the status of the response
MAX_RETRIES: Final = 3
RETRY_BACKOFF: Final = Backoff(0.5, 4.0, 8.0)

HANDLER_GROUP: Final = "sluice.alert_handlers"


class AlertHandler(Protocol):
    """Handles alerts in the broker's process. It must not block the event loop."""

    async def handle(self, alert: dict[str, object]) -> None:
        """Handle one alert, with the fields of a webhook. An exception causes a retry."""


def load_alert_handlers() -> dict[str, AlertHandler]:
    """Return a handler for each entry point, by name."""
    handlers: dict[str, AlertHandler] = {}
    for point in entry_points(group=HANDLER_GROUP):
        try:
            handlers[point.name] = point.load()()
        except Exception as error:
            raise ConfigError(
                f"the alert handler {point.name} cannot be loaded: {type(error).__name__}: {error}",
                "Correct or uninstall the package that provides it",
            ) from error
    return handlers


class AlertSender:
    """Owns its tasks; `close` ends them. `send` is called in the loop."""

    def __init__(
        self,
        retries: int = MAX_RETRIES,
        backoff: Backoff = RETRY_BACKOFF,
        timeout: float = TIMEOUT_SECONDS,
        allowed: Sequence[str] = (),
        resolve: Resolve = resolve_host,
        handlers: Mapping[str, AlertHandler] | None = None,
    ) -> None:
        self.guard = SsrfGuard(allowed)
        self._pending: dict[str, deque[Alert]] = {}  # by webhook
        self._handlers = dict(handlers or {})
        self._pending_for_handlers: dict[str, deque[Alert]] = {}  # by name
        self._retries = retries
        self._backoff = backoff
        self._timeout = timeout
        self._resolve = resolve
        self._client: httpx.AsyncClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, alert: Alert) -> None:
        log.warning(
            "message dead-lettered",
            extra={
                "queue": alert.queue,
                "message_id": alert.message_id,
                "reason": alert.reason,
                "kept_in": alert.dlq,
            },
        )
        for name in self._handlers:
            self._send_to_handler(name, alert)
        if not alert.url:
            return
        pending = self._pending.get(alert.url)
        if pending is None:
            pending = self._pending[alert.url] = deque()
            task = asyncio.get_running_loop().create_task(
                self._send_pending(alert.url, pending), name="alerts"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(pending) >= MAX_WAITING:
            log.error(
                "alert dropped", extra={"queue": alert.queue, "why": f"{MAX_WAITING} are waiting"}
            )
        else:
            pending.append(alert)

    def _send_to_handler(self, name: str, alert: Alert) -> None:
        pending = self._pending_for_handlers.get(name)
        if pending is None:
            pending = self._pending_for_handlers[name] = deque()
            task = asyncio.get_running_loop().create_task(
                self._run_handler(name, pending), name="alert handler"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(pending) >= MAX_WAITING:
            log.error("alert dropped", extra={"queue": alert.queue, "handler": name})
        else:
            pending.append(alert)

    async def _run_handler(self, name: str, pending: deque[Alert]) -> None:
        """Give all pending alerts to one handler, in order."""
        try:
            while pending:
                await self._handle(name, pending[0])
                pending.popleft()
        finally:
            del self._pending_for_handlers[name]

    async def _handle(self, name: str, alert: Alert) -> None:
        fault = ""
        for attempt in range(1 + self._retries):
            if attempt:
                await asyncio.sleep(self._backoff.delay(attempt - 1))
            try:
                async with asyncio.timeout(self._timeout):
                    await self._handlers[name].handle(make_webhook_body(alert))
                return
            except Exception as error:  # of the plug-in: it must not end the broker
                fault = f"{type(error).__name__}: {error}"
        log.error(
            "alert not delivered", extra={"queue": alert.queue, "handler": name, "why": fault}
        )

    async def _send_pending(self, url: str, pending: deque[Alert]) -> None:
        """Send all alerts of one webhook, in order."""
        import httpx

        if self._client is None:
            for name in ("httpx", "httpcore"):
                library = logging.getLogger(name)  # below warning level it logs the whole URL
                library.setLevel(max(library.level, logging.WARNING))
            self._client = httpx.AsyncClient(
                timeout=self._timeout,
                follow_redirects=False,
                trust_env=False,  # a proxy from the environment would resolve names by itself
                verify=ssl.create_default_context(),
            )
        try:
            while pending:
                await self._deliver(self._client, pending[0])
                pending.popleft()
        finally:
            del self._pending[url]

    async def _deliver(self, client: httpx.AsyncClient, alert: Alert) -> None:
        import httpx

        fault = ""
        waited = 0.0
        for attempt in range(1 + self._retries):
            if attempt:
                delay = self._backoff.delay(attempt - 1)
                await asyncio.sleep(delay)
                waited += delay
            try:
                async with asyncio.timeout(self._timeout):
                    status = await self._post(client, alert)
                if 200 <= status < 300:
                    return
                fault = f"it answered {status}"
            except TimeoutError:
                fault = f"it did not answer within {format_duration(self._timeout)}"
            except AddressRefused as error:
                fault = str(error)
                break  # a retry would be refused again
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                fault = str(error) or type(error).__name__
        log.error(
            "alert not delivered",
            extra={
                "queue": alert.queue,
                "url": redact_url(alert.url),
                "why": fault,
                "tried_for": format_duration(waited),
            },
        )

    async def _post(self, client: httpx.AsyncClient, alert: Alert) -> int:
        """Connect to the checked address, with the original host in the request and in TLS.

        Return the status of the response.
        """
        import httpx

        url = httpx.URL(alert.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self.guard.find_allowed_address(url.host, port, self._resolve)
        async with client.stream(
            "POST",
            url.copy_with(host=address, username=None, password=None),
            json=make_webhook_body(alert),
            headers={"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"},
            auth=httpx.BasicAuth(url.username, url.password)
            if url.userinfo
            else httpx.USE_CLIENT_DEFAULT,
            extensions={"sni_hostname": url.host},
        ) as response:
            return response.status_code

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def redact_url(url: str) -> str:
    """Return a webhook without path and query, which contain the secrets of many services."""
    import httpx

    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return "(not a URL)"
    return f"{found.scheme}://{found.netloc.decode('ascii', 'replace')}/..."


def make_webhook_body(alert: Alert) -> dict[str, object]:
    """Return the JSON body that a webhook receives."""
    story = alert.headers
    return {
        "queue": f"$queue/{alert.queue}",
        "dead_letter_queue": f"$queue/{alert.dlq}",
        "message_id": alert.message_id,
        "group": alert.group,
        "failure_reason": alert.reason,
        "description": story.get("dead-description", ""),
        "retry_count": max(0, int(story.get("attempts", "0")) - 1),
        "attempts": int(story.get("attempts", "0")),
        "first_attempt_at": story.get("first-attempt-at", ""),
        "last_attempt_at": story.get("last-attempt-at", ""),
        "moved_at": story.get("dead-at", ""),
        "original_topic": story.get("original-topic", ""),
    }

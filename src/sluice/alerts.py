"""Telling somebody that a message has died: a POST to the queue's webhook, never in the way of a delivery.

Alerts wait in a bounded line for each webhook, behind a task that lives while there is something in it: one that does
not answer holds up its own alerts only. It is tried again with a growing pause, then given up with a line in the log:
the dead letter itself is safe in its queue.

Who may configure a queue chooses the address, and this machine may stand where they do not: so a webhook reaches public
addresses only, unless the operator allows more. The name is looked up once, the address that is found is judged, and
that very address is connected to: a name that means something else a moment later changes nothing. Redirects are not
followed.

Only the status of an answer is used. Its body is never read: it could be endless, compressed a
thousandfold, or sent a byte at a time. One timeout covers the whole exchange, from the lookup of the
name to the status. The connection is closed after each alert, with the body unread.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sluice.queues.flow.dead_letters import Alert
from sluice.units import format_duration

if TYPE_CHECKING:
    import httpx  # 20 MB that a broker without webhooks need not hold: whoever needs it takes it then

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1000  # for one webhook
TIMEOUT_SECONDS: Final = 10.0  # from the lookup of the name to the status of the answer
RETRY_DELAYS: Final = (0.5, 2.0, 8.0)  # before each further try

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

# Not public, whatever the library's tables of this Python say of them.
_NON_PUBLIC_NETWORKS: Final = tuple(
    ipaddress.ip_network(one)
    for one in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carriers' own
        "169.254.0.0/16",  # link-local, where clouds keep their metadata
        "192.0.0.0/24",
        "198.18.0.0/15",
        "168.63.129.16/32",  # metadata of one cloud, on a public address
        "3fff::/20",  # documentation
    )
)
# All of IPv6 that is routed through the world today; the tables miss some of what is not.
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
# IPv6 addresses that carry an IPv4 one: judged by that.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(Exception):
    """A webhook that leads where it may not."""


class SsrfGuard:
    """Which addresses webhooks may reach. `allowed` has networks, addresses and host names; an allowed name is trusted
    wherever it leads."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed_hosts = {one.lower() for one in allowed if _parse_network(one) is None}
        self._allowed_networks = [
            network for one in allowed if (network := _parse_network(one)) is not None
        ]

    def fault_of_address(self, address: str) -> str:
        """Why this address is out of reach; the empty string when it is not."""
        found = _extract_ipv4(ipaddress.ip_address(address.partition("%")[0]))
        if any(found in network for network in self._allowed_networks):
            return ""
        public = (
            found.is_global
            and not found.is_multicast
            and (found.version == 4 or found in _GLOBAL_UNICAST)
        )
        if public and not any(found in closed for closed in _NON_PUBLIC_NETWORKS):
            return ""
        return f"{address} is not a public address: name it in webhooks.allow if alerts are meant to go there"

    def fault_of_url(self, url: str) -> str:
        """What can be said of a webhook before its name is looked up: for whoever configures a queue with it."""
        import httpx

        try:
            found = httpx.URL(url)
            host, port = found.host, found.port
        except (httpx.InvalidURL, UnicodeError):  # the latter of a name in punycode that is none
            return "the webhook is not a URL"
        if not host:
            return "the webhook names no host"
        if port is not None and not 0 < port < 65_536:
            return f"the webhook names port {port}: ports go from 1 to 65535"
        if host.lower().rstrip(".") in self._allowed_hosts:
            return ""
        try:
            return self.fault_of_address(host)
        except ValueError:  # a name, judged when it is used; these are never anything else
            local = host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(
                ".localhost"
            )
            return (
                f"{host} is this machine: name it in webhooks.allow if alerts are meant to go there"
                if local
                else ""
            )

    async def find_allowed_address(self, host: str, port: int, resolve: Resolve) -> str:
        """An address of `host` that may be reached."""
        trusted = host.lower().rstrip(".") in self._allowed_hosts
        faults = []
        for address in await resolve(host, port):
            fault = "" if trusted else self.fault_of_address(address)
            if not fault:
                return address
            faults.append(fault)
        raise AddressRefused(f"{host}: {faults[0]}" if faults else f"{host} has no address")


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system has them; a literal address is its own."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


class AlertSender:
    """Owns its tasks: `close` ends them. `send` is called in the loop."""

    def __init__(
        self,
        retry_delays: tuple[float, ...] = RETRY_DELAYS,
        timeout: float = TIMEOUT_SECONDS,
        allowed: Sequence[str] = (),
        resolve: Resolve = resolve_host,
    ) -> None:
        self.guard = SsrfGuard(allowed)
        self._pending: dict[str, deque[Alert]] = {}  # by webhook
        self._retry_delays = retry_delays
        self._timeout = timeout
        self._resolve = resolve
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

    async def _send_pending(self, url: str, pending: deque[Alert]) -> None:
        """All that waits for one webhook, in order."""
        import httpx

        if self._client is None:
            for name in ("httpx", "httpcore"):
                library = logging.getLogger(name)  # below warnings, they log the whole URL
                library.setLevel(max(library.level, logging.WARNING))
            self._client = httpx.AsyncClient(
                timeout=self._timeout,
                follow_redirects=False,
                trust_env=False,  # a proxy of the environment would look names up for itself
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
        for delay in (0.0, *self._retry_delays):
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
                break  # trying again would be refused again
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
        """Connect to the address that was judged; the host is named in the request and in TLS as it
        was written. Return the status of the answer."""
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
    """A webhook without what may be a secret in it: many services have theirs in the path or the query."""
    import httpx

    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return "(not a URL)"
    return f"{found.scheme}://{found.netloc.decode('ascii', 'replace')}/..."


def _parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _extract_ipv4(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, by whichever way it got there."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64 or int(address) >> 32 == 0:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return ipaddress.IPv4Address("0.0.0.0")  # a tunnel to anywhere: never
    return address


def make_webhook_body(alert: Alert) -> dict[str, object]:
    """What a webhook gets, as JSON."""
    story = alert.headers
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

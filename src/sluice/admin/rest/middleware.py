"""Checks before every route: identity, origin, limits; and the headers of every response.

The middleware is plain ASGI and runs before FastAPI, so that an unauthorized caller cannot make the
server read or parse a body. It also protects against foreign web pages, which can make a browser on
this machine send requests to 127.0.0.1: a change must come from a page of this very host
(`Origin`). Where no authentication is needed, the host must be an address or a name of this
machine (`Host`); otherwise a foreign name that resolves to 127.0.0.1 could read like the same site
(DNS rebinding).
"""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.access.identity import AdminAuthenticator
from sluice.admin.rest.deps import IDENTITY_KEY, REAUTHENTICATE_KEY
from sluice.admin.rest.errors import (
    BodyTooLarge,
    BodyTooSlow,
    Busy,
    DotsInPath,
    ForeignHost,
    ForeignOrigin,
    NotJson,
    Stopping,
    render_refusal,
)
from sluice.admin.rest.params import normalize_segment
from sluice.errors import SluiceError

LIVE_PATH: Final = "/api/v1/live"
STAGES_PATH: Final = "/api/v1/bulk/stages/"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
BODY_TIMEOUT_SECONDS: Final = 30.0
MAX_CONCURRENT_REQUESTS: Final = 256  # live streams are counted separately

# Console and documentation are self-contained: nothing is loaded from or framed by other sites.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_JSON_TYPE: Final = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


class RestAuthMiddleware:
    """Authenticate requests; `max_body` bounds the memory of one request."""

    def __init__(self, app: ASGIApp, keyring: AdminAuthenticator, max_body: int, host: str) -> None:
        self._app = app
        self._keyring = keyring
        self._max_body = max_body
        self._local_names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._active_requests = 0
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        send = _add_security_headers(send)
        live = scope["path"] == LIVE_PATH
        self._active_requests += not live
        try:
            receive = await self._authorize(scope, receive)
        except SluiceError as refusal:
            # The connection stays open, and the server skips the rest of the body. Closing it now
            # would often lose the response, because the client is still sending.
            await render_refusal(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        finally:
            self._active_requests -= not live

    async def _authorize(self, scope: Scope, receive: Receive) -> Receive:
        """Refuse, or put the caller into the scope and return a `receive` for the body."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        if self.is_stopping:
            raise Stopping
        if path.startswith("/api/") or path == "/metrics":
            if self._active_requests > MAX_CONCURRENT_REQUESTS:
                raise Busy(
                    f"{MAX_CONCURRENT_REQUESTS} requests are in progress already",
                    "Send fewer at once",
                )
            peer = scope["client"][0] if scope.get("client") else ""
            reauthenticate = partial(
                self._keyring.identify_async, headers.get("authorization"), peer
            )
            identity = await reauthenticate()
            if identity.is_anonymous:
                self._check_host(headers.get("host", ""))
            scope[IDENTITY_KEY] = identity
            scope[REAUTHENTICATE_KEY] = reauthenticate
            raw: bytes = scope.get("raw_path") or path.encode()
            if any(segment in (b".", b"..") for segment in raw.split(b"?")[0].split(b"/")):
                raise DotsInPath
            scope["path"] = "/".join(
                normalize_segment(one) for one in raw.decode("latin-1").split("/")
            )
        if scope["method"] in ("GET", "HEAD", "OPTIONS", "TRACE"):
            if scope["method"] == "HEAD" and path != LIVE_PATH:
                scope["method"] = "GET"  # the server omits the body of the response
            return receive
        _check_origin(headers)
        if path.startswith(STAGES_PATH) and headers.get("content-type", "").lower().startswith(
            ARROW_TYPE
        ):
            return receive  # the route reads the body in parts
        body = await self._read_body(headers, receive)
        kind = headers.get("content-type", "")
        if body and not _JSON_TYPE.fullmatch(kind):
            raise NotJson(kind)
        return replay_body(body, receive)

    def _check_host(self, host_header: str) -> None:
        """Accept addresses and local names, which no foreign name server controls."""
        name = host_name(host_header)
        if not name or name in self._local_names:
            return
        try:
            ip_address(name)
        except ValueError:
            raise ForeignHost(host_header) from None

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        content_length = headers.get("content-length", "")
        if content_length.isdigit() and int(content_length) > self._max_body:
            raise BodyTooLarge(self._max_body)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                while True:
                    message = await receive()
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > self._max_body:
                        raise BodyTooLarge(self._max_body)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise BodyTooSlow(BODY_TIMEOUT_SECONDS) from None


def host_name(host_header: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host_header}").hostname or "").lower()
    except ValueError:
        return host_header


def _check_origin(headers: Headers) -> None:
    """Check the Origin header: browsers send it, programs do not."""
    origin = headers.get("origin")
    if origin is not None and _origin_host(origin) != headers.get("host", ""):
        raise ForeignOrigin(origin)
    site = headers.get("sec-fetch-site")
    if origin is None and site in ("cross-site", "same-site"):
        raise ForeignOrigin("another site")


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body that was read already."""
    read = False

    async def replay() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def wait_disconnected(receive: Receive) -> None:
    """Return when a client whose body was read has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _add_security_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            if "cache-control" not in headers:
                headers["Cache-Control"] = "no-store"
        await send(message)

    return sending

"""What stands before every route: who asks, from where, with how much, and what every answer carries.

The gate is plain ASGI and runs before FastAPI looks at anything, so that a caller who may not come in cannot make the
server read or parse what it sends. It also keeps browsers honest. A page of another site can make a browser on this
machine send requests to 127.0.0.1: what changes something must come from a page of this very host (`Origin`), and where
nobody has to say who they are, the host must be an address or a name of this machine (`Host`), or else a foreign name
that resolves to 127.0.0.1 would be read from like a site of its own.
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

from sluice.access.identity import Keyring
from sluice.admin.rest.deps import AGAIN, IDENTITY
from sluice.admin.rest.errors import (
    BodyTooLarge,
    BodyTooSlow,
    Busy,
    DotsInPath,
    ForeignHost,
    ForeignOrigin,
    NotJson,
    Stopping,
    answer_refusal,
)
from sluice.admin.rest.params import one_level
from sluice.errors import SluiceError

LIVE: Final = "/api/v1/live"
STAGES: Final = "/api/v1/bulk/stages/"
ARROW: Final = "application/vnd.apache.arrow.stream"
BODY_SECONDS: Final = 30.0
MOST_AT_ONCE: Final = 256  # requests under way; live streams are counted by themselves

# Everything the console and the documentation need is ours: nothing is loaded from, sent to or framed by others.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_JSON: Final = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


class Gate:
    """`max_body` bounds what one request may make the server hold."""

    def __init__(self, app: ASGIApp, keyring: Keyring, max_body: int, host: str) -> None:
        self._app = app
        self._keyring = keyring
        self._max_body = max_body
        self._own_names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._under_way = 0
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        send = _with_headers(send)
        live = scope["path"] == LIVE
        self._under_way += not live
        try:
            receive = await self._admit(scope, receive)
        except SluiceError as refusal:
            # The connection stays: the server reads past what is left of the body. Closing it now would often lose
            # the answer, because the caller is still sending.
            await answer_refusal(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= not live

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Refuse, or let in: the scope then says who asks, and the answer is what reads the body."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        if self.stopping:
            raise Stopping
        if path.startswith("/api/") or path == "/metrics":
            if self._under_way > MOST_AT_ONCE:
                raise Busy(f"{MOST_AT_ONCE} requests are under way already", "Send fewer at once")
            peer = scope["client"][0] if scope.get("client") else ""
            again = partial(self._keyring.recognise, headers.get("authorization"), peer)
            identity = await again()
            if identity.anonymous:
                self._check_host(headers.get("host", ""))
            scope[IDENTITY] = identity
            scope[AGAIN] = again
            raw: bytes = scope.get("raw_path") or path.encode()
            if any(segment in (b".", b"..") for segment in raw.split(b"?")[0].split(b"/")):
                raise DotsInPath
            scope["path"] = "/".join(one_level(one) for one in raw.decode("latin-1").split("/"))
        if scope["method"] in ("GET", "HEAD", "OPTIONS", "TRACE"):
            if scope["method"] == "HEAD" and path != LIVE:
                scope["method"] = "GET"  # the server leaves out the body by itself
            return receive
        _check_origin(headers)
        if path.startswith(STAGES) and headers.get("content-type", "").lower().startswith(ARROW):
            return receive  # its route reads it, piece by piece
        body = await self._read(headers, receive)
        kind = headers.get("content-type", "")
        if body and not _JSON.fullmatch(kind):
            raise NotJson(kind)
        return replay(body, receive)

    def _check_host(self, given: str) -> None:
        """An address cannot be taken over by somebody else's name server, and neither can these names."""
        name = host_of(given)
        if not name or name in self._own_names:
            return
        try:
            ip_address(name)
        except ValueError:
            raise ForeignHost(given) from None

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        told = headers.get("content-length", "")
        if told.isdigit() and int(told) > self._max_body:
            raise BodyTooLarge(self._max_body)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
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
            raise BodyTooSlow(BODY_SECONDS) from None


def host_of(given: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{given}").hostname or "").lower()
    except ValueError:
        return given


def _check_origin(headers: Headers) -> None:
    """Browsers name the site that a request comes from; programs name none."""
    origin = headers.get("origin")
    if origin is not None and _place_of(origin) != headers.get("host", ""):
        raise ForeignOrigin(origin)
    site = headers.get("sec-fetch-site")
    if origin is None and site in ("cross-site", "same-site"):
        raise ForeignOrigin("another site")


def _place_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def replay(body: bytes, receive: Receive) -> Receive:
    """What was read already, for those who read it once more."""
    read = False

    async def again() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def until_gone(receive: Receive) -> None:
    """Of one whose body was read: return when he has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if "cache-control" not in headers:
                headers["Cache-Control"] = "no-store"
        await send(message)

    return sending

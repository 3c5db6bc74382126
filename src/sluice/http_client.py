"""An HTTP client of the broker's own API, on the standard library alone.

The command line and Spark use it: executors need no further library, and `sluice --help` imports
none. One client is one connection, opened on first use. The module has what both programs need to
reach a broker: address and token from options or the environment, TLS, timeouts, retries, and the
errors of a broker that refuses or does not answer. It does not know what the requests mean.

Texts name options as Spark does (`option url`); the command line replaces them by its flags. No
text contains a token or a password.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from sluice.backoff import Backoff
from sluice.errors import ConfigError, SluiceError
from sluice.units import is_loopback, quote_path_segment

API_ROOT: Final = "/api/v1"
DEFAULT_URL: Final = "http://127.0.0.1:8080"
RETRY_SECONDS: Final = 60.0
RESPONSE_SECONDS: Final = 60.0  # a live broker gives up a request after half of that
CONNECT_SECONDS: Final = 10.0
MAX_BUSY_SECONDS: Final = 3600.0  # how long the broker may serve other clients first
RETRY_BACKOFF: Final = Backoff(0.1, max_seconds=2.0)
# The broker serves other clients first, and then this one.
RETRY_LATER_CODES: Final = ("too_many_readers", "stages_full")

T = TypeVar("T")


class InvalidOption(ConfigError):
    """An option or a column is invalid."""


class Refused(SluiceError):
    """The broker refused a request, or a server that is not Sluice answered.

    `code` is for programs: unknown_queue, out_of_range, stale_batch. `facts` is the document of the
    refusal; it is empty if the server is not Sluice.
    """

    def __init__(
        self,
        code: str,
        resource: str,
        remedy: str,
        facts: dict[str, Any] | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(resource, remedy)
        self.code = code
        self.facts = facts or {}
        self.status = status

    @property
    def is_busy(self) -> bool:
        """Return whether the broker asks to retry later."""
        return self.status == http.client.SERVICE_UNAVAILABLE


class BrokerGone(SluiceError):
    """The broker did not answer any attempt."""

    def __init__(self, url: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"the broker at {url} did not answer for {seconds:.0f} s ({reason})",
            "Start it, or correct the option url; the option retrySeconds says how long to try."
            " A stream goes on from its checkpoint when it is started again",
        )


@dataclass(frozen=True)
class Endpoint:
    """The broker's address and credentials. The defaults are in the environment."""

    url: str = field(default_factory=lambda: os.environ.get("SLUICE_URL") or DEFAULT_URL)
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = field(default_factory=lambda: os.environ.get("SLUICE_CA", ""))
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        if not is_http_url(self.url):
            raise InvalidOption(
                f"option url is {self.url!r}",
                f"Give the HTTP address of the broker, such as {DEFAULT_URL}; a port is 1 to 65535",
            )
        if not self.token and not self.token_file:
            token = os.environ.get("SLUICE_TOKEN", "").strip()
            object.__setattr__(self, "token", token)
            if not token:
                object.__setattr__(self, "token_file", os.environ.get("SLUICE_TOKEN_FILE", ""))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def display_url(self) -> str:
        """Return the URL without user and password."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def read_token(self) -> str:
        """Return the token. Reads the file for each request: it may change during a stream."""
        if self.token or not self.token_file:
            return _check_token(self.token, "option token (or SLUICE_TOKEN)")
        option = f"option tokenFile: {self.token_file}"
        try:
            return _check_token(Path(self.token_file).read_text("utf-8", "replace").strip(), option)
        except OSError as fault:
            raise InvalidOption(
                f"{option} cannot be read on {socket.gethostname()} ({fault.strerror})",
                "Put it on the driver and on every executor, or use the option token",
            ) from None

    def authorization(self) -> str:
        """Return the header for the token, else for user and password of the URL, else ""."""
        token = self.read_token()
        return f"Bearer {token}" if token else _basic_authorization(urlsplit(self.url))

    def tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca or None)
        except OSError as fault:
            raise InvalidOption(
                f"option ca: {self.ca} cannot be used"
                f" ({fault.strerror or 'it holds no certificate'})",
                "Give a PEM file with a certificate, on each machine that connects",
            ) from None


class HttpClient:
    """One connection. The owner closes it, or uses `with`.

    `use_proxy`: connect through the proxy that the environment names, except to this machine.
    """

    def __init__(
        self, where: Endpoint, connect_seconds: float = CONNECT_SECONDS, use_proxy: bool = False
    ) -> None:
        self.where = where
        self._connect_seconds = connect_seconds
        self._use_proxy = use_proxy
        self._connection: http.client.HTTPConnection | None = None
        self._target_prefix = ""  # of paths in requests
        self._proxy_headers: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _socket(self) -> socket.socket | None:
        return None if self._connection is None else self._connection.sock

    def _request_json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = RESPONSE_SECONDS,
    ) -> Any:
        """Return the response to a request, which may be sent several times."""
        data, content_type = encode_json(body)
        return self._with_retries(
            lambda: self._read_json(self._send_request(method, path, data, content_type, seconds))
        )

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        body = response.read()
        if response.status == http.client.NO_CONTENT:
            return None
        try:
            return json.loads(body)
        except ValueError:
            raise self._not_sluice_error(
                f"answers with {response.headers.get('content-type', 'nothing')}, not JSON"
            ) from None

    def _with_retries(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until the broker answers, for at most `retry_seconds`.

        So a restart of the broker is an interruption and not a failure. The first retry is
        immediate, because an idle connection may have been closed by the broker. Time that the
        broker spends on other clients does not count, up to MAX_BUSY_SECONDS.
        """
        retrying_since = started = time.monotonic()
        pause, retries = 0.0, 0
        while True:
            refusal: Refused | None = None
            try:
                return attempt()
            except ssl.SSLCertVerificationError as fault:
                raise self._untrusted_error(fault) from None
            except Refused as refused:
                if not refused.is_busy:
                    raise
                why, refusal = refused.what, refused
            except (http.client.HTTPException, OSError) as fault:
                why = str(fault) or type(fault).__name__
            self.close()
            now = time.monotonic()
            if (
                refusal is not None
                and refusal.code in RETRY_LATER_CODES
                and now - started < MAX_BUSY_SECONDS
            ):
                retrying_since = now
            elif now - retrying_since + pause > self.where.retry_seconds:
                raise refusal or BrokerGone(self.where.display_url, self.where.retry_seconds, why)
            time.sleep(pause)
            pause = RETRY_BACKOFF.delay(retries, random.random())
            retries += 1

    def _send_request(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        content_type: str = "",
        seconds: float = RESPONSE_SECONDS,
    ) -> http.client.HTTPResponse:
        """Send one request and return its successful response with the body unread.

        `seconds` without a byte from the broker is a failure.
        """
        authorization = self.where.authorization()
        connection = self._connection
        # `sock` is None after a response with "Connection: close".
        if connection is None or connection.sock is None:
            connection = self._connect()
        headers = dict(self._proxy_headers)
        if content_type:
            headers["Content-Type"] = content_type
        if authorization:
            headers["Authorization"] = authorization
        connection.sock.settimeout(seconds)
        connection.request(method, f"{self._target_prefix}{path}", body or None, headers)
        response = connection.getresponse()
        if response.status < 300:
            return response
        raise self._error_from_response(response.status, response.read())

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.where.url)
        secure = parts.scheme == "https"
        proxy = find_proxy(parts) if self._use_proxy else None
        target = proxy or parts
        assert target.hostname is not None
        if secure:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                target.hostname,
                target.port,
                timeout=self._connect_seconds,
                context=self.where.tls_context(),
            )
        else:
            connection = http.client.HTTPConnection(
                target.hostname, target.port, timeout=self._connect_seconds
            )
        self._target_prefix = f"{parts.path.rstrip('/')}{API_ROOT}"
        if proxy is not None:
            login = _basic_authorization(proxy)
            proxy_headers = {"Proxy-Authorization": login} if login else {}
            if secure:
                connection.set_tunnel(self.where.host, parts.port, proxy_headers)
            else:
                self._proxy_headers = proxy_headers
                address = parts.netloc.rpartition("@")[2]
                self._target_prefix = f"http://{address}{self._target_prefix}"
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        return connection

    def _error_from_response(self, status: int, body: bytes) -> Refused:
        try:
            document = json.loads(body)
            code = str(document["error"])
        except (ValueError, LookupError, TypeError):
            return self._not_sluice_error(f"answers {status} in a way that Sluice does not")
        do = str(document.get("do") or "")
        if status == http.client.UNAUTHORIZED:
            do = (
                "Give the option token or tokenFile (or SLUICE_TOKEN); `sluice token add` makes one"
            )
        elif status == http.client.FORBIDDEN:
            do = f"{do}. The role belongs to the option token or tokenFile"
        what = f"the broker at {self.where.display_url} says: {document.get('message') or code}"
        return Refused(code, what, do, document, status)

    def _not_sluice_error(self, problem: str) -> Refused:
        return Refused(
            "stranger",  # words: allowed
            f"{self.where.display_url} {problem}",
            "See whether the option url is the --http address of a Sluice of this version",
        )

    def _untrusted_error(self, fault: ssl.SSLCertVerificationError) -> InvalidOption:
        return InvalidOption(
            f"the certificate of {self.where.display_url} is not trusted: {fault.verify_message}",
            "Give the CA that signed it with the option ca or SLUICE_CA",
        )


def queue_path(queue: str, *more: str) -> str:
    """Return the path of a queue and what is below it. `$` replaces `/`: some proxies decode a
    percent-encoded slash.
    """
    name = quote_path_segment(queue.replace("/", "$"), safe="$")
    return "/".join(["/queues", name, *(quote_path_segment(one) for one in more)])


def is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, an incomplete IPv6 address
        return False


def find_proxy(target: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for an address; none for this machine."""
    if is_loopback(target.hostname or ""):
        return None
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    url = proxies.get(target.scheme) or proxies.get("all") or ""
    if not url or proxy_bypass(target.netloc.rpartition("@")[2]):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def encode_json(body: Mapping[str, object] | None) -> tuple[bytes, str]:
    """Return the body of a request and its content type."""
    if body is None:
        return b"", ""
    return json.dumps(body, separators=(",", ":")).encode(), "application/json"


def _basic_authorization(parts: SplitResult) -> str:
    """Return the header for user and password of a URL; "" if it has none."""
    if not parts.username:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def _check_token(token: str, option: str) -> str:
    """Return `token` if an HTTP header can carry it. The error never shows the token."""
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    raise InvalidOption(
        f"{option} contains a line break or another character that is not allowed in a token",
        "Give the token exactly as `sluice token add` printed it, on one line",
    )

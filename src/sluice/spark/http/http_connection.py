"""One HTTP connection to the broker: authentication, timeouts and retries.

A request that cannot be delivered is retried for `retry_seconds`, so a restart of the broker is an
interruption and not a failure. While the broker answers that it is busy with other clients, the
connection waits longer (up to MAX_BUSY_SECONDS). The module does not know what the requests mean.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from sluice.spark.errors import BrokerGone, InvalidOption, Refused

API_ROOT: Final = "/api/v1"
DEFAULT_URL: Final = "http://127.0.0.1:8080"
RETRY_SECONDS: Final = 60.0
RESPONSE_SECONDS: Final = 60.0  # a live broker gives up a request after half of that
CONNECT_SECONDS: Final = 10.0
MAX_BACKOFF_SECONDS: Final = 2.0
MAX_BUSY_SECONDS: Final = 3600.0  # how long the broker may serve other clients first
SERVICE_UNAVAILABLE: Final = 503
# The broker serves other clients first, and then this one.
RETRY_LATER_CODES: Final = (
    "too_many_readers",
    "stages_full",
)

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """The broker's address and credentials; defaults are in the environment, as for the CLI."""

    url: str = field(default_factory=lambda: os.environ.get("SLUICE_URL") or DEFAULT_URL)
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = field(default_factory=lambda: os.environ.get("SLUICE_CA", ""))
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        if not _is_http_url(self.url):
            raise InvalidOption(
                f"option url is {self.url!r}",
                f"Give the HTTP address of the broker, such as {DEFAULT_URL}; a port is 1 to 65535",
            )
        if not self.token and not self.token_file:
            object.__setattr__(self, "token", os.environ.get("SLUICE_TOKEN", "").strip())
            object.__setattr__(self, "token_file", os.environ.get("SLUICE_TOKEN_FILE", ""))

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


class HttpConnection:
    """One connection. The owner closes it, or uses `with`."""

    def __init__(self, where: Endpoint) -> None:
        self.where = where
        self._connection: http.client.HTTPConnection | None = None

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
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        content_type = "" if body is None else "application/json"
        return self._with_retries(
            lambda: self._read_json(self._send_request(method, path, data, content_type, seconds))
        )

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read())
        except ValueError:
            raise self._not_sluice_error("answers something else than JSON") from None

    def _with_retries(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until the broker answers.

        The first retry is immediate, because an idle connection may have been closed by the broker.
        Time that the broker spends on other clients does not count toward `retry_seconds`.
        """
        retrying_since = started = time.monotonic()
        pause = 0.0
        while True:
            try:
                return attempt()
            except ssl.SSLCertVerificationError as fault:
                raise InvalidOption(
                    f"the certificate of {self.where.url} is not trusted: {fault.verify_message}",
                    "Give the CA that signed it by the option ca or SLUICE_CA",
                ) from None
            except BrokerBusy as busy:
                self.close()
                why, refusal = busy.refusal.what, busy.refusal
            except (http.client.HTTPException, OSError) as fault:
                self.close()
                why, refusal = str(fault) or type(fault).__name__, None
            now = time.monotonic()
            if (
                refusal is not None
                and refusal.code in RETRY_LATER_CODES
                and now - started < MAX_BUSY_SECONDS
            ):
                retrying_since = now
            elif now - retrying_since + pause > self.where.retry_seconds:
                raise refusal or BrokerGone(self.where.url, self.where.retry_seconds, why)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(max(2 * pause, 0.1), MAX_BACKOFF_SECONDS)

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
        headers = {"Content-Type": content_type} if content_type else {}
        token = self.where.read_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection = self._connection
        # `sock` is None after a response with "Connection: close".
        if connection is None or connection.sock is None:
            connection = self._connect()
        connection.sock.settimeout(seconds)
        connection.request(
            method,
            f"{urlsplit(self.where.url).path.rstrip('/')}{API_ROOT}{path}",
            body or None,
            headers,
        )
        response = connection.getresponse()
        if response.status < 300:
            return response
        refusal = self._error_from_response(response.status, response.read())
        if response.status == SERVICE_UNAVAILABLE:
            raise BrokerBusy(refusal)
        raise refusal

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.where.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            try:
                trust = ssl.create_default_context(cafile=self.where.ca or None)
            except OSError as fault:
                raise InvalidOption(
                    f"option ca: {self.where.ca} cannot be used"
                    f" ({fault.strerror or 'it holds no certificate'})",
                    "Give a PEM file with a certificate, on the driver and on every executor",
                ) from None
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=CONNECT_SECONDS, context=trust
            )
        else:
            connection = http.client.HTTPConnection(
                parts.hostname, parts.port, timeout=CONNECT_SECONDS
            )
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        return connection

    def _error_from_response(self, status: int, body: bytes) -> Refused:
        try:
            document = json.loads(body)
            code, what, do = str(document["error"]), str(document["message"]), str(document["do"])
        except (ValueError, KeyError, TypeError):
            return self._not_sluice_error(f"answers {status} in a way that Sluice does not")
        if status == 401:
            do = (
                "Give the option token or tokenFile (or SLUICE_TOKEN); `sluice token add` makes one"
            )
        elif status == 403:
            do = f"{do}. The role belongs to the option token or tokenFile"
        return Refused(code, f"the broker at {self.where.url} says: {what}", do, document)

    def _not_sluice_error(self, problem: str) -> Refused:
        return Refused(
            "stranger",  # words: allowed
            f"{self.where.url} {problem}",
            "See whether the option url is the --http address of a Sluice of this version",
        )


class BrokerBusy(Exception):
    """The broker asks to retry later."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, an incomplete IPv6 address
        return False


def _check_token(token: str, option: str) -> str:
    """Return `token` if an HTTP header can carry it. The error never shows the token."""
    if all(" " <= character <= "~" or "\xa0" <= character <= "\xff" for character in token):
        return token
    raise InvalidOption(
        f"{option} contains a line break or another character that is not allowed in a token",
        "Give the token exactly as `sluice token add` printed it, on one line",
    )

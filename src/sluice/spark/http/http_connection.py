"""One connection to the broker: who asks, how long an answer may take, and what is said again.

Whatever could not be delivered is said again for `retry_seconds`: a broker that restarts is an interruption, not a
failure. A broker that asks to wait until others are done is waited for, as long as it says so.
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
RESPONSE_SECONDS: Final = 60.0  # of a broker that lives: it gives up a question after half of that
CONNECT_SECONDS: Final = 10.0
MAX_BACKOFF_SECONDS: Final = 2.0
MAX_BUSY_SECONDS: Final = 3600.0  # seconds for others to be done
SERVICE_UNAVAILABLE: Final = 503
RETRY_LATER_CODES: Final = (
    "too_many_readers",
    "stages_full",
)  # others are served, and we come next

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """The broker, and how to come in. What is not given comes from the environment, as for the command line."""

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
        """Read when it is needed: the file may be renewed while a stream runs."""
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
    """Whoever opens one closes it, or lets `with` do so."""

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
        """Until somebody answers: at once again first, because a connection that was kept may be one of yesterday. To
        stand in line is no failure, and does not count."""
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
        """Ask once. The answer has begun, and it is a good one; `seconds` without a byte of it are a failure."""
        headers = {"Content-Type": content_type} if content_type else {}
        token = self.where.read_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection = self._connection
        if (
            connection is None or connection.sock is None
        ):  # it is closed with an answer that says so
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
                    f"option ca: {self.where.ca} cannot be used ({fault.strerror or 'it holds no certificate'})",
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
            "stranger",
            f"{self.where.url} {problem}",
            "See whether the option url is the --http address of a Sluice of this version",
        )


class BrokerBusy(Exception):
    """The broker asks to come again later."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False


def _check_token(token: str, option: str) -> str:
    """As a header takes it. Never shown: whoever reads the error is not who may know it."""
    if all(" " <= character <= "~" or "\xa0" <= character <= "\xff" for character in token):
        return token
    raise InvalidOption(
        f"{option} holds a line break or another character that no token has",
        "Give the token as `sluice token add` has shown it, on one line and without anything else",
    )

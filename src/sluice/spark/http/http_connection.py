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

ROOT: Final = "/api/v1"
DEFAULT_URL: Final = "http://127.0.0.1:8080"
RETRY_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 60.0  # of a broker that lives: it gives up a question after half of that
CONNECT_SECONDS: Final = 10.0
LONGEST_PAUSE: Final = 2.0
LONGEST_QUEUE: Final = 3600.0  # seconds for others to be done
BUSY: Final = 503
IN_LINE: Final = ("too_many_readers", "stages_full")  # others are served, and we come next

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """The broker, and how to come in. What is not given comes from the environment, as for the command line."""

    url: str = field(default_factory=lambda: os.environ.get("SLUICE_URL") or DEFAULT_URL)
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = field(default_factory=lambda: os.environ.get("SLUICE_CA", ""))
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise InvalidOption(
                f"option url is {self.url!r}",
                f"Give the HTTP address of the broker, such as {DEFAULT_URL}; a port is 1 to 65535",
            )
        if not self.token and not self.token_file:
            object.__setattr__(self, "token", os.environ.get("SLUICE_TOKEN", "").strip())
            object.__setattr__(self, "token_file", os.environ.get("SLUICE_TOKEN_FILE", ""))

    def present_token(self) -> str:
        """Read when it is needed: the file may be renewed while a stream runs."""
        if self.token or not self.token_file:
            return _sendable(self.token, "option token (or SLUICE_TOKEN)")
        option = f"option tokenFile: {self.token_file}"
        try:
            return _sendable(Path(self.token_file).read_text("utf-8", "replace").strip(), option)
        except OSError as fault:
            raise InvalidOption(
                f"{option} cannot be read on {socket.gethostname()} ({fault.strerror})",
                "Put it on the driver and on every executor, or use the option token",
            ) from None


class Line:
    """Whoever opens one closes it, or lets `with` do so."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._line: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _plug(self) -> socket.socket | None:
        return None if self._line is None else self._line.sock

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS
    ) -> Any:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        kind = "" if body is None else "application/json"
        return self._patiently(lambda: self._read(self._send(method, path, data, kind, seconds)))

    def _read(self, answer: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(answer.read())
        except ValueError:
            raise self._stranger("answers something else than JSON") from None

    def _patiently(self, once: Callable[[], T]) -> T:
        """Until somebody answers: at once again first, because a connection that was kept may be one of yesterday. To
        stand in line is no failure, and does not count."""
        began = since = time.monotonic()
        pause = 0.0
        while True:
            try:
                return once()
            except ssl.SSLCertVerificationError as fault:
                raise InvalidOption(
                    f"the certificate of {self.where.url} is not trusted: {fault.verify_message}",
                    "Give the CA that signed it by the option ca or SLUICE_CA",
                ) from None
            except Busy as busy:
                self.close()
                why, refusal = busy.refusal.what, busy.refusal
            except (http.client.HTTPException, OSError) as fault:
                self.close()
                why, refusal = str(fault) or type(fault).__name__, None
            now = time.monotonic()
            if refusal is not None and refusal.code in IN_LINE and now - since < LONGEST_QUEUE:
                began = now
            elif now - began + pause > self.where.retry_seconds:
                raise refusal or BrokerGone(self.where.url, self.where.retry_seconds, why)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(max(2 * pause, 0.1), LONGEST_PAUSE)

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        kind: str = "",
        seconds: float = ANSWER_SECONDS,
    ) -> http.client.HTTPResponse:
        """Ask once. The answer has begun, and it is a good one; `seconds` without a byte of it are a failure."""
        headers = {"Content-Type": kind} if kind else {}
        token = self.where.present_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        line = self._line
        if line is None or line.sock is None:  # it is closed with an answer that says so
            line = self._connect()
        line.sock.settimeout(seconds)
        line.request(
            method, f"{urlsplit(self.where.url).path.rstrip('/')}{ROOT}{path}", body or None, headers
        )
        answer = line.getresponse()
        if answer.status < 300:
            return answer
        refusal = self._refusal(answer.status, answer.read())
        if answer.status == BUSY:
            raise Busy(refusal)
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
            line: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=CONNECT_SECONDS, context=trust
            )
        else:
            line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
        line.connect()
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line = line
        return line

    def _refusal(self, status: int, body: bytes) -> Refused:
        try:
            told = json.loads(body)
            code, what, do = str(told["error"]), str(told["message"]), str(told["do"])
        except (ValueError, KeyError, TypeError):
            return self._stranger(f"answers {status} in a way that Sluice does not")
        if status == 401:
            do = "Give the option token or tokenFile (or SLUICE_TOKEN); `sluice token add` makes one"
        elif status == 403:
            do = f"{do}. The role belongs to the option token or tokenFile"
        return Refused(code, f"the broker at {self.where.url} says: {what}", do, told)

    def _stranger(self, how: str) -> Refused:
        return Refused(
            "stranger",
            f"{self.where.url} {how}",
            "See whether the option url is the --http address of a Sluice of this version",
        )


class Busy(Exception):
    """The broker asks to come again later."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False


def _sendable(token: str, option: str) -> str:
    """As a header takes it. Never shown: whoever reads the error is not who may know it."""
    if all(" " <= one <= "~" or "\xa0" <= one <= "\xff" for one in token):
        return token
    raise InvalidOption(
        f"{option} holds a line break or another character that no token has",
        "Give the token as `sluice token add` has shown it, on one line and without anything else",
    )

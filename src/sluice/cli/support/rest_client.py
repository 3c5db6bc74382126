"""The REST API as calls: a path and its parameters in, the response as JSON values out.

Each request is sent once. Each failure becomes a `CommandError` with the server's text and remedy.
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import unquote, urlencode

from sluice import http_client
from sluice.cli.support.errors import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    CommandError,
    name_flags,
    usage_error,
)
from sluice.http_client import Endpoint, HttpClient, Refused, encode_json

CONNECT_SECONDS: Final = 5.0
STREAM_IDLE_SECONDS: Final = 15.0  # the live stream sends each second
PAGE_SIZE: Final = 1000
TOKEN_REMEDY: Final = (
    "Give a token: SLUICE_TOKEN, --token-file or --token; `sluice token add` makes one"
)


def queue_path(name: str, *more: str) -> str:
    """Return the path of a queue and what is below it."""
    plain = name.removeprefix("$queue/")
    if not plain or "$" in plain:
        raise usage_error(
            f"{name!r} is not a valid queue name", "Name one as in tasks/image, without $, + and #"
        )
    return http_client.queue_path(plain, *more)


class UnknownName(CommandError):
    """The broker has no such queue, or no such group of the queue."""

    def __init__(self, code: str, what: str, remedy: str) -> None:
        super().__init__(what, remedy, EXIT_NOT_FOUND)
        self.refusal_code = code


def similar_names(given: str, names: Iterable[str]) -> list[str]:
    """Return up to two names that look like a mistyped one."""
    return get_close_matches(given, list(names), 2, 0.6)


class RestClient(HttpClient):
    def __init__(
        self, broker: Endpoint, response_seconds: float = http_client.RESPONSE_SECONDS
    ) -> None:
        super().__init__(broker, min(CONNECT_SECONDS, response_seconds), use_proxy=True)
        self._response_seconds = response_seconds

    def get(self, path: str, **parameters: object) -> Any:
        given = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
        return self._call("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        return self._call("POST", path, body or {})

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def queues(self, prefix: str = "") -> list[dict[str, Any]]:
        """Return all queues, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1]["name"] if found else ""
            page: list[dict[str, Any]] = self.get(
                "/queues", prefix=prefix, after=after, limit=PAGE_SIZE
            )
            found += page
            if len(page) < PAGE_SIZE:
                return found

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and data of server-sent events, until the server ends the stream.

        The stream has a connection of its own, so that a thread can read it.
        """
        with HttpClient(self.where, CONNECT_SECONDS, use_proxy=True) as stream, self._translate():
            response = stream._send_request("GET", path, seconds=STREAM_IDLE_SECONDS)
            name, data = "message", ""
            for line in (raw.decode("utf-8").rstrip("\r\n") for raw in response):
                if not line and data:
                    yield name, json.loads(data)
                    name, data = "message", ""
                elif line.startswith("event:"):
                    name = line[6:].strip()
                elif line.startswith("data:"):
                    data += line[5:].removeprefix(" ")

    def _call(self, verb: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            return self._call_once(verb, path, body)
        except UnknownName as unknown:
            similar = self._similar_names(path, unknown)
            if similar:
                remedy = f"Did you mean {' or '.join(similar)}?"
                raise CommandError(unknown.what, remedy, EXIT_NOT_FOUND) from None
            raise

    def _similar_names(self, path: str, unknown: UnknownName) -> list[str]:
        """Return names that exist and look like the one in `path`; none if that cannot be asked."""
        _, _, queue, *rest = path.partition("?")[0].split("/")
        try:
            if unknown.refusal_code == "unknown_queue":
                given, listed = unquote(queue).replace("$", "/"), "/queues"
            elif rest[:1] == ["groups"] and len(rest) > 1:
                given, listed = unquote(rest[1]), f"/queues/{queue}/groups"
            else:
                return []
            names = [row["name"] for row in self._call_once("GET", f"{listed}?limit={PAGE_SIZE}")]
        except (CommandError, LookupError, TypeError, ValueError):
            return []
        return similar_names(given, names)

    def _call_once(self, verb: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        idle = self._socket()
        # Only the end of an idle connection makes it readable. It may have ended while the command
        # waited for the user, and a request must not be sent twice.
        if idle is not None and select.select([idle], [], [], 0)[0]:
            self.close()
        with self._translate():
            return self._read_json(
                self._send_request(verb, path, *encode_json(body), self._response_seconds)
            )

    @contextmanager
    def _translate(self) -> Iterator[None]:
        """Turn the errors of a request into a `CommandError`."""
        try:
            yield
        except Refused as refusal:
            raise _error_from_refusal(refusal) from None
        except ssl.SSLCertVerificationError as fault:
            untrusted = self._untrusted_error(fault)
            raise CommandError(
                untrusted.what, name_flags(untrusted.remedy), EXIT_UNREACHABLE
            ) from None
        except (http.client.HTTPException, OSError) as fault:
            self.close()
            what, do = _describe_failure(fault, self.where)
            raise CommandError(what, do, EXIT_UNREACHABLE) from None


def _describe_failure(fault: Exception, where: Endpoint) -> tuple[str, str]:
    """Return what failed and what to do, without texts of libraries that users cannot act on."""
    url = where.display_url
    name_address = "name its --http address by --url or SLUICE_URL"
    if isinstance(fault, TimeoutError):
        return (
            f"the broker at {url} takes too long to answer",
            f"Check that `sluice serve` runs there, and {name_address}",
        )
    if isinstance(fault, ssl.SSLError):
        return (
            f"{url} does not answer in TLS",
            "Write http:// if that port has no TLS, or name another port by --url or SLUICE_URL",
        )
    if isinstance(fault, http.client.HTTPException | ConnectionResetError | BrokenPipeError):
        return (
            f"{url} accepts connections, but does not answer in HTTP",
            "It may be the MQTT port, or a port with TLS (https://): " + name_address,
        )
    cause = getattr(fault, "strerror", None)
    return (
        f"the broker at {url} cannot be reached{f': {cause.lower()}' if cause else ''}",
        f"Check that `sluice serve` runs there, and {name_address}",
    )


def _error_from_refusal(refusal: Refused) -> CommandError:
    if not refusal.facts:  # the server is not Sluice
        return CommandError(refusal.what, name_flags(refusal.remedy), EXIT_UNREACHABLE)
    advice = str(refusal.facts.get("do") or "")
    if refusal.code in ("unknown_queue", "unknown_group"):
        return UnknownName(refusal.code, str(refusal.facts.get("message")), advice)
    return CommandError(
        str(refusal.facts.get("message") or refusal.code),
        TOKEN_REMEDY if refusal.status == http.client.UNAUTHORIZED else advice,
        EXIT_NOT_FOUND if refusal.status == http.client.NOT_FOUND else EXIT_FAILED,
    )

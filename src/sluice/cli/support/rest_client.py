"""The REST API as calls: a path and its parameters in, the response as JSON values out.

The module knows HTTP, and of queues only how their names are encoded in a path. Each failure
becomes a `CommandError` with the server's text and remedy.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final

import httpx

from sluice.cli.support.errors import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    CommandError,
    usage_error,
)
from sluice.cli.support.options import BrokerAddress
from sluice.process.logs import hide_secrets
from sluice.units import quote_path_segment

CONNECT_SECONDS: Final = 5.0
RESPONSE_SECONDS: Final = 60.0
STREAM_IDLE_SECONDS: Final = 15.0  # the live stream sends each second
PAGE_SIZE: Final = 1000


def queue_path(name: str, *more: str) -> str:
    """Return the path of a queue and what is below it. `$` replaces `/`: some proxies decode a
    percent-encoded slash.
    """
    plain = name.removeprefix("$queue/")
    if not plain or "$" in plain:
        raise usage_error(
            f"{name!r} is not a valid queue name", "Name one as in tasks/image, without $, + and #"
        )
    return "/".join(
        [
            "queues",
            quote_path_segment(plain.replace("/", "$"), safe="$"),
            *(quote_path_segment(one) for one in more),
        ]
    )


class RestClient:
    def __init__(self, broker: BrokerAddress, response_seconds: float = RESPONSE_SECONDS) -> None:
        self.display_url = hide_secrets(broker.url)
        headers = {"Accept": "application/json"}
        if broker.token:
            headers["Authorization"] = f"Bearer {broker.token}"
        # A loopback address means this machine; HTTP_PROXY does not apply.
        self._http = httpx.Client(
            base_url=f"{broker.url}/api/v1/",
            headers=headers,
            timeout=httpx.Timeout(response_seconds, connect=min(CONNECT_SECONDS, response_seconds)),
            verify=tls_context(broker) if broker.url.startswith("https") else True,
            trust_env=not _is_loopback(broker.host),
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: object) -> Any:
        return self._request("GET", path, parameters)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        return self._request("POST", path, {}, body or {})

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._request("PUT", path, {}, body)

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path, {})

    def queues(self, prefix: str = "") -> list[dict[str, Any]]:
        """Return all queues, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1]["name"] if found else ""
            page: list[dict[str, Any]] = self.get(
                "queues", prefix=prefix, after=after, limit=PAGE_SIZE
            )
            found += page
            if len(page) < PAGE_SIZE:
                return found

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and data of server-sent events, until the server ends the stream."""
        headers = {"Accept": "text/event-stream"}
        try:
            with self._http.stream(
                "GET", path, headers=headers, timeout=STREAM_IDLE_SECONDS
            ) as response:
                if response.status_code >= 400:
                    response.read()
                self._raise_for_status(response)
                name, data = "message", ""
                for line in response.iter_lines():
                    if not line and data:
                        yield name, json.loads(data)
                        name, data = "message", ""
                    elif line.startswith("event:"):
                        name = line[6:].strip()
                    elif line.startswith("data:"):
                        data += line[5:].removeprefix(" ")
        except httpx.TransportError as fault:
            raise self._unreachable_error(fault) from None

    def _request(
        self,
        verb: str,
        path: str,
        parameters: Mapping[str, object],
        body: Mapping[str, object] | None = None,
    ) -> Any:
        params = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
        try:
            response = self._http.request(verb, path, params=params, json=body)
        except httpx.TransportError as fault:
            raise self._unreachable_error(fault) from None
        self._raise_for_status(response)
        if response.status_code == httpx.codes.NO_CONTENT or not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise self._not_sluice_error(
                f"answers with {response.headers.get('content-type', 'nothing')}, not JSON"
            ) from None

    def _raise_for_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict) or "error" not in document:
            raise self._not_sluice_error(
                f"answers {response.status_code} in a way that Sluice does not"
            )
        code = EXIT_NOT_FOUND if response.status_code == httpx.codes.NOT_FOUND else EXIT_FAILED
        advice = str(document.get("do") or "")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            advice = (
                "Give a token: SLUICE_TOKEN, --token-file or --token; `sluice token add` makes one"
            )
        raise CommandError(str(document.get("message") or document["error"]), advice, code)

    def _unreachable_error(self, fault: httpx.TransportError) -> CommandError:
        why = (
            "takes too long to answer"
            if isinstance(fault, httpx.TimeoutException)
            else "cannot be reached"
        )
        cause: BaseException = fault
        while (below := cause.__cause__ or cause.__context__) is not None:
            cause = below
        if isinstance(cause, ssl.SSLCertVerificationError):
            return CommandError(
                f"the certificate of {self.display_url} is not trusted: {cause.verify_message}",
                "Give the CA that signed it with --ca or SLUICE_CA",
                EXIT_UNREACHABLE,
            )
        return CommandError(
            f"the broker at {self.display_url} {why}",
            "See whether `sluice serve` runs there, and name its --http address"
            " by --url or SLUICE_URL",
            EXIT_UNREACHABLE,
        )

    def _not_sluice_error(self, problem: str) -> CommandError:
        return CommandError(
            f"{self.display_url} {problem}",
            "See whether that is the --http address of a Sluice of this version",
            EXIT_UNREACHABLE,
        )


def tls_context(broker: BrokerAddress) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=broker.ca)
    except (OSError, ssl.SSLError) as fault:
        raise usage_error(
            f"cannot use the CA in {broker.ca}: {fault.strerror or 'it holds no certificate'}",
            "Give --ca a PEM file with a certificate",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The REST door as calls: a path and its parameters in, the answer as JSON values out.

Knows HTTP and nothing of queues beyond how their names stand in a path. Every way in which it can go wrong becomes a
`Failure` with the server's own words and its own advice.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final

import httpx

from sluice.cli.support.errors import NOT_FOUND, NOT_REACHABLE, REFUSED, Failure, wrong_command
from sluice.cli.support.options import Where
from sluice.process.logs import hide_secrets
from sluice.units import path_segment

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 15.0  # the live stream speaks each second
PAGE: Final = 1000


def of_queue(name: str, *more: str) -> str:
    """The path of a queue and what is below it. `$` stands for `/`: some proxies undo a percent-encoded slash."""
    plain = name.removeprefix("$queue/")
    if not plain or "$" in plain:
        raise wrong_command(f"{name!r} cannot be a queue", "Name one as in tasks/image, without $, + and #")
    return "/".join(
        ["queues", path_segment(plain.replace("/", "$"), safe="$"), *(path_segment(one) for one in more)]
    )


class Api:
    def __init__(self, where: Where, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.shown = hide_secrets(where.url)
        headers = {"Accept": "application/json"}
        if where.token:
            headers["Authorization"] = f"Bearer {where.token}"
        # What a loopback address means is this machine, not whatever HTTP_PROXY names.
        self._http = httpx.Client(
            base_url=f"{where.url}/api/v1/",
            headers=headers,
            timeout=httpx.Timeout(answer_seconds, connect=min(CONNECT_SECONDS, answer_seconds)),
            verify=tls_context(where) if where.url.startswith("https") else True,
            trust_env=not _is_loopback(where.host),
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: object) -> Any:
        return self._ask("GET", path, parameters)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        return self._ask("POST", path, {}, body or {})

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._ask("PUT", path, {}, body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path, {})

    def queues(self, prefix: str = "") -> list[dict[str, Any]]:
        """All of them, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1]["name"] if found else ""
            page: list[dict[str, Any]] = self.get("queues", prefix=prefix, after=after, limit=PAGE)
            found += page
            if len(page) < PAGE:
                return found

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Server-sent events: the name and the data of each, until the server ends the stream."""
        headers = {"Accept": "text/event-stream"}
        try:
            with self._http.stream("GET", path, headers=headers, timeout=SILENT_SECONDS) as answer:
                if answer.status_code >= 400:
                    answer.read()
                self._check(answer)
                name, data = "message", ""
                for line in answer.iter_lines():
                    if not line and data:
                        yield name, json.loads(data)
                        name, data = "message", ""
                    elif line.startswith("event:"):
                        name = line[6:].strip()
                    elif line.startswith("data:"):
                        data += line[5:].removeprefix(" ")
        except httpx.TransportError as fault:
            raise self._unreachable(fault) from None

    def _ask(
        self, verb: str, path: str, parameters: Mapping[str, object], body: Mapping[str, object] | None = None
    ) -> Any:
        asked = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
        try:
            answer = self._http.request(verb, path, params=asked, json=body)
        except httpx.TransportError as fault:
            raise self._unreachable(fault) from None
        self._check(answer)
        if answer.status_code == httpx.codes.NO_CONTENT or not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            raise self._stranger(
                f"answers with {answer.headers.get('content-type', 'nothing')}, not JSON"
            ) from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            told = answer.json()
        except ValueError:
            told = None
        if not isinstance(told, dict) or "error" not in told:
            raise self._stranger(f"answers {answer.status_code} in a way that Sluice does not")
        code = NOT_FOUND if answer.status_code == httpx.codes.NOT_FOUND else REFUSED
        advice = str(told.get("do") or "")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            advice = "Give a token: SLUICE_TOKEN, --token-file or --token; `sluice token add` makes one"
        raise Failure(str(told.get("message") or told["error"]), advice, code)

    def _unreachable(self, fault: httpx.TransportError) -> Failure:
        why = "takes too long to answer" if isinstance(fault, httpx.TimeoutException) else "cannot be reached"
        cause: BaseException = fault
        while (below := cause.__cause__ or cause.__context__) is not None:
            cause = below
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure(
                f"the certificate of {self.shown} is not trusted: {cause.verify_message}",
                "Give the CA that signed it with --ca or SLUICE_CA",
                NOT_REACHABLE,
            )
        return Failure(
            f"the broker at {self.shown} {why}",
            "See whether `sluice serve` runs there, and name its --http address by --url or SLUICE_URL",
            NOT_REACHABLE,
        )

    def _stranger(self, how: str) -> Failure:
        return Failure(
            f"{self.shown} {how}",
            "See whether that is the --http address of a Sluice of this version",
            NOT_REACHABLE,
        )


def tls_context(where: Where) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=where.ca)
    except (OSError, ssl.SSLError) as fault:
        raise wrong_command(
            f"cannot use the CA in {where.ca}: {fault.strerror or 'it holds no certificate'}",
            "Give --ca a PEM file with a certificate",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""A fake REST API that returns what a test sets, and records requests.

It has the paths and field names of the REST API. The real one is tested with a real broker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class RecordedRequest:
    def __init__(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(target)
        self.verb = verb
        self.path = parts.path.removeprefix("/api/v1/")
        self.query = dict(parse_qsl(parts.query))
        self.headers = headers
        self.body = json.loads(body) if body else None


class FakeApi:
    """`responses` maps "GET queues" to a value (200), a refusal, or a function of the request."""

    def __init__(self) -> None:
        self.responses: dict[str, Any] = {"GET losses": []}
        self.requests: list[RecordedRequest] = []
        self.url = ""

    @property
    def last(self) -> RecordedRequest:
        return self.requests[-1]

    def calls(self) -> list[str]:
        return [f"{one.verb} {one.path}" for one in self.requests]


class Refusal:
    def __init__(self, status: int, error: str, message: str, do: str) -> None:
        self.status = status
        self.body = {"error": error, "message": message, "do": do}


class Raw:
    """A response that Sluice would never give, or a stream of events."""

    def __init__(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.status = status
        self.kind = kind
        self.body = body
        self.headers = headers


def events(*pairs: tuple[str, object]) -> Raw:
    body = "".join(
        f": still here\n\nevent: {name}\ndata: {json.dumps(data)}\n\n" for name, data in pairs
    )
    return Raw(200, "text/event-stream", body.encode())


@contextmanager
def serve_fake_api() -> Iterator[FakeApi]:
    api = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = RecordedRequest(self.command, self.path, dict(self.headers.items()), body)
            api.requests.append(asked)
            response = api.responses.get(f"{asked.verb} {asked.path}")
            if callable(response):
                response = response(asked)
            if f"{asked.verb} {asked.path}" not in api.responses:
                response = Refusal(
                    404, "no_such_page", f"the test has no answer to {asked.verb} {asked.path}", ""
                )
            status, kind, text, more = 200, "application/json", b"", {}
            if isinstance(response, Raw):
                status, kind, text, more = (
                    response.status,
                    response.kind,
                    response.body,
                    response.headers,
                )
            elif isinstance(response, Refusal):
                status, text = response.status, json.dumps(response.body).encode()
            elif response is None:
                status = 204
            else:
                text = json.dumps(response).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(text)),
                **more,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def do_DELETE(self) -> None:
            self.answer()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def queue_view(name: str = "jobs", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "work",
        "ordering": "partition",
        "partitions": 10,
        "depth": 0,
        "max_depth": 100_000,
        "bytes": 0,
        "inflight": 0,
        "retrying": 0,
        "dlq": f"dlq/{name}",
        "dlq_depth": 0,
        "enqueue_rate": 0.0,
        "deliver_rate": 0.0,
        "ack_rate": 0.0,
        "enqueued": 0,
        "acked": 0,
        "duplicates": 0,
        "refused": 0,
        "retried": 0,
        "dead": {},
        "active_consumers": 0,
        "partitions_assigned": 0,
        "groups": 0,
        "is_dead_letters": False,
        "created_at": "2026-03-01T12:00:00.000Z",
        **more,
    }


def group_view(name: str = "work", **more: Any) -> dict[str, Any]:
    ledger = {"enqueued": 9, "waiting": 4, "delivered": 1, "retrying": 1, "acked": 2, "dead": 1}
    return {
        "name": name,
        "lag": 6,
        "ledger": {**ledger, "expired": 0, "purged": 0},
        "floors": [3, 0],
        "oldest_at": "2026-03-01T12:00:00.000Z",
        "redelivered": 1,
        "nacked": 2,
        "consumers": [],
        **more,
    }


def consumer_view(client: str = "worker-1", **more: Any) -> dict[str, Any]:
    return {
        "client": client,
        "group": "work",
        "partitions": [0, 1, 2, 5],
        "inflight": 3,
        "prefetch": 100,
        "priority": 0,
        "exclusive": False,
        "connected": True,
        "stalled": False,
        "slow": False,
        "settled_at": "2026-03-01T12:00:00.000Z",
        **more,
    }


def message_view(
    message_id: str = "m-1", payload: str | None = "hello", **more: Any
) -> dict[str, Any]:
    return {
        "message_id": message_id,
        "queue": "jobs",
        "partition": 3,
        "sequence": 17,
        "key": "",
        "priority": 0,
        "size": len(payload or "xx"),
        "payload": payload,
        "payload_base64": "//8=",
        "enqueued_at": "2026-03-01T12:00:00.000Z",
        "expires_at": None,
        "deliver_at": None,
        "topic": "",
        "content_type": "",
        "response_topic": "",
        "correlation_data": "",
        "correlation_data_base64": "",
        "properties": [],
        "headers": {},
        "state": "waiting",
        "attempt": 0,
        "consumer": "",
        **more,
    }


def dead_letter_view(message_id: str, reason: str = "max_retries", **more: Any) -> dict[str, Any]:
    headers = {
        "original-queue": "jobs",
        "original-message-id": f"was-{message_id}",
        "original-group": "work",
        "dead-reason": reason,
        "dead-description": "not an image",
        "dead-at": "2026-03-01T12:00:00.000Z",
        "attempts": "3",
        "history": "[]",
        "rejectionReason": "delivery-error",
    }
    return message_view(message_id, "broken.png", headers=headers, queue="dlq/jobs", **more)


def node_view(**more: Any) -> dict[str, Any]:
    counted = (
        "connections sessions subscriptions retained queues messages "
        "bytes_received bytes_sent packets_received "
        "packets_sent publishes_received publishes_sent publishes_dropped"
    )
    return {
        "name": "local",
        "version": "0.1.0",
        "build": "compiled",
        "store": "embedded",
        "started_at": "2026-03-01T12:00:00.000Z",
        "now": "2026-03-01T14:05:00.000Z",
        **dict.fromkeys(counted.split(), 0),
        "stopping": False,
        **more,
    }


def trace_view(**more: Any) -> dict[str, Any]:
    def event(at: str, what: str, **fields: Any) -> dict[str, Any]:
        blank = {"group": "", "consumer": "", "attempt": 0, "detail": ""}
        return {"at": f"2026-03-01T12:00:{at}Z", "what": what, **blank, **fields}

    return {
        "message_id": "m-1",
        "queue": "jobs",
        "message": None,
        "states": [
            {
                "group": "work",
                "state": "dead",
                "consumer": "worker-1",
                "attempt": 1,
                "failures": 1,
                "due": None,
                "deadline": None,
                "why": "It failed more often than retry_policy.max_retries allows.",
                "do": "sluice dlq retry jobs m-1",
            }
        ],
        "events": [
            event("00.000", "enqueued"),
            event("01.500", "delivered", group="work", consumer="worker-1", attempt=1),
            event(
                "01.600",
                "nacked",
                group="work",
                consumer="worker-1",
                attempt=1,
                detail="not an image",
            ),
            event("01.600", "dead", group="work", attempt=1, detail="max_retries"),
        ],
        "dead_letters": ["9-0"],
        "summary": "m-1 is dead: it failed once in group work.",
        **more,
    }

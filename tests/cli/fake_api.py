"""A fake REST API that returns what a test sets, and records requests.

It has the paths and field names of the REST API. The real one is tested with a real broker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from sluice.admin import model
from sluice.admin.rest.schemas.json_models import to_json


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


# ---- resources as the REST API shows them: blank, but for the given fields

AT = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def blank(kind: Any, **given: Any) -> Any:
    """Return a resource of `admin.model` whose other fields are empty, 0 or false."""
    hints = get_type_hints(kind)
    empty = {
        name: None if NoneType in get_args(hint) else (get_origin(hint) or hint)()
        for name, hint in hints.items()
        if name not in given
    }
    return kind(**empty, **given)


def show(resource: object, more: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a resource, with other values for some of its fields."""
    return {**json.loads(to_json(type(resource), resource)), **more}


def queue_view(name: str = "jobs", **more: Any) -> dict[str, Any]:
    queue = blank(
        model.Queue,
        name=name,
        type="work",
        ordering="partition",
        partitions=10,
        max_depth=100_000,
        dlq=f"dlq/{name}",
        created_at=AT,
    )
    return show(queue, more)


def group_view(name: str = "work", **more: Any) -> dict[str, Any]:
    ledger = model.Ledger(9, 4, 1, 1, 2, 1, 0, 0, 0)
    group = model.Group(
        name,
        6,
        ledger,
        [3, 0],
        AT,
        redelivered=1,
        nacked=2,
        pause=None,
        breaker="closed",
        held_by=[],
        held_keys=[],
        consumers=[],
    )
    return show(group, more)


def consumer_view(client: str = "worker-1", **more: Any) -> dict[str, Any]:
    consumer = blank(
        model.Consumer,
        client=client,
        group="work",
        partitions=[0, 1, 2, 5],
        inflight=3,
        prefetch=100,
        connected=True,
        settled_at=AT,
    )
    return show(consumer, more)


def message_view(
    message_id: str = "m-1", payload: str | None = "hello", **more: Any
) -> dict[str, Any]:
    data = b"\xff\xff" if payload is None else payload.encode()
    message = blank(
        model.Message,
        message_id=message_id,
        queue="jobs",
        partition=3,
        sequence=17,
        size=len(data),
        payload=data,
        enqueued_at=AT,
        state="waiting",
    )
    return show(message, more)


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
        "rejectionReason": "DeliveryError",
    }
    return message_view(message_id, "broken.png", headers=headers, queue="dlq/jobs", **more)


def node_view(**more: Any) -> dict[str, Any]:
    node = blank(
        model.Node,
        name="local",
        version="0.1.0",
        build="compiled",
        store="embedded",
        started_at=AT,
        now=AT + 7500.0,
    )
    return show(node, more)


def trace_view(**more: Any) -> dict[str, Any]:
    state = blank(
        model.GroupState,
        group="work",
        state="dead",
        consumer="worker-1",
        attempt=1,
        failures=1,
        why="It failed more often than retry_policy.max_retries allows.",
        do="sluice dlq retry jobs m-1",
    )
    events = [
        model.Event(AT, "enqueued"),
        model.Event(AT + 1.5, "delivered", "work", "worker-1", 1),
        model.Event(AT + 1.6, "nacked", "work", "worker-1", 1, "not an image"),
        model.Event(AT + 1.6, "dead", "work", attempt=1, detail="max_retries"),
    ]
    summary = "m-1 is dead: it failed once in group work."
    return show(model.MessageTrace("m-1", "jobs", None, [state], events, ["9-0"], summary), more)

"""Errors of the REST API: one table from error classes to statuses, one shape for every refusal.

    {"error": "unknown_queue", "message": "there is no queue 'tasks'", "do": "Publish ..."}

`error` is for programs (the class in snake case), `message` and `do` are for people. An error that
is not in the table is a bug: 500, with the traceback in the log and not in the response.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from sluice.errors import (
    BatchTooLarge,
    ConfigError,
    InvalidBatch,
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    MessageTooLarge,
    NoArrow,
    NotAllowed,
    NotAuthenticated,
    OutOfRange,
    QueueError,
    SluiceError,
    StagesFull,
    StoreError,
    StoreUnavailable,
    TooManyReaders,
    UnknownDelivery,
    UnknownGroup,
    UnknownLoss,
    UnknownMessage,
    UnknownPartition,
    UnknownQueue,
    UnknownSchedule,
    WorkerLost,
)


class InvalidRequest(SluiceError):
    """A path, query or body is not readable."""


class NoSuchPage(SluiceError):
    def __init__(self, path: str) -> None:
        super().__init__(
            f"there is nothing at {path}", "The page /docs of this broker lists the paths"
        )


class WrongMethod(SluiceError):
    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"{method} is not allowed at {path}", "The header Allow lists the methods")


class BodyTooLarge(SluiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than the limit of {limit} bytes",
            "Send less, or raise mqtt.max_packet_size on the server",
        )


class BodyTooSlow(SluiceError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body did not arrive within {seconds:.0f} seconds", "Send it again")


class UploadTooSlow(BodyTooSlow):
    def __init__(self, size: int, seconds: float, rate: int) -> None:
        SluiceError.__init__(
            self,
            f"only {size} bytes of the body arrived in {seconds:.0f} seconds, and at least {rate}"
            " bytes a second are expected",
            "Send it over a faster connection, or make smaller batches",
        )


class BodyBrokenOff(SluiceError):
    """The client has disconnected, so this is never sent."""

    def __init__(self) -> None:
        super().__init__("the connection ended before the body did", "Send it again")


class NotJson(SluiceError):
    def __init__(self, given: str) -> None:
        super().__init__(
            f"the body is {given or 'of no named type'}, and this API reads JSON",
            "Send it with Content-Type: application/json (curl --json does)",
        )


class NotArrow(SluiceError):
    def __init__(self, given: str) -> None:
        super().__init__(
            f"the body is {given or 'of no named type'}, and rows are sent as an Arrow stream",
            "Send it with Content-Type: application/vnd.apache.arrow.stream",
        )


class DotsInPath(SluiceError):
    def __init__(self) -> None:
        super().__init__(
            "the path has a level that is '.' or '..'",
            "Write a name of dots as %2E or %2E%2E, or leave the level out",
        )


class ForeignOrigin(SluiceError):
    def __init__(self, origin: str) -> None:
        super().__init__(
            f"a page of {origin} tries to change something here",
            "Pages of other sites may not do that. A proxy must forward the Host header of the"
            " browser",
        )


class ForeignHost(SluiceError):
    def __init__(self, host: str) -> None:
        super().__init__(
            f"this server is not called {host}",
            "Use the address (such as 127.0.0.1) or localhost, or set up users or tokens and send"
            " one",
        )


class QueuesDisabled(SluiceError):
    def __init__(self) -> None:
        super().__init__(
            "queues are disabled on this server", "Set queues.enabled = true and restart it"
        )


class Busy(SluiceError):
    """Too many requests at once, or the broker's loop did not answer in time."""


class RemoteRefusal(SluiceError):
    """A refusal by another node, with its own code and text."""

    def __init__(self, status: int, code: str, resource: str, remedy: str) -> None:
        super().__init__(resource, remedy)
        self.status = status
        self.code = code


class Stopping(SluiceError):
    def __init__(self) -> None:
        super().__init__("the server is stopping", "Try again when it is back")


# The first match counts.
STATUS_CODES: Final[tuple[tuple[type[SluiceError], int], ...]] = (
    (InvalidRequest, 400),
    (InvalidQueueName, 400),
    (InvalidQueueConfig, 400),
    (InvalidPayload, 400),
    (InvalidBatch, 400),
    (ConfigError, 400),
    (NotAuthenticated, 401),
    (NotAllowed, 403),
    (ForeignOrigin, 403),
    (ForeignHost, 403),
    (NoSuchPage, 404),
    (UnknownQueue, 404),
    (UnknownLoss, 404),
    (UnknownGroup, 404),
    (UnknownMessage, 404),
    (UnknownDelivery, 404),
    (UnknownPartition, 404),
    (UnknownSchedule, 404),
    (WrongMethod, 405),
    (BodyTooSlow, 408),
    (BodyTooLarge, 413),
    (MessageTooLarge, 413),
    (BatchTooLarge, 413),
    (NotJson, 415),
    (NotArrow, 415),
    (OutOfRange, 410),
    (NoArrow, 501),
    (StagesFull, 503),
    (WorkerLost, 503),
    (TooManyReaders, 503),
    (StoreError, 503),
    (StoreUnavailable, 503),
    (Busy, 503),
    (Stopping, 503),
    (QueuesDisabled, 409),
    (QueueError, 409),  # it exists, it is full, it is in use
    (SluiceError, 400),
)

# The meaning of each status, for the documentation.
STATUS_MEANINGS: Final = {
    400: "Something in the request is invalid; `message` names it and what is allowed",
    401: "The credentials are missing or invalid",
    403: "The role does not allow it, or a page of another site sent the request",
    404: "There is no such queue, group or message",
    405: "The path has other methods",
    408: "The body did not arrive in time",
    409: "It conflicts with the current state: it exists, it is full, it is in use, or queues are"
    " disabled",
    410: "Sequences that are no longer stored or not published yet; `earliest` and `latest` tell"
    " which are stored",
    413: "The body, the message or the batch is too large",
    415: "The body has another type than this path reads",
    501: "The server has no pyarrow",
    503: "The server is stopping or too busy, or its store refuses writes or has failed",
}

# Phrases of pydantic in terms of JSON.
_PLAIN_PHRASES: Final = {
    "a valid dictionary": "a JSON object",
    "a valid string": "text",
    "a valid list": "a JSON list",
    "a valid boolean": "true or false",
}
UNREADABLE_BODY_DETAIL: Final = "There was an error parsing the body"

DEFAULT_REMEDY: Final = "The page /docs of this broker describes every field"


class Refusal(BaseModel):
    """The shape of every refusal."""

    error: str = Field(description="The error code, for programs", examples=["unknown_queue"])
    message: str = Field(description="What happened", examples=["there is no queue 'tasks'"])
    do: str = Field(
        description="What to do about it",
        examples=["Publish or subscribe to it once, or create it"],
    )


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the refusals that an operation documents, besides the general ones."""
    return {
        status: {"model": Refusal, "description": STATUS_MEANINGS[status]}
        for status in sorted({400, 401, 403, 503, *statuses})
    }


def status_of(refusal: SluiceError) -> int:
    if isinstance(refusal, RemoteRefusal):
        return refusal.status
    return next(status for kind, status in STATUS_CODES if isinstance(refusal, kind))


def code_of(refusal: SluiceError) -> str:
    if isinstance(refusal, RemoteRefusal):
        return refusal.code
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(refusal).__name__).lower()


def render_refusal(refusal: SluiceError) -> Response:
    status = status_of(refusal)
    headers = {"Cache-Control": "no-store"}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="sluice"'
    if status == 503:
        headers["Retry-After"] = "1"
    # ASCII only: a message may quote what a caller sent, which need not be valid text.
    body: dict[str, Any] = {
        "error": code_of(refusal),
        "message": refusal.what,
        "do": refusal.remedy or DEFAULT_REMEDY,
    }
    if isinstance(refusal, OutOfRange) and refusal.earliest >= 0:
        body |= {"earliest": refusal.earliest, "latest": refusal.latest}
    return Response(json.dumps(body), status, headers, "application/json")


def invalid_request(errors: list[Any]) -> InvalidRequest:
    """Build an error that lists every problem, each with its key and what is allowed."""
    return InvalidRequest("; ".join(_describe_problem(error) for error in errors))


def _describe_problem(error: dict[str, Any]) -> str:
    where, *path = error["loc"]
    key = ".".join(str(part) for part in path)
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    for spoken, plain in _PLAIN_PHRASES.items():
        text = text.replace(spoken, plain)
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', '')} at character {key}"
    if error["type"] == "extra_forbidden":
        return f"{key} is not a {'parameter' if where == 'query' else 'key'} here"
    if error["type"] == "missing":
        return f"{key} is missing" if key else "the body is missing"
    return f"{key or 'the body'} {text[:1].lower()}{text[1:]}"


def allowed_methods(app: FastAPI, path: str) -> list[str]:
    """Return the methods of a path, from the API description: the router stops at the first."""
    fitting = [
        (template.count("{"), template)
        for template in app.openapi()["paths"]
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
    ]
    return (
        sorted(method.upper() for method in app.openapi()["paths"][min(fitting)[1]])
        if fitting
        else ["GET"]
    )


def install_error_handlers(app: FastAPI) -> None:
    """Render all errors of requests in one shape."""

    async def refused(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, SluiceError)
        return render_refusal(fault)

    async def unreadable(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, RequestValidationError)
        return render_refusal(invalid_request(list(fault.errors())))

    async def misdirected(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        path = request.url.path
        if fault.status_code == 404:
            return render_refusal(NoSuchPage(path))
        if fault.status_code == 405:
            answer = render_refusal(WrongMethod(request.method, path))
            answer.headers["Allow"] = ", ".join(allowed_methods(app, request.scope["path"]))
            return answer
        detail = str(fault.detail) or HTTPStatus(fault.status_code).phrase
        return render_refusal(
            InvalidRequest(
                "the body is not readable as JSON" if detail == UNREADABLE_BODY_DETAIL else detail
            )
        )

    async def nested(request: Request, fault: Exception) -> Response:
        return render_refusal(InvalidRequest("the body is nested too deeply"))

    async def failed(request: Request, fault: Exception) -> Response:
        body = {
            "error": "fault",
            "message": "the server has a bug",
            "do": "Its log has the traceback; please report it",
        }
        return Response(json.dumps(body), 500, {"Cache-Control": "no-store"}, "application/json")

    app.add_exception_handler(SluiceError, refused)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(HTTPException, misdirected)
    app.add_exception_handler(RecursionError, nested)
    app.add_exception_handler(Exception, failed)

"""Authentication, authorization and error translation for the gRPC API.

Every call to `QueueAdmin` passes this interceptor, so that a handler neither checks credentials nor
catches errors: it calls the service and answers, or lets the error propagate. Health and reflection
need no credentials: they reveal nothing about queues.

A refusal is a status code, the error's message with its remedy, and for programs the error code as
trailing metadata `sluice-error` (`queue_full`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sluice import errors
from sluice.access.identity import AdminAuthenticator, Identity, Role, require_role
from sluice.admin.grpc.relay import Relay
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

SERVICE: Final = "sluice.admin.v1.QueueAdmin"
MAX_DETAILS_CHARS: Final = 2000  # the details are sent in a header, and headers are small

# How often the credentials of a stream are checked again: tokens expire and are revoked.
REAUTHENTICATE_SECONDS: Final = 15.0

CALLER: Final[ContextVar[Identity]] = ContextVar("CALLER")  # the caller of the current handler

# Method: the required role, and the action as an error names it.
METHOD_ROLES: Final[dict[str, tuple[Role, str]]] = {
    "CreateQueue": (Role.ADMIN, "create a queue"),
    "ListQueues": (Role.VIEWER, "list queues"),
    "GetQueue": (Role.VIEWER, "look at a queue"),
    "GetQueueStats": (Role.VIEWER, "look at a queue"),
    "DeleteQueue": (Role.ADMIN, "delete a queue"),
    "GetConfig": (Role.VIEWER, "look at a queue"),
    "UpdateConfig": (Role.ADMIN, "configure a queue"),
    "CancelMessage": (Role.OPERATOR, "cancel a message"),
    "CancelMessages": (Role.OPERATOR, "cancel messages"),
    "RescheduleMessage": (Role.OPERATOR, "reschedule a message"),
    "RescheduleMessages": (Role.OPERATOR, "reschedule messages"),
    "PauseQueue": (Role.OPERATOR, "pause a queue"),
    "ResumeQueue": (Role.OPERATOR, "resume a queue"),
    "PauseGroup": (Role.OPERATOR, "pause a group"),
    "ResumeGroup": (Role.OPERATOR, "resume a group"),
    "PurgeQueue": (Role.OPERATOR, "purge a queue"),
    "Watch": (Role.VIEWER, "watch queues"),
    "Publish": (Role.OPERATOR, "publish"),
    "PeekMessages": (Role.VIEWER, "peek at messages"),
    "GetMessage": (Role.VIEWER, "look at a message"),
    "Explain": (Role.VIEWER, "look at a message"),
    "FindMessage": (Role.VIEWER, "look for a message"),
    "ListGroups": (Role.VIEWER, "list groups"),
    "GetGroup": (Role.VIEWER, "look at a group"),
    "CreateGroup": (Role.ADMIN, "create a group"),
    "DeleteGroup": (Role.ADMIN, "delete a group"),
    "SeekGroup": (Role.OPERATOR, "move a group"),
    "ListConsumers": (Role.VIEWER, "list consumers"),
    "ListOwners": (Role.VIEWER, "list exclusive queues"),
    "GetOwner": (Role.VIEWER, "look at an exclusive queue"),
    "PeekOwner": (Role.VIEWER, "peek at messages"),
    "PurgeOwner": (Role.OPERATOR, "purge a queue"),
    "ListClients": (Role.VIEWER, "list clients"),
    "GetClient": (Role.VIEWER, "look at a client"),
    "KickClient": (Role.OPERATOR, "end connections of clients"),
    "ListDeadLetters": (Role.VIEWER, "list dead letters"),
    "ListDeadLetterErrors": (Role.VIEWER, "list dead letters"),
    "GetDeadLetter": (Role.VIEWER, "look at a dead letter"),
    "RetryDeadLetter": (Role.OPERATOR, "retry a dead letter"),
    "RetryDeadLetters": (Role.OPERATOR, "retry dead letters"),
    "PurgeDeadLetters": (Role.OPERATOR, "purge dead letters"),
    "DeleteDeadLetter": (Role.OPERATOR, "delete a dead letter"),
    "Diagnose": (Role.VIEWER, "diagnose a queue"),
    "Verify": (Role.VIEWER, "verify the ledgers"),
    "GetNode": (Role.VIEWER, "look at a node"),
    "ListNodes": (Role.VIEWER, "list nodes"),
    "GetCluster": (Role.VIEWER, "look at the cluster"),
    "GetStore": (Role.VIEWER, "look at the store"),
    "ListLosses": (Role.VIEWER, "list losses"),
    "ConfirmLoss": (Role.OPERATOR, "confirm a loss"),
    "WhoAmI": (Role.VIEWER, "ask for the caller's identity"),
}


# These work while queues are disabled.
METHODS_WITHOUT_QUEUES: Final = frozenset(
    {
        "ListClients",
        "GetClient",
        "KickClient",
        "GetNode",
        "ListNodes",
        "GetCluster",
        "GetStore",
        "ListLosses",
        "ConfirmLoss",
        "WhoAmI",
    }
)


class InvalidRequest(SluiceError):
    """A field of a request has an unusable value."""


class QueuesDisabled(SluiceError):
    def __init__(self) -> None:
        super().__init__(
            "queues are disabled on this server", "Set queues.enabled = true and restart it"
        )


class DoorClosing(SluiceError):  # words: allowed (the API code door_closing)
    def __init__(self) -> None:
        super().__init__("the server is stopping", "Connect again in a moment")


# The table of status codes. The first match counts, so a class comes before its base class.
STATUS_CODES: Final[tuple[tuple[type[SluiceError], grpc.StatusCode], ...]] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidQueueName, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidQueueConfig, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidPayload, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.MessageTooLarge, grpc.StatusCode.INVALID_ARGUMENT),  # a retry does not help
    (errors.UnknownQueue, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownLoss, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownGroup, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownMessage, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownDelivery, grpc.StatusCode.NOT_FOUND),
    (errors.InUse, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.QueueExists, grpc.StatusCode.ALREADY_EXISTS),  # and GroupExists
    (errors.QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StoreUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.ResponsesFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (errors.StoreError, grpc.StatusCode.UNAVAILABLE),
    (DoorClosing, grpc.StatusCode.UNAVAILABLE),  # words: allowed
    (SluiceError, grpc.StatusCode.FAILED_PRECONDITION),
)


def status_code_of(error: SluiceError) -> grpc.StatusCode:
    for kind, code in STATUS_CODES:
        if isinstance(error, kind):
            return code
    raise AssertionError  # the last line of the table matches all


def error_code_of(error: SluiceError) -> str:
    """Return the error code, the same as in REST: queue_full for QueueFull."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


class CallForwarder(Protocol):
    """Forwards a call to the node that owns its resource, or calls the local handler."""

    async def forward(
        self, method: str, request: Any, context: Any, handle: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any: ...


class GrpcAuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(
        self,
        keyring: AdminAuthenticator,
        relay: Relay,
        queues_enabled: bool = True,
        forwarder: CallForwarder | None = None,
    ) -> None:
        self._forwarder = forwarder
        self._keyring = keyring
        self._relay = relay
        self._queues_enabled = queues_enabled

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> grpc.RpcMethodHandler | None:
        """Guard a call. Every call is handled as a stream of requests, which callers cannot see.

        For a unary call, gRPC reads the request before it calls the handler, and would hold
        megabytes for a caller that is not authenticated yet.
        """
        handler = await continuation(call)
        service, _, method = call.method.lstrip("/").partition("/")
        if handler is None or service != SERVICE:
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._guard_stream(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            self._guard(method, handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _guard(
        self, method: str, handle: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[AsyncIterator[Any], grpc.aio.ServicerContext], Awaitable[Any]]:
        async def guarded(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            try:
                await self._authorize(method, context)
                request = await read_single_request(requests)
                if self._forwarder is not None:
                    return await self._forwarder.forward(method, request, context, handle)
                return await handle(request, context)
            except Exception as error:
                await abort_with_error(context, error, method)

        return guarded

    def _guard_stream(
        self, method: str, handle: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[AsyncIterator[Any], grpc.aio.ServicerContext], AsyncIterator[Any]]:
        async def guarded(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[Any]:
            try:
                await self._authorize(method, context)
                checked_at = time.monotonic()
                async for answer in handle(await read_single_request(requests), context):
                    if time.monotonic() - checked_at > REAUTHENTICATE_SECONDS:
                        await self._authorize(method, context)
                        checked_at = time.monotonic()
                    yield answer
            except Exception as error:
                await abort_with_error(context, error, method)

        return guarded

    async def _authorize(self, method: str, context: grpc.aio.ServicerContext) -> None:
        authorization: str | None = None
        for name, value in context.invocation_metadata() or ():
            if name == "authorization":
                authorization = value
        peer = self._relay.host_of(context.peer())
        identity = await self._keyring.identify_async(authorization, peer)
        role, what = METHOD_ROLES[method]
        require_role(identity, role, what)
        if not self._queues_enabled and method not in METHODS_WITHOUT_QUEUES:
            raise QueuesDisabled
        CALLER.set(identity)


async def read_single_request(requests: AsyncIterator[Any]) -> Any:
    """Read the request of a unary call."""
    try:
        async for request in requests:
            return request
    except DecodeError:
        raise InvalidRequest(
            "the request is not readable",
            "Send a message that src/sluice/admin/grpc/queue_admin.proto describes",
        ) from None
    raise InvalidRequest("the call has no request", "Send one message")


async def abort_with_error(
    context: grpc.aio.ServicerContext, error: Exception, method: str
) -> None:
    """End the call with the code and text of `error`; log an unexpected one."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, SluiceError):
        await context.abort(
            status_code_of(error),
            str(error)[:MAX_DETAILS_CHARS],
            (("sluice-error", error_code_of(error)),),
        )
    log.error("grpc call failed", extra={"method": method}, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL,
        f"{method} failed inside Sluice. The server's log has the traceback; please report it",
        (("sluice-error", "internal"),),
    )

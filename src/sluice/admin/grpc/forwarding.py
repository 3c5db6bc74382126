"""Forwarding of gRPC calls to the node that owns the resource, and merging of lists from all nodes.

As in REST, the other node authenticates the caller again, and a call is forwarded only once. A
stream (`Watch`) reports on the node at which it was opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory

from sluice.admin.broker_facade import strip_queue_prefix
from sluice.admin.forwarding import GATHER_TIMEOUT_SECONDS, CellMoved, OwnerAttempts
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.cluster.membership import Directory, NodeInfo
from sluice.errors import SluiceError, UnknownClient

log = logging.getLogger(__name__)

FORWARDED_KEY: Final = "sluice-passed-on"
CALL_TIMEOUT_SECONDS: Final = 60.0

# Calls that return lists from all nodes: the list field and its sort key.
GATHERED_METHODS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "ListQueues": ("queues", lambda one: one.name),
    "ListOwners": ("owners", lambda one: one.client),
    "ListClients": ("clients", lambda one: one.client),
    "ListNodes": ("nodes", lambda one: one.name),
    "FindMessage": ("queues", lambda one: one),
    "Verify": ("faults", lambda one: 0),
    "ListLosses": ("losses", lambda one: one.cell),
}


# Calls about the node that answers, to which all processes of one node contribute.
MERGED_METHODS: Final = ("GetNode", "GetStore")
NODE_NAME: Final = "local"  # as of a node with one process


class GrpcForwarder:
    """Forward calls. `ca_certificate` signs the other nodes' gRPC listeners; None: no TLS."""

    def __init__(self, directory: Directory, ca_certificate: bytes | None = None) -> None:
        self._directory = directory
        self._ca_certificate = ca_certificate
        self._channels: dict[str, Any] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def forward(
        self, method: str, request: Any, context: Any, handle: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any:
        metadata = [
            (name, value)
            for name, value in context.invocation_metadata()
            if name == "authorization"
        ]
        if any(name == FORWARDED_KEY for name, _ in context.invocation_metadata()):
            return await handle(request, context)
        if method in GATHERED_METHODS:
            return await self._gather(method, request, metadata, await handle(request, context))
        if method in ("GetClient", "KickClient"):
            return await self._ask_for_client(method, request, metadata, handle, context)
        if method in MERGED_METHODS and self._directory.process_names:
            return await self._merge_processes(
                method, request, metadata, await handle(request, context)
            )
        cell = self._cell_of_request(method, request)
        if cell < 0:
            return await handle(request, context)
        attempts = OwnerAttempts(self._directory, cell)
        while True:
            owner = await attempts.next_owner()
            if owner.id == self._directory.node_id:
                return await handle(request, context)
            if owner.grpc:
                try:
                    return await self._call(owner, method, request, metadata, CALL_TIMEOUT_SECONDS)
                except grpc.aio.AioRpcError as fault:
                    if fault.code() is not grpc.StatusCode.UNAVAILABLE:
                        error_metadata = tuple(
                            one for one in fault.trailing_metadata() if one[0] == "sluice-error"
                        )
                        await context.abort(fault.code(), fault.details(), error_metadata)

    def _cell_of_request(self, method: str, request: Any) -> int:
        """Return the cell that a call is about, or -1."""
        known = request.DESCRIPTOR.fields_by_name
        if method == "CreateQueue":
            return self._directory.cell_of_queue(_created_queue_name(request.config_json))
        if "queue" in known or "name" in known:
            return self._directory.cell_of_queue(
                strip_queue_prefix(request.queue if "queue" in known else request.name)
            )
        if "cell" in known:
            return int(request.cell) if request.cell < self._directory.cells else -1
        if "client" in known:
            return self._directory.cell_of_client(request.client)
        return -1

    async def _ask_for_client(
        self,
        method: str,
        request: Any,
        metadata: list[tuple[str, str]],
        handle: Callable[[Any, Any], Awaitable[Any]],
        context: Any,
    ) -> Any:
        """Ask this node, then the others: many sessions are on the node of their client.

        Only the owner of the client's cell knows that there is no session.
        """
        error: SluiceError
        try:
            return await handle(request, context)
        except (UnknownClient, CellMoved) as fault:
            error = fault
        for node in [one for one in self._directory.other_nodes() if one.grpc]:
            try:
                return await self._call(node, method, request, metadata, GATHER_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as fault:
                if fault.code() is grpc.StatusCode.NOT_FOUND:
                    error = UnknownClient(request.client)
                elif fault.code() is not grpc.StatusCode.UNAVAILABLE:
                    log.warning(
                        "node did not answer", extra={"node": node.name, "fault": str(fault)}
                    )
        raise error

    async def _call(
        self,
        node: NodeInfo,
        method: str,
        request: Any,
        metadata: list[tuple[str, str]],
        seconds: float,
    ) -> Any:
        described = pb.DESCRIPTOR.services_by_name["QueueAdmin"].methods_by_name[method]
        response_class = message_factory.GetMessageClass(described.output_type)
        call = self._channel(node.grpc).unary_unary(
            f"/{described.containing_service.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_class.FromString,
        )
        return await call(request, timeout=seconds, metadata=[*metadata, (FORWARDED_KEY, "1")])

    async def _gather(
        self, method: str, request: Any, metadata: list[tuple[str, str]], local_response: Any
    ) -> Any:
        name, order = GATHERED_METHODS[method]
        others = [node for node in self._directory.other_nodes() if node.grpc]
        calls = [
            self._call(node, method, request, metadata, GATHER_TIMEOUT_SECONDS) for node in others
        ]
        found = list(getattr(local_response, name))
        for node, part in zip(others, await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(part, BaseException):
                log.warning("node did not answer", extra={"node": node.name, "fault": str(part)})
                if method == "Verify":
                    found.append(f"node {node.name} did not answer")
            else:
                found += getattr(part, name)
        found.sort(key=order)
        merged = type(local_response)()
        limit = getattr(request, "limit", 0) or len(found)
        getattr(merged, name).extend(found[:limit])
        if method in ("ListQueues", "ListClients") and len(found) > limit:
            merged.next = order(found[limit - 1])
        return merged

    async def _merge_processes(
        self, method: str, request: Any, metadata: list[tuple[str, str]], local_response: Any
    ) -> Any:
        """Add the figures of the other processes of this node."""
        calls = [
            self._call(node, method, request, metadata, GATHER_TIMEOUT_SECONDS)
            for node in self._directory.other_nodes()
            if node.grpc
        ]
        for part in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(part, BaseException):
                log.warning("process did not answer", extra={"fault": str(part)})
            else:
                _add_figures(local_response, part)
        if method == "GetNode":
            local_response.name = NODE_NAME
        return local_response

    def _channel(self, address: str) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            options = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))
            if self._ca_certificate is None:
                channel = grpc.aio.insecure_channel(address, options)
            else:
                credentials = grpc.ssl_channel_credentials(self._ca_certificate)
                channel = grpc.aio.secure_channel(address, credentials, options)
            self._channels[address] = channel
        return channel


def _created_queue_name(config: str) -> str:
    """Return the name of the queue to create; "" if invalid, which any node can report."""
    from sluice.admin.grpc.protobuf_requests import parse_config_json

    try:
        parsed = parse_config_json(config)
    except SluiceError:
        return ""
    name = parsed.get("name") if isinstance(parsed, dict) else None
    return strip_queue_prefix(name) if isinstance(name, str) else ""


def _add_figures(total: Any, part: Any) -> None:
    """Add the counts of `part`, and combine its states, as `rest.forwarding.one_node`."""
    for known in total.DESCRIPTOR.fields:
        if known.type == known.TYPE_INT64:
            setattr(total, known.name, getattr(total, known.name) + getattr(part, known.name))
    if "healthy" in total.DESCRIPTOR.fields_by_name:
        total.healthy = total.healthy and part.healthy
        total.fault = total.fault or part.fault
    else:
        total.stopping = total.stopping or part.stopping

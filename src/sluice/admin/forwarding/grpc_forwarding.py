"""Calls that another node has the answer to: made there as they came here, and lists gathered from all nodes.

As in REST, the other node asks again who calls, and a call is passed on only once. A stream (`Watch`) tells of the node
that it was opened at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.broker_facade import plain
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.directory import Directory
from sluice.errors import SluiceError, StoreError

log = logging.getLogger(__name__)

PASSED: Final = "sluice-passed-on"
PATIENCE_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 0.1
GATHER_SECONDS: Final = 5.0
CALL_SECONDS: Final = 60.0

# Calls whose answers are lists that lie with all nodes: the list, and how its parts are put in order.
GATHERED: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "ListQueues": ("queues", lambda one: one.name),
    "ListOwners": ("owners", lambda one: one.client),
    "ListNodes": ("nodes", lambda one: one.name),
    "FindMessage": ("queues", lambda one: one),
    "Verify": ("faults", lambda one: 0),
    "ListLosses": ("losses", lambda one: one.cell),
}


class Elsewhere(StoreError):
    """The node that has it gives no answer now."""


class Relay:
    """`authority` signed the certificates of the other nodes' gRPC doors; None: they speak without TLS."""

    def __init__(self, directory: Directory, authority: bytes | None = None) -> None:
        self._directory = directory
        self._authority = authority
        self._channels: dict[str, Any] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def ask(
        self, method: str, request: Any, context: Any, handle: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any:
        metadata = [(name, value) for name, value in context.invocation_metadata() if name == "authorization"]
        if any(name == PASSED for name, _ in context.invocation_metadata()):
            return await handle(request, context)
        if method in GATHERED:
            return await self._gather(method, request, metadata, await handle(request, context))
        cell = self._cell(method, request)
        if cell < 0:
            return await handle(request, context)
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        while True:
            owner = self._directory.owner(cell)
            if owner is not None and owner.id == self._directory.me:
                return await handle(request, context)
            if owner is not None and owner.grpc:
                try:
                    return await self._call(owner, method, request, metadata, CALL_SECONDS)
                except grpc.aio.AioRpcError as fault:
                    if fault.code() is not grpc.StatusCode.UNAVAILABLE:
                        words = tuple(one for one in fault.trailing_metadata() if one[0] == "sluice-error")
                        await context.abort(fault.code(), fault.details(), words)
            if loop.time() > until:
                raise Elsewhere(
                    "this part of the cluster cannot be reached: "
                    + (f"node {owner.name} gives no answer" if owner is not None else "nobody has it now"),
                    "Try again in a moment",
                )
            await asyncio.sleep(PAUSE_SECONDS)

    def _cell(self, method: str, request: Any) -> int:
        """The cell that a call is about, or -1."""
        known = request.DESCRIPTOR.fields_by_name
        if method == "CreateQueue":
            return self._directory.cell_of_queue(_created(request.config_json))
        if "queue" in known or "name" in known:
            return self._directory.cell_of_queue(plain(request.queue if "queue" in known else request.name))
        if "cell" in known:
            return int(request.cell) if request.cell < self._directory.cells else -1
        if "client" in known:
            return self._directory.cell_of_client(request.client)
        return -1

    async def _call(
        self, node: NodeInfo, method: str, request: Any, metadata: list[tuple[str, str]], seconds: float
    ) -> Any:
        described = pb.DESCRIPTOR.services_by_name["QueueAdmin"].methods_by_name[method]
        answer = message_factory.GetMessageClass(described.output_type)
        call = self._channel(node.grpc).unary_unary(
            f"/{described.containing_service.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return await call(request, timeout=seconds, metadata=[*metadata, (PASSED, "1")])

    async def _gather(self, method: str, request: Any, metadata: list[tuple[str, str]], whole: Any) -> Any:
        name, order = GATHERED[method]
        others = [node for node in self._directory.others() if node.grpc]
        calls = [self._call(node, method, request, metadata, GATHER_SECONDS) for node in others]
        found = list(getattr(whole, name))
        for node, part in zip(others, await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(part, BaseException):
                log.warning("a node gave no answer", extra={"node": node.name, "fault": str(part)})
                if method == "Verify":
                    found.append(f"node {node.name} gave no answer")
            else:
                found += getattr(part, name)
        found.sort(key=order)
        joined = type(whole)()
        limit = getattr(request, "limit", 0) or len(found)
        getattr(joined, name).extend(found[:limit])
        if method == "ListQueues" and len(found) > limit:
            joined.next = found[limit - 1].name
        return joined

    def _channel(self, address: str) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            options = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))
            if self._authority is None:
                channel = grpc.aio.insecure_channel(address, options)
            else:
                credentials = grpc.ssl_channel_credentials(self._authority)
                channel = grpc.aio.secure_channel(address, credentials, options)
            self._channels[address] = channel
        return channel


def _created(config: str) -> str:
    """The name of the queue that is to be made; whatever is wrong with it, any node can say."""
    from sluice.admin.grpc.protobuf_requests import config_of

    try:
        told = config_of(config)
    except SluiceError:
        return ""
    name = told.get("name") if isinstance(told, dict) else None
    return plain(name) if isinstance(name, str) else ""

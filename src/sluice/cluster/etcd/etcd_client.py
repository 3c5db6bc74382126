"""A client of etcd over gRPC: uses one member at a time, and the next one if it does not answer.

A member that is stopped or cut off from its peers is no reason to wait: calls have short timeouts
and are retried at other members until a total timeout. Invariant: all calls are idempotent. Streams
of an abandoned member end, and their users open them again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from sluice.backoff import Backoff
from sluice.cluster.etcd import etcd_pb2 as pb
from sluice.cluster.etcd.etcd_pb2_grpc import KVStub, LeaseStub, WatchStub
from sluice.cluster.membership import CoordinatorError, CoordinatorUnavailable

ATTEMPT_TIMEOUT_SECONDS: Final = 1.0  # of one attempt
TOTAL_TIMEOUT_SECONDS: Final = 5.0  # of all attempts
RETRY_BACKOFF: Final = Backoff(0.05, max_seconds=0.4)

GRPC_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
)

# Codes for which another member may succeed.
_RETRYABLE_CODES: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)
# How gRPC reports the end of a stream: by a status, or by a state error to a late writer.
STREAM_ENDED_ERRORS: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


@dataclass(frozen=True)
class EtcdTls:
    """PEM data; certificate and key are needed only if etcd requires client certificates."""

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class _Endpoint:
    """The channel to one member. It is closed when it is abandoned and has no user left."""

    def __init__(self, address: str, tls: EtcdTls | None) -> None:
        if tls is None:
            self.channel: Any = grpc.aio.insecure_channel(address, GRPC_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            self.channel = grpc.aio.secure_channel(address, credentials, GRPC_OPTIONS)
        self.kv: Any = KVStub(self.channel)  # type: ignore[no-untyped-call]
        self.lease: Any = LeaseStub(self.channel)  # type: ignore[no-untyped-call]
        self.watch: Any = WatchStub(self.channel)  # type: ignore[no-untyped-call]
        self.abandoned = asyncio.Event()
        self.users = 0


class EtcdClient:
    """Calls etcd through its current member."""

    def __init__(self, endpoints: Sequence[str], tls: EtcdTls | None = None) -> None:
        self._endpoints = list(endpoints)
        self._tls = tls
        self._endpoint_index = 0
        self._endpoint: _Endpoint | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self._abandon_endpoint(self._endpoint)
        await asyncio.gather(*self._closing_tasks, return_exceptions=True)

    @contextmanager
    def _use_endpoint(self) -> Iterator[_Endpoint]:
        endpoint = self._endpoint
        if endpoint is None:
            endpoint = self._endpoint = _Endpoint(
                self._endpoints[self._endpoint_index % len(self._endpoints)], self._tls
            )
        endpoint.users += 1
        try:
            yield endpoint
        finally:
            endpoint.users -= 1
            self._close_if_unused(endpoint)

    def _abandon_endpoint(self, endpoint: _Endpoint | None) -> None:
        """Use the next member from now on, because this one did not answer."""
        if endpoint is None or endpoint is not self._endpoint:
            return
        self._endpoint = None
        self._endpoint_index += 1
        endpoint.abandoned.set()
        self._close_if_unused(endpoint)

    def _close_if_unused(self, endpoint: _Endpoint) -> None:
        """Close an abandoned channel after its last call: gRPC would cancel running calls."""
        if endpoint.abandoned.is_set() and endpoint.users == 0:
            task = asyncio.get_running_loop().create_task(endpoint.channel.close())
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)

    async def call(
        self,
        request: Callable[[_Endpoint], Any],
        total_timeout: float = TOTAL_TIMEOUT_SECONDS,
        tries: int = 1000,
    ) -> Any:
        """Return the answer to `request(endpoint)`, an idempotent call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + total_timeout
        attempt = 0
        while True:
            with self._use_endpoint() as endpoint:
                try:
                    return await request(endpoint)
                except STREAM_ENDED_ERRORS as fault:
                    if (
                        isinstance(fault, grpc.aio.AioRpcError)
                        and fault.code() not in _RETRYABLE_CODES
                    ):
                        raise CoordinatorError(
                            f"etcd refused the request: {fault.details()}"
                        ) from None
                    reason = (
                        str(fault.details())
                        if isinstance(fault, grpc.aio.AioRpcError)
                        else str(fault)
                    )
                self._abandon_endpoint(endpoint)
            attempt += 1
            if loop.time() > deadline or attempt == tries:
                raise CoordinatorUnavailable(
                    f"etcd does not answer at {', '.join(self._endpoints)}: {reason}",
                    "Start etcd, or correct cluster.etcd_endpoints",
                )
            await asyncio.sleep(RETRY_BACKOFF.delay(attempt - 1, random.random()))

    async def range(self, key: bytes, end: bytes = b"") -> pb.RangeResponse:
        request = pb.RangeRequest(key=key, range_end=end)
        answer: pb.RangeResponse = await self.call(
            lambda endpoint: endpoint.kv.Range(request, timeout=ATTEMPT_TIMEOUT_SECONDS)
        )
        return answer

    async def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        answer: pb.TxnResponse = await self.call(
            lambda endpoint: endpoint.kv.Txn(request, timeout=ATTEMPT_TIMEOUT_SECONDS)
        )
        return answer

    async def grant(self, seconds: int) -> pb.LeaseGrantResponse:
        request = pb.LeaseGrantRequest(TTL=seconds)
        answer: pb.LeaseGrantResponse = await self.call(
            lambda endpoint: endpoint.lease.LeaseGrant(request, timeout=ATTEMPT_TIMEOUT_SECONDS)
        )
        return answer

    async def revoke(self, lease: int) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        await self.call(
            lambda endpoint: endpoint.lease.LeaseRevoke(request, timeout=ATTEMPT_TIMEOUT_SECONDS)
        )

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease and return its remaining seconds; 0: it has ended.

        Make one attempt only: the caller measures the time.
        """
        answer: int = await self.call(lambda endpoint: _keep_alive_once(endpoint, lease), tries=1)
        return answer

    async def compact(self, revision: int) -> None:
        request = pb.CompactionRequest(revision=revision)
        await self.call(
            lambda endpoint: endpoint.kv.Compact(request, timeout=ATTEMPT_TIMEOUT_SECONDS)
        )

    async def watch(self, key: bytes, end: bytes, start: int) -> AsyncIterator[pb.WatchResponse]:
        """Yield the changes of the keys from revision `start` on, until the stream ends."""
        create = pb.WatchCreateRequest(key=key, range_end=end, start_revision=start)
        with self._use_endpoint() as endpoint:
            abandoned = asyncio.ensure_future(endpoint.abandoned.wait())
            # A member without a leader sends nothing, and reports that only on request.
            call = endpoint.watch.Watch(metadata=(("hasleader", "true"),))
            # Only for the first answer: an unreachable endpoint never answers.
            first_answer_timeout: float | None = ATTEMPT_TIMEOUT_SECONDS
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT_SECONDS):
                    await call.write(pb.WatchRequest(create_request=create))
                while True:
                    reading = asyncio.ensure_future(call.read())
                    await asyncio.wait(
                        (reading, abandoned),
                        timeout=first_answer_timeout,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if not reading.done():
                        reading.cancel()
                        return
                    answer = reading.result()
                    if answer is grpc.aio.EOF:
                        return
                    first_answer_timeout = None
                    yield answer
            except (*STREAM_ENDED_ERRORS, TimeoutError):
                return
            finally:
                abandoned.cancel()
                call.cancel()
                self._abandon_endpoint(endpoint)


async def _keep_alive_once(endpoint: _Endpoint, lease: int) -> int:
    """Renew a lease over a stream of its own: costs a little more, and cannot be a dead one."""
    call = endpoint.lease.LeaseKeepAlive(timeout=ATTEMPT_TIMEOUT_SECONDS)
    try:
        await call.write(pb.LeaseKeepAliveRequest(ID=lease))
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise asyncio.InvalidStateError("the stream has ended without an answer")
        return int(answer.TTL)
    finally:
        call.cancel()

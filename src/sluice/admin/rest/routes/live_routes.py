"""The live stream: a sample of the broker's state, each second, for all connected clients.

One sampler serves all clients and runs only while there is one: a hundred consoles cost the broker
as much as one. A slow client misses samples and never accumulates them: it has a slot for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from sluice.admin import model
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.metrics import SampleHistory
from sluice.admin.rest.deps import REAUTHENTICATE_KEY, call_bridge, call_service
from sluice.admin.rest.errors import Busy, Stopping, error_responses
from sluice.admin.rest.params import QueueName, parse_queue_name
from sluice.admin.rest.schemas.json_models import NodeSamples, QueueSamples, to_json
from sluice.admin.service import AdminService
from sluice.errors import AccessError, SluiceError

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api/v1", tags=["node"])

SAMPLE_SECONDS: Final = 1.0
# Interval of comments when there is no sample, so that both ends notice a dead connection.
HEARTBEAT_SECONDS: Final = 3.0
MAX_STREAM_SECONDS: Final = 3600.0  # then the client must connect again
# How often the credentials of a client are checked again: tokens expire and are revoked.
REAUTHENTICATE_SECONDS: Final = 15.0
MAX_LIVE_CLIENTS: Final = 200
PAGE_SIZE: Final = 1000
MAX_SAMPLED_QUEUES: Final = 10_000  # in one sample


Reauthenticate = Callable[[], Awaitable[object]]
Credentials = Sequence[tuple[bytes, bytes]]  # the Authorization header of a client
FetchRemote = Callable[[str, Credentials], Awaitable[list[Any]]]


def format_event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


class LiveClient:
    """One stream: the queue it wants in detail, and the newest sample that is not sent yet."""

    def __init__(self, queue: str, credentials: Credentials = ()) -> None:
        self.queue = queue
        self.credentials = credentials
        self.sample = b""
        self.has_sample = asyncio.Event()

    def put_sample(self, sample: bytes) -> None:
        self.sample = sample
        self.has_sample.set()


class LiveFeed:
    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge
        self._clients: set[LiveClient] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._latest_sample = b""
        self._sampled_at = 0.0
        self.is_closed = False
        # In a cluster: fetches a list from the other nodes.
        self.fetch_remote: FetchRemote | None = None

    @property
    def client_count(self) -> int:
        return len(self._clients)

    @property
    def is_sampling(self) -> bool:
        return self._sampler is not None

    def admit(self) -> None:
        """Refuse a client beyond the limit."""
        if self.is_closed:
            raise Stopping
        if len(self._clients) >= MAX_LIVE_CLIENTS:
            raise Busy(
                f"{MAX_LIVE_CLIENTS} clients are connected already",
                "Close a console, or ask for single pages",
            )

    def _add_client(self, queue: str, credentials: Credentials) -> LiveClient:
        client = LiveClient(queue, credentials)
        self._clients.add(client)
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._run_sampler())
        elif time.monotonic() - self._sampled_at < SAMPLE_SECONDS:
            client.put_sample(self._latest_sample)
        return client

    async def stream(
        self,
        queue: str,
        first_event: bytes,
        reauthenticate: Reauthenticate,
        credentials: Credentials = (),
    ) -> AsyncIterator[bytes]:
        """Yield events to one client until it leaves, the server stops or `reauthenticate` refuses.

        The client counts from the first byte on: a stream that is never read leaves nothing behind.
        """
        client = self._add_client(queue, credentials)
        checked_at = time.monotonic()
        end = checked_at + MAX_STREAM_SECONDS
        try:
            yield first_event or b": welcome\n\n"
            while not self.is_closed and time.monotonic() < end:
                if time.monotonic() - checked_at > REAUTHENTICATE_SECONDS:
                    await reauthenticate()
                    checked_at = time.monotonic()
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await client.has_sample.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                client.has_sample.clear()
                sample, client.sample = client.sample, b""
                if sample:
                    yield sample
        except AccessError:
            return
        finally:
            self._clients.discard(client)

    def close(self) -> None:
        """End every stream after the event that it is sending."""
        self.is_closed = True
        if self._sampler is not None:
            self._sampler.cancel()
        for client in self._clients:
            client.has_sample.set()

    async def _run_sampler(self) -> None:
        try:
            while self._clients:
                began = time.monotonic()
                try:
                    await self._sample()
                except SluiceError as fault:
                    log.warning("live sample failed", extra={"fault": str(fault)})
                except Exception:  # the next sample may succeed, and the clients are still there
                    log.exception("live sample failed")
                await asyncio.sleep(max(0.1, SAMPLE_SECONDS - (time.monotonic() - began)))
        finally:
            self._sampler = None

    async def _sample(self) -> None:
        node = await call_bridge(self._bridge, lambda service: service.node())
        views = await self._queues()
        sample = model.Sample(node, views)
        self._latest_sample = format_event("queues", await self._add_remote_queues(sample))
        self._sampled_at = time.monotonic()
        details = {
            name: await self._detail(name)
            for name in {one.queue for one in self._clients if one.queue}
        }
        for client in self._clients:
            client.put_sample(self._latest_sample + details.get(client.queue, b""))

    async def _add_remote_queues(self, sample: model.Sample) -> str:
        """Add the queues of other nodes, with the credentials of one of the clients."""
        client = next(iter(self._clients), None)
        if self.fetch_remote is None or client is None:
            return to_json(model.Sample, sample).decode()
        merged = json.loads(to_json(model.Sample, sample))
        merged["queues"] += await self.fetch_remote("/api/v1/queues", client.credentials)
        merged["queues"].sort(key=lambda one: str(one["name"]))
        return json.dumps(merged, separators=(",", ":"))

    async def _queues(self) -> list[model.Queue]:
        found: list[model.Queue] = []
        while len(found) < MAX_SAMPLED_QUEUES:
            after = found[-1].name if found else ""
            page = await call_bridge(self._bridge, partial(_list_page, after=after))
            found += page
            if len(page) < PAGE_SIZE:
                break
        return found

    async def _detail(self, name: str) -> bytes:
        """Return the detail event of a queue; empty if it is gone, as the list shows."""
        try:
            return format_detail_event(
                await call_bridge(self._bridge, lambda service: service.queue(name))
            )
        except SluiceError:
            return b""


async def _list_page(service: AdminService, after: str) -> list[model.Queue]:
    return await service.list_queues("", after, PAGE_SIZE)


def format_detail_event(detail: model.QueueDetail) -> bytes:
    return format_event("queue", to_json(model.QueueDetail, detail).decode())


@router.get("/samples", response_model=list[NodeSamples], responses=error_responses())
async def show_samples(request: Request) -> Any:
    """The last five minutes of each node, every five seconds: what charts begin with."""
    node = await call_service(request, lambda service: service.node())
    samples: SampleHistory = request.app.state.samples
    return [{"node": node.name, **samples.of_node()}]


@router.get("/queues/{name}/samples", response_model=QueueSamples, responses=error_responses(404))
async def show_queue_samples(request: Request, name: QueueName) -> Any:
    """The last five minutes of a queue, every five seconds."""
    stats = await call_service(request, lambda service: service.stats(name))
    samples: SampleHistory = request.app.state.samples
    return samples.of_queue(stats.name)


class LiveQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: str = Field(
        default="", description="Send event `queue` with the detail of this one as well"
    )


@router.get(
    "/live",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events `queues` (Sample) and `queue` (QueueDetail)",
        },
        **error_responses(404),
    },
)
async def live(request: Request, query: Annotated[LiveQuery, Query()]) -> StreamingResponse:
    """Server-sent events: `queues` each second with `{"node": ..., "queues": [...]}`, and `queue`
    for the requested queue."""
    feed: LiveFeed = request.app.state.live
    name = parse_queue_name(query.queue)
    first_event = (
        format_detail_event(await call_service(request, lambda service: service.queue(name)))
        if name
        else b""
    )
    feed.admit()
    credentials = [pair for pair in request.scope["headers"] if pair[0] == b"authorization"]
    return StreamingResponse(
        feed.stream(name, first_event, request.scope[REAUTHENTICATE_KEY], credentials),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )

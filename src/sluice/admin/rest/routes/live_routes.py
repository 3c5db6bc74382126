"""The live stream: what the broker looks like, each second, to everybody who listens.

There is one sampler for all listeners, and it runs only while somebody listens: a hundred consoles cost the broker as
much as one. A listener that reads slowly misses samples and never collects them: it has a place for one.
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

from sluice.admin.loop_bridge import Desk
from sluice.admin.rest.deps import AGAIN, ask, ask_desk
from sluice.admin.rest.models import Node, Queue, QueueDetail, Sample
from sluice.admin.rest.errors import Busy, Stopping, answers
from sluice.admin.rest.params import plain_name
from sluice.admin.service import AdminService
from sluice.admin.views import QueueView
from sluice.errors import AccessError, SluiceError

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api/v1", tags=["node"])

EACH_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = (
    3.0  # a comment when there is nothing to tell, so that both ends know of each other
)
LONGEST_SECONDS: Final = 3600.0  # then the listener comes again
AGAIN_SECONDS: Final = (
    15.0  # how often it is seen that a listener may still listen: tokens end, and are taken away
)
MOST_LISTENERS: Final = 200
PAGE: Final = 1000
MOST_QUEUES: Final = 10_000  # in one sample


Again = Callable[[], Awaitable[object]]
Credentials = Sequence[tuple[bytes, bytes]]  # the header that says who listens
Far = Callable[[str, Credentials], Awaitable[list[Any]]]


def event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


class Listener:
    """One stream: which queue it wants in detail, and the newest sample that it has not been sent."""

    def __init__(self, queue: str, credentials: Credentials = ()) -> None:
        self.queue = queue
        self.credentials = credentials
        self.news = b""
        self.told = asyncio.Event()

    def tell(self, news: bytes) -> None:
        self.news = news
        self.told.set()


class LiveFeed:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listeners: set[Listener] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._newest = b""
        self._sampled_at = 0.0
        self.closed = False
        self.far: Far | None = None  # in a cluster, how lists are had from the other nodes

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    @property
    def is_sampling(self) -> bool:
        return self._sampler is not None

    def admit(self) -> None:
        """Refuse a listener there is no room for."""
        if self.closed:
            raise Stopping
        if len(self._listeners) >= MOST_LISTENERS:
            raise Busy(
                f"{MOST_LISTENERS} listeners are here already", "Close a console, or ask for single pages"
            )

    def _join(self, queue: str, credentials: Credentials) -> Listener:
        listener = Listener(queue, credentials)
        self._listeners.add(listener)
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._sample_on())
        elif time.monotonic() - self._sampled_at < EACH_SECONDS:
            listener.tell(self._newest)
        return listener

    async def stream(
        self, queue: str, first: bytes, again: Again, credentials: Credentials = ()
    ) -> AsyncIterator[bytes]:
        """What one listener is sent, until it goes, the server stops, or it may not listen any more: `again` refuses.
        It counts as one from the first byte on: of a stream that nobody begins to read, nothing stays behind."""
        listener = self._join(queue, credentials)
        asked = time.monotonic()
        end = asked + LONGEST_SECONDS
        try:
            yield first or b": welcome\n\n"
            while not self.closed and time.monotonic() < end:
                if time.monotonic() - asked > AGAIN_SECONDS:
                    await again()
                    asked = time.monotonic()
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await listener.told.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                listener.told.clear()
                news, listener.news = listener.news, b""
                if news:
                    yield news
        except AccessError:
            return
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Every stream ends after what it is being sent."""
        self.closed = True
        if self._sampler is not None:
            self._sampler.cancel()
        for listener in self._listeners:
            listener.told.set()

    async def _sample_on(self) -> None:
        try:
            while self._listeners:
                began = time.monotonic()
                try:
                    await self._sample()
                except SluiceError as fault:
                    log.warning("the live stream has no figures", extra={"fault": str(fault)})
                except Exception:  # the next look may succeed, and those who listen are still there
                    log.exception("the live stream has no figures")
                await asyncio.sleep(max(0.1, EACH_SECONDS - (time.monotonic() - began)))
        finally:
            self._sampler = None

    async def _sample(self) -> None:
        node = await ask_desk(self._desk, lambda service: service.node())
        views = await self._queues()
        sample = Sample(node=Node.model_validate(node), queues=[Queue.model_validate(view) for view in views])
        self._newest = event("queues", await self._with_others(sample))
        self._sampled_at = time.monotonic()
        details = {
            name: await self._detail(name) for name in {one.queue for one in self._listeners if one.queue}
        }
        for listener in self._listeners:
            listener.tell(self._newest + details.get(listener.queue, b""))

    async def _with_others(self, sample: Sample) -> str:
        """The queues of other nodes too, as one of those who listen may see them."""
        listener = next(iter(self._listeners), None)
        if self.far is None or listener is None:
            return sample.model_dump_json()
        whole = sample.model_dump(mode="json")
        whole["queues"] += await self.far("/api/v1/queues", listener.credentials)
        whole["queues"].sort(key=lambda one: str(one["name"]))
        return json.dumps(whole, separators=(",", ":"))

    async def _queues(self) -> list[QueueView]:
        found: list[QueueView] = []
        while len(found) < MOST_QUEUES:
            after = found[-1].name if found else ""
            page = await ask_desk(self._desk, partial(_page, after=after))
            found += page
            if len(page) < PAGE:
                break
        return found

    async def _detail(self, name: str) -> bytes:
        """Of a queue that is gone there is nothing more to tell: the list no longer has it."""
        try:
            return detail_event(await ask_desk(self._desk, lambda service: service.queue(name)))
        except SluiceError:
            return b""


async def _page(service: AdminService, after: str) -> list[QueueView]:
    return await service.list_queues("", after, PAGE)


def detail_event(view: object) -> bytes:
    return event("queue", QueueDetail.model_validate(view).model_dump_json())


class LiveQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: str = Field(default="", description="Send event `queue` with the detail of this one as well")


@router.get(
    "/live",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events `queues` (Sample) and `queue` (QueueDetail)",
        },
        **answers(404),
    },
)
async def live(request: Request, query: Annotated[LiveQuery, Query()]) -> StreamingResponse:
    """Server-sent events: `queues` each second with `{"node": ..., "queues": [...]}`, `queue` for the one asked for."""
    feed: LiveFeed = request.app.state.live
    name = plain_name(query.queue)
    first = detail_event(await ask(request, lambda service: service.queue(name))) if name else b""
    feed.admit()
    credentials = [pair for pair in request.scope["headers"] if pair[0] == b"authorization"]
    return StreamingResponse(
        feed.stream(name, first, request.scope[AGAIN], credentials),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )

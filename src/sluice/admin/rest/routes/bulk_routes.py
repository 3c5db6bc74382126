"""Routes for programs that read and write in bulk: Spark, and whoever speaks Arrow over HTTP.

Reading: offsets, ranges of partitions as an Arrow stream, and a group's progress. Writing: rows are staged, and a
batch of stages is committed in one step that counts once. The work is done elsewhere: `admin.bulk` on the broker's
loop, `bulk` in a process or thread beside it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sluice.access.identity import Role
from sluice.admin.bulk.bulk_service import bulk_views
from sluice.admin.rest.deps import ask, needs, queues_are_on
from sluice.admin.rest.bulk_models import (
    AppName,
    BatchNumber,
    Commit,
    Committed,
    Dropped,
    Floors,
    HowQuery,
    LastBatch,
    NewProgress,
    Offsets,
    OffsetsQuery,
    PartitionNumber,
    PartitionOffsets,
    RangesQuery,
    RowsQuery,
    Staged,
    StageQuery,
    Standing,
    TimeQuery,
    floors_of,
    standing_of,
)
from sluice.admin.rest.middleware import until_gone
from sluice.admin.rest.http_protocol import CONNECTION, cut_off
from sluice.admin.rest.errors import (
    BodyBrokenOff,
    BodyTooSlow,
    InvalidRequest,
    NotArrow,
    Stopping,
    UploadTooSlow,
    answers,
)
from sluice.admin.forwarding.rest_forwarding import Relay
from sluice.admin.forwarding.distributed_commit import share_of
from sluice.admin.rest.params import (
    GroupName,
    QueueName,
    plain_name,
)
from sluice.bulk import arrow
from sluice.bulk import row_decoder
from sluice.bulk.read_throttle import Pace
from sluice.bulk.readers import LocalReading, Part, Reading, Seats, Wanted, Workshop
from sluice.bulk.staging import Stages, Upload
from sluice.clock import steady_time
from sluice.errors import MemoryFull, NoArrow, QueueMadeAgain, SluiceError
from sluice.process.memory_watermark import Watermark

router = APIRouter(prefix="/api/v1/bulk", dependencies=[Depends(queues_are_on)], tags=["bulk"])

ARROW: Final = "application/vnd.apache.arrow.stream"
COMMIT_SECONDS: Final = 300.0
PIECE_SECONDS: Final = 30.0  # what a sender may be silent in the middle of a body
# After this time a sender must have kept to this rate since the beginning.
UPLOAD_GRACE_SECONDS: Final = 60.0
UPLOAD_RATE: Final = 8192  # bytes a second


class BulkDoor:
    """What the routes share: the worker, the stages, and the news that the door closes. `data` is the directory whose
    files a worker can read; None where the store has none."""

    def __init__(
        self,
        data: FilePath | None = None,
        max_batch_bytes: int = 32 << 20,
        max_stage_bytes: int = 1 << 30,
        stage_seconds: float = 3600.0,
        max_batch_rows: int = 1_000_000,
    ) -> None:
        self.pace = Pace()
        self.seats = Seats()
        self.workshop = None if data is None else Workshop(str(data), self.pace)
        self.stages = Stages(
            data, max_batch_bytes, max_stage_bytes, stage_seconds, max_batch_rows=max_batch_rows
        )
        self.closing = asyncio.Event()

    def stop(self) -> None:
        """Nobody waits any longer for news."""
        self.closing.set()

    def close(self) -> None:
        self.stop()
        if self.workshop is not None:
            self.workshop.close()
        self.stages.close()


def door_of(request: Request) -> BulkDoor:
    door: BulkDoor = request.app.state.bulk
    return door


async def arrow_is_here() -> None:
    if not arrow.is_here():
        raise NoArrow


# ---- reading


@router.get("/queues/{name}/offsets", response_model=Offsets, responses=answers(404, 409))
async def offsets(request: Request, name: QueueName, query: Annotated[OffsetsQuery, Query()]) -> Offsets:
    """How far each partition goes. With `after` and `wait`, answered as soon as one goes further than `after`."""
    asking = asyncio.create_task(
        ask(request, lambda service: service.bulk.offsets(name, query.after, query.wait), query.wait + 30.0)
    )
    closing = asyncio.create_task(door_of(request).closing.wait())
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait([asking, closing, gone], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise Stopping
        found = await asking
    finally:
        for task in (asking, closing, gone):
            task.cancel()
    return Offsets(
        queue=found.queue,
        incarnation=found.incarnation,
        dead_letters=found.dead_letters,
        compacted=found.compacted,
        partitions=[
            PartitionOffsets(
                partition=one.partition, earliest=one.earliest, latest=one.latest, bytes=one.bytes
            )
            for one in found.partitions
        ],
    )


@router.get("/queues/{name}/offsets/at", response_model=Floors, responses=answers(404, 409))
async def offsets_at(request: Request, name: QueueName, query: Annotated[TimeQuery, Query()]) -> Floors:
    """The first sequence at or after a time, in each partition."""
    return floors_of(await ask(request, lambda service: service.bulk.offsets_at(name, query.time)))


class ArrowStream(Response):
    """The bytes of a range. On a plain connection the worker writes them by itself; the server then only begins and
    ends the answer. Somebody who goes away ends the reading; a reading that fails cuts the connection, so that nobody
    takes a part for the whole."""

    media_type = ARROW

    def __init__(self, reading: Reading | LocalReading, connection: Any, direct: bool) -> None:
        super().__init__()
        self._reading = reading
        self._connection = connection
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(until_gone(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                fault = sending.exception()
                if fault is not None:
                    if not isinstance(fault, SluiceError):
                        raise fault
                    await cut_off(self._connection)
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.wait([gone, sending])
            await self._reading.close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", ARROW.encode())]}
        )
        if self._direct:
            while self._connection.transport.get_write_buffer_size():  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.001)
        self._reading.go()
        async for chunk in self._reading.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def plain_connection(connection: Any) -> int:
    """The descriptor of a connection into which a worker can write; -1 for one with TLS, or a mere HEAD."""
    if connection is None or connection.transport.get_extra_info("ssl_object") is not None:
        return -1
    if connection.scope["method"] != "GET" or connection.scope["http_version"] != "1.1":
        return -1
    line = connection.transport.get_extra_info("socket")
    return -1 if line is None else int(line.fileno())


ROWS_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Record batches of at most 8,192 rows or 8 MiB", "content": {ARROW: {}}},
    **answers(404, 409, 410, 501),
}


@router.get(
    "/queues/{name}/partitions/{partition}/rows",
    response_class=Response,
    responses=ROWS_ANSWERS,
    dependencies=[Depends(arrow_is_here)],
)
async def read_rows(
    request: Request, name: QueueName, partition: PartitionNumber, query: Annotated[RowsQuery, Query()]
) -> Response:
    """Every message of a partition that is kept from `start` on, before `end`, in order. Nothing is settled by it."""
    return await _stream_of(request, name, [Part(partition, query.start, query.end)], query)


@router.get(
    "/queues/{name}/rows",
    response_class=Response,
    responses=ROWS_ANSWERS,
    dependencies=[Depends(arrow_is_here)],
)
async def read_ranges(request: Request, name: QueueName, query: Annotated[RangesQuery, Query()]) -> Response:
    """The same of several partitions in one answer: the messages of each in order, and between one another as they lie
    in the log, which is the fastest way to read them."""
    parts = [Part(partition, start, end) for partition, (start, end) in query.ranges.items()]
    return await _stream_of(request, name, parts, query)


async def _stream_of(request: Request, name: str, parts: list[Part], query: HowQuery) -> Response:
    door = door_of(request)
    found = await ask(request, lambda service: service.bulk.offsets(name))
    if query.incarnation and query.incarnation != found.incarnation:
        raise QueueMadeAgain(found.queue, query.incarnation, found.incarnation)
    names = [one.strip() for one in query.columns.split(",") if one.strip()] or arrow.usual(
        query.headers, found.dead_letters
    )
    wrong = [one for one in names if one not in arrow.ALL]
    if wrong or len(set(names)) < len(names):
        raise InvalidRequest(
            f"columns names {wrong[0]!r}" if wrong else "columns names one twice",
            f"Choose from {', '.join(arrow.ALL)}",
        )

    async def slices(part: Part, at: int, most: int, most_bytes: int) -> bulk_views.Slice:
        return await ask(
            request,
            lambda service: service.bulk.slice(
                name,
                part.partition,
                at,
                part.end,
                query.lenient,
                most,
                most_bytes,
                query.group,
                found.incarnation,  # an answer has rows of one queue alone
            ),
        )

    wanted = Wanted(found.queue, tuple(parts), names)
    connection = request.scope.get(CONNECTION)
    if door.workshop is None:
        reading: Reading | LocalReading = LocalReading(door.seats, door.pace, wanted, slices)
        await reading.open()
        return ArrowStream(reading, connection, False)
    reading = Reading(door.workshop, wanted, slices)
    line = plain_connection(connection)
    await reading.open(line)
    return ArrowStream(reading, connection, line >= 0)


# ---- progress


@router.get(
    "/queues/{name}/groups/{group}/progress",
    response_model=Standing,
    response_model_exclude_none=True,
    responses=answers(404, 409),
)
async def progress(request: Request, name: QueueName, group: GroupName) -> Standing:
    """How far a group has settled each partition, and whether it has lost something."""
    return standing_of(await ask(request, lambda service: service.bulk.progress(name, group)))


@router.put(
    "/queues/{name}/groups/{group}/progress",
    response_model=Standing,
    response_model_exclude_none=True,
    responses=answers(404, 408, 409, 410, 413, 415),
    **needs(Role.OPERATOR, "settle messages"),
)
async def set_progress(request: Request, name: QueueName, group: GroupName, told: NewProgress) -> Standing:
    """Settle everything below these sequences for a group, never backwards unless a reader begins there. Answered when
    it is kept; refused while the group has consumers over MQTT."""
    return standing_of(
        await ask(
            request,
            lambda service: service.bulk.advance(
                name, group, told.partitions, told.create, told.start, told.incarnation, told.begin
            ),
            COMMIT_SECONDS,
        )
    )


# ---- writing

PUBLISHES: Final = needs(Role.OPERATOR, "publish in bulk")


@router.post(
    "/stages/{app}/{batch}",
    response_model=Staged,
    responses=answers(408, 409, 413, 415, 501),
    dependencies=[*PUBLISHES["dependencies"], Depends(arrow_is_here)],
    openapi_extra={**PUBLISHES["openapi_extra"], "requestBody": {"required": True, "content": {ARROW: {}}}},
)
async def stage(
    request: Request, app: AppName, batch: BatchNumber, query: Annotated[StageQuery, Query()]
) -> Staged:
    """Bring rows of a batch, as an Arrow stream with a column value, and key, queue, headers, delay, priority,
    message_id and letter as you like. They are in no queue before the batch is committed."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != ARROW:
        raise NotArrow(request.headers.get("content-type", ""))
    watermark: Watermark = request.app.state.watermark
    if watermark.reason:
        watermark.uploads_refused += 1
        raise MemoryFull(watermark.reason)
    stages = door_of(request).stages
    upload = stages.begin(app, batch, plain_name(query.queue))
    with stages.reading([upload.stage]):
        try:
            await _receive(request, upload)
            upload.end()
            count, unpacked = await asyncio.to_thread(
                row_decoder.look_through, upload.stage, stages.max_batch_bytes, stages.max_batch_rows
            )
            done = upload.finish(count, unpacked)
        except BaseException:
            upload.abandon()
            raise
    return Staged(stage=done.name, rows=done.rows, bytes=done.bytes)


async def _receive(request: Request, upload: Upload) -> None:
    """Read no faster than it is written: the sender waits.

    A sender that is too slow is refused: each upload holds a connection and a part of the memory
    for stages.
    """
    pieces = aiter(request.stream())
    began = steady_time()
    while True:
        spent = steady_time() - began
        left = UPLOAD_GRACE_SECONDS + upload.stage.bytes / UPLOAD_RATE - spent
        try:
            async with asyncio.timeout(max(0.0, min(PIECE_SECONDS, left))):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if left < PIECE_SECONDS:
                raise UploadTooSlow(upload.stage.bytes, steady_time() - began, UPLOAD_RATE) from None
            raise BodyTooSlow(PIECE_SECONDS) from None
        except ClientDisconnect:
            raise BodyBrokenOff from None
        if piece:
            upload.write(piece)


@router.post(
    "/stages/{app}/{batch}/commit",
    response_model=Committed,
    responses=answers(408, 409, 413, 415, 501),
    **PUBLISHES,
)
async def commit(request: Request, app: AppName, batch: BatchNumber, told: Commit) -> Committed:
    """Publish all rows of these stages in one step, which a crash leaves done or not done. A batch that is not newer
    than the last one of its application was committed before: it is answered, and not stored again."""
    stages = door_of(request).stages
    share = share_of(request)
    last = None if share else await ask(request, lambda service: service.bulk.last_batch(app), COMMIT_SECONDS)
    if last is not None and batch <= last:
        answer = await ask(
            request, lambda service: service.bulk.commit(bulk_views.Batch(app, batch, 0)), COMMIT_SECONDS
        )
        stages.drop(app, batch)
        return Committed(committed=True, rows=answer.rows, replayed=True)
    found = stages.find(app, batch, told.stages)
    count = sum(one.rows for one in found)
    if told.rows is not None and told.rows != count:
        raise InvalidRequest(
            f"the stages have {count} rows, and {told.rows} were told",
            "Name every stage of the batch, each once",
        )
    runs: list[tuple[str, Any]] = []
    repairs: list[row_decoder.Repair] = []
    if count:
        await arrow_is_here()
        with stages.reading(found):
            names = share or await asyncio.to_thread(row_decoder.queues_of, found)
            relay: Relay | None = request.app.state.relay
            if relay is not None and not share:
                far = await relay.shares.commit_elsewhere(
                    request.scope["headers"], app, batch, found, names, told.to_all
                )
                names = [name for name in names if name not in far]
            targets = await ask(request, lambda service: service.bulk.targets(names))
            runs, repairs = await asyncio.to_thread(row_decoder.messages_of, found, targets, steady_time())
    whole = bulk_views.Batch(app, batch, count, runs, repairs, told.to_all, is_share=bool(share))
    answer = await ask(request, lambda service: service.bulk.commit(whole), COMMIT_SECONDS)
    stages.drop(app, batch)
    return Committed(committed=True, rows=answer.rows, replayed=answer.replayed, skipped=answer.skipped)


@router.delete(
    "/stages/{app}/{batch}",
    response_model=Dropped,
    responses=answers(408, 409, 413, 415),
    **PUBLISHES,
)
async def abort(request: Request, app: AppName, batch: BatchNumber) -> Dropped:
    """Drop what was staged of a batch. One that is committed stays so."""
    return Dropped(dropped=door_of(request).stages.drop(app, batch))


@router.get("/stages/{app}", response_model=LastBatch, responses=answers(409))
async def last_batch(request: Request, app: AppName) -> LastBatch:
    """The last batch of an application that was committed."""
    return LastBatch(last=await ask(request, lambda service: service.bulk.last_batch(app), COMMIT_SECONDS))

"""Routes for bulk readers and writers: Spark, and other clients that speak Arrow over HTTP.

Reading: offsets, ranges of partitions as an Arrow stream, and a group's progress. Writing: rows are
staged, and a batch of stages is committed in one step, exactly once. The work is done elsewhere:
`admin.bulk` on the broker's loop, `bulk` in a process or thread beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sluice.access.identity import Role
from sluice.admin.bulk import bulk_views
from sluice.admin.rest.deps import call_service, require_queues_enabled, requires_role
from sluice.admin.rest.errors import (
    BodyBrokenOff,
    BodyTooSlow,
    InvalidRequest,
    NotArrow,
    Stopping,
    UploadTooSlow,
    error_responses,
)
from sluice.admin.rest.forwarding.distributed_commit import forwarded_queues
from sluice.admin.rest.forwarding.request_forwarding import RestForwarder
from sluice.admin.rest.http_protocol import CONNECTION_KEY, abort_response
from sluice.admin.rest.middleware import wait_disconnected
from sluice.admin.rest.params import (
    GroupName,
    QueueName,
    parse_queue_name,
)
from sluice.admin.rest.schemas.bulk_models import (
    AppName,
    BatchNumber,
    Commit,
    Committed,
    CountQuery,
    Dropped,
    GroupProgress,
    LastBatch,
    NewProgress,
    Offsets,
    OffsetsQuery,
    PartitionNumber,
    PartitionOffsets,
    PartitionSequences,
    RangesQuery,
    ReadQuery,
    RowCounts,
    RowsQuery,
    Staged,
    StageQuery,
    TimeQuery,
    build_group_progress,
    build_partition_sequences,
)
from sluice.bulk import arrow, row_decoder
from sluice.bulk.read_throttle import ReadThrottle
from sluice.bulk.readers import (
    LocalReader,
    PartitionRange,
    ReaderSlots,
    ReadRequest,
    WorkerPool,
    WorkerReader,
)
from sluice.bulk.staging import StageStore, Upload
from sluice.clock import steady_time
from sluice.errors import MemoryFull, NoArrow, QueueMadeAgain, SluiceError
from sluice.process.memory_watermark import MemoryWatermark

router = APIRouter(
    prefix="/api/v1/bulk", dependencies=[Depends(require_queues_enabled)], tags=["bulk"]
)

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
COMMIT_TIMEOUT_SECONDS: Final = 300.0
CHUNK_TIMEOUT_SECONDS: Final = 30.0  # maximum pause in the middle of a body
# After this time, the average rate since the beginning must be at least MIN_UPLOAD_RATE.
UPLOAD_GRACE_SECONDS: Final = 60.0
MIN_UPLOAD_RATE: Final = 8192  # bytes per second


class BulkResources:
    """Resources that the routes share: the workers, the stages, and the closing event.

    `data` is a directory for uploads, None for memory. `directory_of` returns the directory whose
    files a worker can read for a queue; None if the store has no files.
    """

    def __init__(
        self,
        data: FilePath | None = None,
        directory_of: Callable[[str], str] | None = None,
        max_batch_bytes: int = 32 << 20,
        max_stage_bytes: int = 1 << 30,
        stage_seconds: float = 3600.0,
        max_batch_rows: int = 1_000_000,
    ) -> None:
        self.throttle = ReadThrottle()
        self.reader_slots = ReaderSlots()
        self.worker_pool = None if directory_of is None else WorkerPool(directory_of, self.throttle)
        self.stages = StageStore(
            data, max_batch_bytes, max_stage_bytes, stage_seconds, max_batch_rows=max_batch_rows
        )
        self.closing = asyncio.Event()

    def stop(self) -> None:
        """End requests that wait for new messages."""
        self.closing.set()

    def close(self) -> None:
        self.stop()
        if self.worker_pool is not None:
            self.worker_pool.close()
        self.stages.close()


def get_bulk_resources(request: Request) -> BulkResources:
    resources: BulkResources = request.app.state.bulk
    return resources


async def require_arrow() -> None:
    if not arrow.is_installed():
        raise NoArrow


# ---- reading


@router.get("/queues/{name}/offsets", response_model=Offsets, responses=error_responses(404, 409))
async def offsets(
    request: Request, name: QueueName, query: Annotated[OffsetsQuery, Query()]
) -> Offsets:
    """The offsets of each partition. With `after` and `wait`: as soon as one has passed `after`."""
    call_task = asyncio.create_task(
        call_service(
            request,
            lambda service: service.bulk.offsets(name, query.after, query.wait),
            query.wait + 30.0,
        )
    )
    closing = asyncio.create_task(get_bulk_resources(request).closing.wait())
    disconnected = asyncio.create_task(wait_disconnected(request.receive))
    try:
        await asyncio.wait([call_task, closing, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if not call_task.done():
            raise Stopping
        found = await call_task
    finally:
        for task in (call_task, closing, disconnected):
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


@router.get(
    "/queues/{name}/offsets/at",
    response_model=PartitionSequences,
    responses=error_responses(404, 409),
)
async def offsets_at(
    request: Request, name: QueueName, query: Annotated[TimeQuery, Query()]
) -> PartitionSequences:
    """The first sequence at or after a time, in each partition."""
    return build_partition_sequences(
        await call_service(request, lambda service: service.bulk.offsets_at(name, query.time))
    )


class ArrowStream(Response):
    """The response with the bytes of a range.

    On a connection without TLS the worker writes them itself; the server only begins and ends the
    response. A client that disconnects ends the read. A read that fails cuts the connection, so
    that the client does not take a part for the whole.
    """

    media_type = ARROW_TYPE

    def __init__(
        self, reading: WorkerReader | LocalReader, connection: Any, is_direct: bool
    ) -> None:
        super().__init__()
        self._reading = reading
        self._connection = connection
        self._is_direct = is_direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(wait_disconnected(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                fault = sending.exception()
                if fault is not None:
                    if not isinstance(fault, SluiceError):
                        raise fault
                    await abort_response(self._connection)
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.wait([gone, sending])
            await self._reading.close()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", ARROW_TYPE.encode())],
            }
        )
        if self._is_direct:
            # The buffer has no event to wait for.
            while self._connection.transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        self._reading.start()
        async for chunk in self._reading.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def plain_socket_fd(connection: Any) -> int:
    """Return a descriptor to which a worker can write; -1 for TLS and for HEAD."""
    if connection is None or connection.transport.get_extra_info("ssl_object") is not None:
        return -1
    if connection.scope["method"] != "GET" or connection.scope["http_version"] != "1.1":
        return -1
    plain_socket = connection.transport.get_extra_info("socket")
    return -1 if plain_socket is None else int(plain_socket.fileno())


ROWS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Record batches of at most 8,192 rows or 8 MiB",
        "content": {ARROW_TYPE: {}},
    },
    **error_responses(404, 409, 410, 501),
}


@router.get(
    "/queues/{name}/partitions/{partition}/rows",
    response_class=Response,
    responses=ROWS_RESPONSES,
    dependencies=[Depends(require_arrow)],
)
async def read_rows(
    request: Request,
    name: QueueName,
    partition: PartitionNumber,
    query: Annotated[RowsQuery, Query()],
) -> Response:
    """The stored messages of a partition from `start` until before `end`, in order."""
    return await _stream_rows(
        request, name, [PartitionRange(partition, query.start, query.end)], query
    )


@router.get(
    "/queues/{name}/rows",
    response_class=Response,
    responses=ROWS_RESPONSES,
    dependencies=[Depends(require_arrow)],
)
async def read_ranges(
    request: Request, name: QueueName, query: Annotated[RangesQuery, Query()]
) -> Response:
    """Ranges of several partitions in one response. The messages of each partition are in order;
    partitions are interleaved as in the log, which is the fastest way to read them."""
    parts = [
        PartitionRange(partition, start, end) for partition, (start, end) in query.ranges.items()
    ]
    return await _stream_rows(request, name, parts, query)


@router.get(
    "/queues/{name}/rows/count",
    response_model=RowCounts,
    responses=error_responses(404, 409, 410),
)
async def count_rows(
    request: Request, name: QueueName, query: Annotated[CountQuery, Query()]
) -> RowCounts:
    """How many messages a read of these ranges returns, by partition. Reads the index only, no
    message."""
    found = await call_service(
        request,
        lambda service: service.bulk.count(
            name, query.ranges, query.lenient, query.group, query.incarnation
        ),
        COMMIT_TIMEOUT_SECONDS,
    )
    return RowCounts(partitions={str(number): rows for number, rows in sorted(found.items())})


async def _stream_rows(
    request: Request, name: str, parts: list[PartitionRange], query: ReadQuery
) -> Response:
    resources = get_bulk_resources(request)
    found = await call_service(request, lambda service: service.bulk.offsets(name))
    if query.incarnation and query.incarnation != found.incarnation:
        raise QueueMadeAgain(found.queue, query.incarnation, found.incarnation)
    names = [
        one.strip() for one in query.columns.split(",") if one.strip()
    ] or arrow.default_columns(query.headers, found.dead_letters)
    wrong = [one for one in names if one not in arrow.ALL_COLUMNS]
    if wrong or len(set(names)) < len(names):
        raise InvalidRequest(
            f"columns names {wrong[0]!r}" if wrong else "columns has a name twice",
            f"Choose from {', '.join(arrow.ALL_COLUMNS)}",
        )

    async def slices(
        part: PartitionRange, at: int, max_rows: int, max_bytes: int
    ) -> bulk_views.MessageSlice:
        return await call_service(
            request,
            lambda service: service.bulk.slice(
                name,
                part.partition,
                at,
                part.end,
                query.lenient,
                max_rows,
                max_bytes,
                query.group,
                found.incarnation,  # a response has rows of one incarnation
            ),
        )

    read_request = ReadRequest(found.queue, tuple(parts), names)
    connection = request.scope.get(CONNECTION_KEY)
    if resources.worker_pool is None:
        reading: WorkerReader | LocalReader = LocalReader(
            resources.reader_slots, resources.throttle, read_request, slices
        )
        await reading.open()
        return ArrowStream(reading, connection, False)
    reading = WorkerReader(resources.worker_pool, read_request, slices)
    descriptor = plain_socket_fd(connection)
    await reading.open(descriptor)
    return ArrowStream(reading, connection, descriptor >= 0)


# ---- progress


@router.get(
    "/queues/{name}/groups/{group}/progress",
    response_model=GroupProgress,
    response_model_exclude_none=True,
    responses=error_responses(404, 409),
)
async def progress(request: Request, name: QueueName, group: GroupName) -> GroupProgress:
    """How far a group has settled each partition, and whether it has lost messages."""
    return build_group_progress(
        await call_service(request, lambda service: service.bulk.progress(name, group))
    )


@router.put(
    "/queues/{name}/groups/{group}/progress",
    response_model=GroupProgress,
    response_model_exclude_none=True,
    responses=error_responses(404, 408, 409, 410, 413, 415),
    **requires_role(Role.OPERATOR, "settle messages"),
)
async def set_progress(
    request: Request, name: QueueName, group: GroupName, body: NewProgress
) -> GroupProgress:
    """Settle everything below these sequences for a group; never backwards unless a reader begins
    there. Answered after the commit; refused while the group has consumers over MQTT."""
    return build_group_progress(
        await call_service(
            request,
            lambda service: service.bulk.advance(
                name, group, body.partitions, body.create, body.start, body.incarnation, body.begin
            ),
            COMMIT_TIMEOUT_SECONDS,
        )
    )


# ---- writing

REQUIRES_OPERATOR: Final = requires_role(Role.OPERATOR, "publish in bulk")


@router.post(
    "/stages/{app}/{batch}",
    response_model=Staged,
    responses=error_responses(408, 409, 413, 415, 501),
    dependencies=[*REQUIRES_OPERATOR["dependencies"], Depends(require_arrow)],
    openapi_extra={
        **REQUIRES_OPERATOR["openapi_extra"],
        "requestBody": {"required": True, "content": {ARROW_TYPE: {}}},
    },
)
async def stage(
    request: Request, app: AppName, batch: BatchNumber, query: Annotated[StageQuery, Query()]
) -> Staged:
    """Upload rows of a batch as an Arrow stream with a column value and, optionally, key, queue,
    headers, delay, priority, message_id and `letter`. They are in no queue before the commit."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != ARROW_TYPE:
        raise NotArrow(request.headers.get("content-type", ""))
    watermark: MemoryWatermark = request.app.state.watermark
    if watermark.reason:
        watermark.uploads_refused += 1
        raise MemoryFull(watermark.reason)
    stages = get_bulk_resources(request).stages
    upload = stages.begin(app, batch, parse_queue_name(query.queue))
    with stages.hold_open([upload.stage]):
        try:
            await _receive_upload(request, upload)
            upload.close_file()
            count, unpacked = await asyncio.to_thread(
                row_decoder.inspect_stage,
                upload.stage,
                stages.max_batch_bytes,
                stages.max_batch_rows,
            )
            done = upload.complete(count, unpacked)
        except BaseException:
            upload.abandon()
            raise
    return Staged(stage=done.name, rows=done.rows, bytes=done.bytes)


async def _receive_upload(request: Request, upload: Upload) -> None:
    """Read no faster than the data is written, so that the client waits.

    A client that is too slow is refused: each upload holds a connection and a part of the memory
    for stages.
    """
    chunks = aiter(request.stream())
    began = steady_time()
    while True:
        spent = steady_time() - began
        left = UPLOAD_GRACE_SECONDS + upload.stage.bytes / MIN_UPLOAD_RATE - spent
        try:
            async with asyncio.timeout(max(0.0, min(CHUNK_TIMEOUT_SECONDS, left))):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if left < CHUNK_TIMEOUT_SECONDS:
                raise UploadTooSlow(
                    upload.stage.bytes, steady_time() - began, MIN_UPLOAD_RATE
                ) from None
            raise BodyTooSlow(CHUNK_TIMEOUT_SECONDS) from None
        except ClientDisconnect:
            raise BodyBrokenOff from None
        if chunk:
            upload.write(chunk)


@router.post(
    "/stages/{app}/{batch}/commit",
    response_model=Committed,
    responses=error_responses(408, 409, 413, 415, 501),
    **REQUIRES_OPERATOR,
)
async def commit(request: Request, app: AppName, batch: BatchNumber, body: Commit) -> Committed:
    """Publish all rows of these stages in one atomic step. A batch that is not newer than the last
    one of its application was committed before: it is answered, and not stored again."""
    stages = get_bulk_resources(request).stages
    share_queues = forwarded_queues(request)
    last = (
        None
        if share_queues
        else await call_service(
            request, lambda service: service.bulk.last_batch(app), COMMIT_TIMEOUT_SECONDS
        )
    )
    if last is not None and batch <= last:
        answer = await call_service(
            request,
            lambda service: service.bulk.commit(bulk_views.Batch(app, batch, 0)),
            COMMIT_TIMEOUT_SECONDS,
        )
        stages.drop_batch(app, batch)
        return Committed(committed=True, rows=answer.rows, replayed=True)
    found = stages.find(app, batch, body.stages)
    count = sum(one.rows for one in found)
    if body.rows is not None and body.rows != count:
        raise InvalidRequest(
            f"the stages have {count} rows, and the request says {body.rows}",
            "Name every stage of the batch, each once",
        )
    runs: list[tuple[str, Any]] = []
    repairs: list[row_decoder.DeadLetterRepair] = []
    if count:
        await require_arrow()
        with stages.hold_open(found):
            names = share_queues or await asyncio.to_thread(row_decoder.list_queues, found)
            forwarder: RestForwarder | None = request.app.state.forwarder
            if forwarder is not None and not share_queues:
                remote_queues = await forwarder.distributed_commit.commit_on_other_nodes(
                    request.scope["headers"], app, batch, found, names, body.to_all
                )
                names = [name for name in names if name not in remote_queues]
            targets = await call_service(request, lambda service: service.bulk.targets(names))
            runs, repairs = await asyncio.to_thread(
                row_decoder.decode_messages, found, targets, steady_time()
            )
    combined = bulk_views.Batch(
        app, batch, count, runs, repairs, body.to_all, is_forwarded_part=bool(share_queues)
    )
    answer = await call_service(
        request, lambda service: service.bulk.commit(combined), COMMIT_TIMEOUT_SECONDS
    )
    stages.drop_batch(app, batch)
    return Committed(
        committed=True, rows=answer.rows, replayed=answer.replayed, skipped=answer.skipped
    )


@router.delete(
    "/stages/{app}/{batch}",
    response_model=Dropped,
    responses=error_responses(408, 409, 413, 415),
    **REQUIRES_OPERATOR,
)
async def abort(request: Request, app: AppName, batch: BatchNumber) -> Dropped:
    """Drop the stages of a batch. A committed batch stays committed."""
    return Dropped(dropped=get_bulk_resources(request).stages.drop_batch(app, batch))


@router.get("/stages/{app}", response_model=LastBatch, responses=error_responses(409))
async def last_batch(request: Request, app: AppName) -> LastBatch:
    """The last committed batch of an application."""
    return LastBatch(
        last=await call_service(
            request, lambda service: service.bulk.last_batch(app), COMMIT_TIMEOUT_SECONDS
        )
    )

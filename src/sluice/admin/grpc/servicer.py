"""`QueueAdmin`: one method per call, which reads the request, calls the service and answers.

Nothing is decided here. The interceptor authorizes the caller and translates errors.
"""

# ruff: noqa: N802 (the methods have the names of the gRPC calls)

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final, TypeAlias

import grpc.aio

from sluice.admin import model
from sluice.admin.broker_facade import strip_queue_prefix
from sluice.admin.grpc import protobuf_requests
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.interceptor import CALLER, DoorClosing, InvalidRequest  # words: allowed
from sluice.admin.grpc.protobuf_responses import build, build_all, build_messages, to_json
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminServicer
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.model import QueueDetail
from sluice.admin.queries import build_caller, build_cluster
from sluice.admin.service import AdminService
from sluice.cluster.membership import Directory
from sluice.errors import UnknownQueue

log = logging.getLogger(__name__)

WATCH_INTERVAL_SECONDS: Final = 1.0
MAX_WATCH_SECONDS: Final = 3600.0  # then the client must call again and authenticate again

Context: TypeAlias = grpc.aio.ServicerContext


class QueueAdmin(QueueAdminServicer):
    """The gRPC methods. `closing` is set when the server is about to stop, which ends streams.

    `directory` is that of the cluster, if there is one.
    """

    def __init__(
        self, bridge: LoopBridge, closing: asyncio.Event, directory: Directory | None = None
    ) -> None:
        self._bridge = bridge
        self._closing = closing
        self._directory = directory

    # ---- queues

    async def CreateQueue(self, request: pb.CreateQueueRequest, context: Context) -> pb.Queue:
        config = protobuf_requests.parse_config_json(request.config_json)
        return build(
            pb.Queue, await self._bridge.call(lambda service: service.create_queue(config))
        )

    async def ListQueues(
        self, request: pb.ListQueuesRequest, context: Context
    ) -> pb.ListQueuesResponse:
        limit = protobuf_requests.read_limit(request.limit, protobuf_requests.QUEUE_LIMITS, "limit")
        found = await self._bridge.call(
            lambda service: service.list_queues(request.prefix, request.after, limit + 1)
        )
        return pb.ListQueuesResponse(
            queues=build_all(pb.QueueStats, found[:limit]),
            next=found[limit - 1].name if len(found) > limit else "",
        )

    async def GetQueue(self, request: pb.GetQueueRequest, context: Context) -> pb.Queue:
        return build(pb.Queue, await self._bridge.call(lambda service: service.queue(request.name)))

    async def GetQueueStats(
        self, request: pb.GetQueueStatsRequest, context: Context
    ) -> pb.QueueStats:
        return build(
            pb.QueueStats, await self._bridge.call(lambda service: service.stats(request.name))
        )

    async def DeleteQueue(
        self, request: pb.DeleteQueueRequest, context: Context
    ) -> pb.DeleteQueueResponse:
        await self._bridge.call(lambda service: service.delete_queue(request.name))
        return pb.DeleteQueueResponse()

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.QueueConfig:
        config = await self._bridge.call(lambda service: service.config(request.name))
        return pb.QueueConfig(config_json=to_json(config))

    async def UpdateConfig(
        self, request: pb.UpdateConfigRequest, context: Context
    ) -> pb.QueueConfig:
        changes = protobuf_requests.parse_config_json(request.config_json)
        config = await self._bridge.call(lambda service: service.configure(request.name, changes))
        return pb.QueueConfig(config_json=to_json(config))

    async def PauseQueue(self, request: pb.PauseQueueRequest, context: Context) -> pb.QueueStats:
        by = CALLER.get().name
        return build(
            pb.QueueStats,
            await self._bridge.call(
                lambda service: service.pause_queue(request.name, by, request.reason)
            ),
        )

    async def ResumeQueue(self, request: pb.ResumeQueueRequest, context: Context) -> pb.QueueStats:
        return build(
            pb.QueueStats,
            await self._bridge.call(lambda service: service.resume_queue(request.name)),
        )

    async def PurgeQueue(
        self, request: pb.PurgeQueueRequest, context: Context
    ) -> pb.PurgeQueueResponse:
        older_than = protobuf_requests.read_duration(request.older_than, "older_than")
        if request.keep_newest < 0:
            raise InvalidRequest("keep_newest is negative", "Give 0 or more")
        return pb.PurgeQueueResponse(
            purged=await self._bridge.call(
                lambda service: service.purge(request.name, older_than, request.keep_newest)
            )
        )

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        limit = protobuf_requests.read_limit(request.limit, protobuf_requests.QUEUE_LIMITS, "limit")
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + MAX_WATCH_SECONDS
        while loop.time() < end:
            node, queues, detail = await self._bridge.call(
                lambda service: _sample(service, request.prefix, limit, request.queue)
            )
            yield pb.WatchResponse(
                node=build(pb.Node, node),
                queues=build_all(pb.QueueStats, queues),
                queue=None if detail is None else build(pb.Queue, detail),
            )
            # A slow client gets the newest sample late, not all of the older ones.
            due = max(due + WATCH_INTERVAL_SECONDS, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await self._closing.wait()
            except TimeoutError:
                continue
            raise DoorClosing  # words: allowed

    # ---- messages

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        outgoing = protobuf_requests.read_outgoing_message(request)
        done = await self._bridge.call(lambda service: service.publish(request.queue, outgoing))
        return build(pb.PublishResponse, done)

    async def PeekMessages(
        self, request: pb.PeekMessagesRequest, context: Context
    ) -> pb.PeekMessagesResponse:
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.MESSAGE_LIMITS, "limit"
        )
        size = protobuf_requests.read_limit(
            request.payload_bytes, protobuf_requests.PAYLOAD_LIMITS, "payload_bytes"
        )
        partition = protobuf_requests.read_optional_number(request, "partition")
        start = protobuf_requests.read_optional_number(request, "start")
        found = await self._bridge.call(
            lambda service: service.peek(
                request.queue, request.group, partition, start, limit, size
            )
        )
        return pb.PeekMessagesResponse(messages=build_messages(found))

    async def GetMessage(self, request: pb.GetMessageRequest, context: Context) -> pb.Message:
        size = protobuf_requests.read_limit(
            request.payload_bytes, protobuf_requests.SINGLE_PAYLOAD_LIMITS, "payload_bytes"
        )
        found = await self._bridge.call(
            lambda service: service.message(request.queue, request.message_id, size)
        )
        return build(pb.Message, found)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Biography:
        found = await self._bridge.call(
            lambda service: service.trace_message(request.queue, request.message_id)
        )
        return build(pb.Biography, found)

    async def FindMessage(
        self, request: pb.FindMessageRequest, context: Context
    ) -> pb.FindMessageResponse:
        return pb.FindMessageResponse(
            queues=await self._bridge.call(lambda service: service.find(request.message_id))
        )

    async def CancelMessage(
        self, request: pb.CancelMessageRequest, context: Context
    ) -> pb.CancelMessageResponse:
        by = CALLER.get().name
        await self._bridge.call(
            lambda service: service.cancel_message(request.queue, request.message_id, by)
        )
        return pb.CancelMessageResponse()

    async def CancelMessages(
        self, request: pb.CancelMessagesRequest, context: Context
    ) -> pb.Commanded:
        by = CALLER.get().name
        criteria = protobuf_requests.read_message_filter(request.filter)
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.DEAD_LETTER_LIMITS, "limit"
        )
        return build(
            pb.Commanded,
            await self._bridge.call(
                lambda service: service.cancel_messages(
                    request.queue, criteria, limit, request.dry_run, by
                )
            ),
        )

    async def RescheduleMessage(
        self, request: pb.RescheduleMessageRequest, context: Context
    ) -> pb.Message:
        by = CALLER.get().name
        delay, deliver_at = protobuf_requests.read_new_time(request)
        return build(
            pb.Message,
            await self._bridge.call(
                lambda service: service.reschedule_message(
                    request.queue, request.message_id, delay, deliver_at, by
                )
            ),
        )

    async def RescheduleMessages(
        self, request: pb.RescheduleMessagesRequest, context: Context
    ) -> pb.Commanded:
        by = CALLER.get().name
        criteria = protobuf_requests.read_message_filter(request.filter)
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.DEAD_LETTER_LIMITS, "limit"
        )
        delay, deliver_at = protobuf_requests.read_new_time(request)
        return build(
            pb.Commanded,
            await self._bridge.call(
                lambda service: service.reschedule_messages(
                    request.queue, criteria, limit, request.dry_run, delay, deliver_at, by
                )
            ),
        )

    # ---- groups

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        found = await self._bridge.call(lambda service: service.groups(request.queue))
        return pb.ListGroupsResponse(groups=build_all(pb.Group, found))

    async def GetGroup(self, request: pb.GetGroupRequest, context: Context) -> pb.Group:
        return build(
            pb.Group,
            await self._bridge.call(lambda service: service.group(request.queue, request.group)),
        )

    async def CreateGroup(self, request: pb.CreateGroupRequest, context: Context) -> pb.Group:
        start = request.start or "earliest"
        return build(
            pb.Group,
            await self._bridge.call(
                lambda service: service.create_group(request.queue, request.group, start)
            ),
        )

    async def DeleteGroup(
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        await self._bridge.call(lambda service: service.delete_group(request.queue, request.group))
        return pb.DeleteGroupResponse()

    async def SeekGroup(self, request: pb.SeekGroupRequest, context: Context) -> pb.Group:
        to = protobuf_requests.require_text(
            request.to, "to", "earliest, latest, a sequence, or a time"
        )
        return build(
            pb.Group,
            await self._bridge.call(lambda service: service.seek(request.queue, request.group, to)),
        )

    async def PauseGroup(self, request: pb.PauseGroupRequest, context: Context) -> pb.Group:
        by = CALLER.get().name
        return build(
            pb.Group,
            await self._bridge.call(
                lambda service: service.pause_group(
                    request.queue, request.group, by, request.reason
                )
            ),
        )

    async def ResumeGroup(self, request: pb.ResumeGroupRequest, context: Context) -> pb.Group:
        return build(
            pb.Group,
            await self._bridge.call(
                lambda service: service.resume_group(request.queue, request.group)
            ),
        )

    async def ListConsumers(
        self, request: pb.ListConsumersRequest, context: Context
    ) -> pb.ListConsumersResponse:
        found = await self._bridge.call(lambda service: service.consumers(request.queue))
        return pb.ListConsumersResponse(consumers=build_all(pb.Consumer, found))

    # ---- exclusive queues

    async def ListOwners(
        self, request: pb.ListOwnersRequest, context: Context
    ) -> pb.ListOwnersResponse:
        limit = protobuf_requests.read_limit(request.limit, protobuf_requests.QUEUE_LIMITS, "limit")
        found = await self._bridge.call(
            lambda service: service.owners(request.prefix, request.after, limit)
        )
        return pb.ListOwnersResponse(owners=build_all(pb.Owner, found))

    async def GetOwner(self, request: pb.GetOwnerRequest, context: Context) -> pb.Owner:
        return build(
            pb.Owner, await self._bridge.call(lambda service: service.owner(request.client))
        )

    async def PeekOwner(
        self, request: pb.PeekOwnerRequest, context: Context
    ) -> pb.PeekMessagesResponse:
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.MESSAGE_LIMITS, "limit"
        )
        size = protobuf_requests.read_limit(
            request.payload_bytes, protobuf_requests.PAYLOAD_LIMITS, "payload_bytes"
        )
        found = await self._bridge.call(
            lambda service: service.peek_owner(request.client, request.start, limit, size)
        )
        return pb.PeekMessagesResponse(messages=build_messages(found))

    async def PurgeOwner(
        self, request: pb.PurgeOwnerRequest, context: Context
    ) -> pb.PurgeQueueResponse:
        done = await self._bridge.call(lambda service: service.purge_owner(request.client))
        return pb.PurgeQueueResponse(purged=done)

    # ---- dead letters

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        criteria = protobuf_requests.read_filter(request.filter)
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.MESSAGE_LIMITS, "limit"
        )
        size = protobuf_requests.read_limit(
            request.payload_bytes, protobuf_requests.PAYLOAD_LIMITS, "payload_bytes"
        )
        found = await self._bridge.call(
            lambda service: service.dead_letters(
                request.queue, criteria, request.after, limit + 1, size
            )
        )
        return pb.ListDeadLettersResponse(
            letters=build_messages(found[:limit]),  # words: allowed
            next=found[limit - 1].message_id if len(found) > limit else "",
        )

    async def GetDeadLetter(self, request: pb.GetDeadLetterRequest, context: Context) -> pb.Message:
        size = protobuf_requests.read_limit(
            request.payload_bytes, protobuf_requests.SINGLE_PAYLOAD_LIMITS, "payload_bytes"
        )
        found = await self._bridge.call(
            lambda service: service.dead_letter(request.queue, request.message_id, size)
        )
        return build(pb.Message, found)

    async def ListDeadLetterErrors(
        self, request: pb.ListDeadLetterErrorsRequest, context: Context
    ) -> pb.DeadLetterErrors:
        criteria = protobuf_requests.read_filter(request.filter)
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.EXAMINED_LIMITS, "limit"
        )
        found = await self._bridge.call(
            lambda service: service.dead_letter_errors(request.queue, criteria, limit)
        )
        return build(pb.DeadLetterErrors, found)

    async def RetryDeadLetter(
        self, request: pb.RetryDeadLetterRequest, context: Context
    ) -> pb.Redriven:
        done = await self._bridge.call(
            lambda service: service.retry_dead_letter(
                request.queue,
                request.message_id,
                request.to_all,
                request.payload if request.HasField("payload") else None,
            )
        )
        return build(pb.Redriven, done)

    async def RetryDeadLetters(
        self, request: pb.RetryDeadLettersRequest, context: Context
    ) -> pb.Redriven:
        criteria = protobuf_requests.read_filter(request.filter)
        limit = protobuf_requests.read_limit(
            request.limit, protobuf_requests.DEAD_LETTER_LIMITS, "limit"
        )
        done = await self._bridge.call(
            lambda service: service.retry_dead_letters(
                request.queue, criteria, limit, request.to_all
            )
        )
        return build(pb.Redriven, done)

    async def PurgeDeadLetters(
        self, request: pb.PurgeDeadLettersRequest, context: Context
    ) -> pb.PurgeDeadLettersResponse:
        criteria = protobuf_requests.read_filter(request.filter)
        purged = await self._bridge.call(
            lambda service: service.purge_dead_letters(request.queue, criteria)
        )
        return pb.PurgeDeadLettersResponse(purged=purged)

    async def DeleteDeadLetter(
        self, request: pb.DeleteDeadLetterRequest, context: Context
    ) -> pb.DeleteDeadLetterResponse:
        await self._bridge.call(
            lambda service: service.delete_dead_letter(request.queue, request.message_id)
        )
        return pb.DeleteDeadLetterResponse()

    # ---- clients

    async def ListClients(
        self, request: pb.ListClientsRequest, context: Context
    ) -> pb.ListClientsResponse:
        limit = protobuf_requests.read_limit(request.limit, protobuf_requests.QUEUE_LIMITS, "limit")
        connected = request.connected if request.HasField("connected") else None
        found = await self._bridge.call(
            lambda service: service.clients(
                request.prefix, request.after, limit + 1, connected, request.user
            )
        )
        return pb.ListClientsResponse(
            clients=build_all(pb.Client, found[:limit]),
            next=found[limit - 1].client if len(found) > limit else "",
        )

    async def GetClient(self, request: pb.GetClientRequest, context: Context) -> pb.ClientDetail:
        found = await self._bridge.call(lambda service: service.client(request.client))
        return build(pb.ClientDetail, found)

    async def KickClient(self, request: pb.KickClientRequest, context: Context) -> pb.Kicked:
        done = await self._bridge.call(
            lambda service: service.kick_client(request.client, request.end_session)
        )
        log.info(
            "client kicked",
            extra={
                "client": request.client,
                "session_ended": done.session_ended,
                "by": CALLER.get().name,
            },
        )
        return build(pb.Kicked, done)

    # ---- node and cluster

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.Diagnosis:
        return build(
            pb.Diagnosis,
            await self._bridge.call(lambda service: service.diagnose(request.queue, request.group)),
        )

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        return pb.VerifyResponse(faults=await self._bridge.call(lambda service: service.verify()))

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.Node:
        return build(pb.Node, await self._bridge.call(lambda service: service.node()))

    async def GetStore(self, request: pb.GetStoreRequest, context: Context) -> pb.Store:
        return build(pb.Store, await self._bridge.call(lambda service: service.store()))

    async def ListLosses(
        self, request: pb.ListLossesRequest, context: Context
    ) -> pb.ListLossesResponse:
        found = await self._bridge.call(lambda service: service.losses())
        return pb.ListLossesResponse(losses=build_all(pb.Loss, found))

    async def ConfirmLoss(self, request: pb.ConfirmLossRequest, context: Context) -> pb.Loss:
        return build(
            pb.Loss, await self._bridge.call(lambda service: service.confirm_loss(request.cell))
        )

    async def ListNodes(
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        found = await self._bridge.call(lambda service: service.nodes())
        return pb.ListNodesResponse(nodes=build_all(pb.Node, found))

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.Cluster:
        view = build_cluster(self._directory, strip_queue_prefix(request.place_of))
        answer = build(pb.Cluster, view)
        if view.place is not None:
            answer.place.CopyFrom(build(pb.ClusterCell, view.cells[view.place.cell]))
        return answer

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.Identity:
        return build(pb.Identity, build_caller(CALLER.get()))


async def _sample(
    service: AdminService, prefix: str, limit: int, name: str
) -> tuple[model.Node, list[model.Queue], QueueDetail | None]:
    """Take one sample for a stream. A queue that does not exist may be created later: no error."""
    detail: QueueDetail | None = None
    if name:
        try:
            detail = await service.queue(name)
        except UnknownQueue:
            detail = None
    return await service.node(), await service.list_queues(prefix, "", limit), detail

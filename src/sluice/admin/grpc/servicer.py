"""`QueueAdmin`: one method for each call, which reads the question, asks the admin service, and writes the answer.

Nothing is decided here. Who may call and how a refusal is said is the gate's business.
"""

# ruff: noqa: N802  the names are those of the calls

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, TypeAlias

import grpc.aio

from sluice.admin.loop_bridge import Desk
from sluice.admin.grpc import protobuf_responses
from sluice.admin.grpc import protobuf_requests
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.interceptor import CALLER, DoorClosing
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminServicer
from sluice.admin.broker_facade import plain
from sluice.admin.service import AdminService
from sluice.admin.views import NodeView, QueueDetail, QueueView
from sluice.cluster.directory import Directory
from sluice.errors import UnknownQueue

WATCH_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 3600.0  # then the watcher comes again, and is asked again who it is

Context: TypeAlias = grpc.aio.ServicerContext


class QueueAdmin(QueueAdminServicer):
    """`closing` is set when the server is about to stop: who watches is told. `directory` is the cluster's, if there is
    one."""

    def __init__(self, desk: Desk, closing: asyncio.Event, directory: Directory | None = None) -> None:
        self._desk = desk
        self._closing = closing
        self._directory = directory

    # ---- queues

    async def CreateQueue(self, request: pb.CreateQueueRequest, context: Context) -> pb.Queue:
        config = protobuf_requests.config_of(request.config_json)
        return protobuf_responses.queue_of(await self._desk.ask(lambda service: service.create_queue(config)))

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Context) -> pb.ListQueuesResponse:
        limit = protobuf_requests.count(request.limit, protobuf_requests.QUEUES, "limit")
        found = await self._desk.ask(
            lambda service: service.list_queues(request.prefix, request.after, limit + 1)
        )
        return pb.ListQueuesResponse(
            queues=[protobuf_responses.stats_of(view) for view in found[:limit]],
            next=found[limit - 1].name if len(found) > limit else "",
        )

    async def GetQueue(self, request: pb.GetQueueRequest, context: Context) -> pb.Queue:
        return protobuf_responses.queue_of(await self._desk.ask(lambda service: service.queue(request.name)))

    async def GetQueueStats(self, request: pb.GetQueueStatsRequest, context: Context) -> pb.QueueStats:
        return protobuf_responses.stats_of(await self._desk.ask(lambda service: service.stats(request.name)))

    async def DeleteQueue(self, request: pb.DeleteQueueRequest, context: Context) -> pb.DeleteQueueResponse:
        await self._desk.ask(lambda service: service.delete_queue(request.name))
        return pb.DeleteQueueResponse()

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.QueueConfig:
        config = await self._desk.ask(lambda service: service.config(request.name))
        return pb.QueueConfig(config_json=protobuf_responses.json_of(config))

    async def UpdateConfig(self, request: pb.UpdateConfigRequest, context: Context) -> pb.QueueConfig:
        changes = protobuf_requests.config_of(request.config_json)
        config = await self._desk.ask(lambda service: service.configure(request.name, changes))
        return pb.QueueConfig(config_json=protobuf_responses.json_of(config))

    async def PurgeQueue(self, request: pb.PurgeQueueRequest, context: Context) -> pb.PurgeQueueResponse:
        return pb.PurgeQueueResponse(purged=await self._desk.ask(lambda service: service.purge(request.name)))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        limit = protobuf_requests.count(request.limit, protobuf_requests.QUEUES, "limit")
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + LONGEST_SECONDS
        while loop.time() < end:
            node, queues, detail = await self._desk.ask(
                lambda service: _look(service, request.prefix, limit, request.queue)
            )
            yield pb.WatchResponse(
                node=protobuf_responses.node_of(node),
                queues=[protobuf_responses.stats_of(view) for view in queues],
                queue=None if detail is None else protobuf_responses.queue_of(detail),
            )
            # A reader who is slower than we are gets the newest figures late, not all the old ones.
            due = max(due + WATCH_SECONDS, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await self._closing.wait()
            except TimeoutError:
                continue
            raise DoorClosing

    # ---- messages

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        outgoing = protobuf_requests.outgoing_of(request)
        done = await self._desk.ask(lambda service: service.publish(request.queue, outgoing))
        return pb.PublishResponse(message_id=done.message_id, queue=done.queue, duplicate=done.duplicate)

    async def PeekMessages(
        self, request: pb.PeekMessagesRequest, context: Context
    ) -> pb.PeekMessagesResponse:
        limit = protobuf_requests.count(request.limit, protobuf_requests.MESSAGES, "limit")
        size = protobuf_requests.count(request.payload_bytes, protobuf_requests.PAYLOAD_BYTES, "payload_bytes")
        partition = protobuf_requests.place(request, "partition")
        start = protobuf_requests.place(request, "start")
        found = await self._desk.ask(
            lambda service: service.peek(request.queue, request.group, partition, start, limit, size)
        )
        return pb.PeekMessagesResponse(messages=protobuf_responses.messages_of(found))

    async def GetMessage(self, request: pb.GetMessageRequest, context: Context) -> pb.Message:
        size = protobuf_requests.count(request.payload_bytes, protobuf_requests.WHOLE_PAYLOAD_BYTES, "payload_bytes")
        found = await self._desk.ask(lambda service: service.message(request.queue, request.message_id, size))
        return protobuf_responses.message_of(found)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Biography:
        found = await self._desk.ask(lambda service: service.biography(request.queue, request.message_id))
        return protobuf_responses.biography_of(found)

    async def FindMessage(self, request: pb.FindMessageRequest, context: Context) -> pb.FindMessageResponse:
        return pb.FindMessageResponse(
            queues=await self._desk.ask(lambda service: service.find(request.message_id))
        )

    # ---- groups

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        found = await self._desk.ask(lambda service: service.groups(request.queue))
        return pb.ListGroupsResponse(groups=[protobuf_responses.group_of(view) for view in found])

    async def GetGroup(self, request: pb.GetGroupRequest, context: Context) -> pb.Group:
        return protobuf_responses.group_of(
            await self._desk.ask(lambda service: service.group(request.queue, request.group))
        )

    async def CreateGroup(self, request: pb.CreateGroupRequest, context: Context) -> pb.Group:
        start = request.start or "earliest"
        return protobuf_responses.group_of(
            await self._desk.ask(lambda service: service.create_group(request.queue, request.group, start))
        )

    async def DeleteGroup(self, request: pb.DeleteGroupRequest, context: Context) -> pb.DeleteGroupResponse:
        await self._desk.ask(lambda service: service.delete_group(request.queue, request.group))
        return pb.DeleteGroupResponse()

    async def SeekGroup(self, request: pb.SeekGroupRequest, context: Context) -> pb.Group:
        to = protobuf_requests.given(request.to, "to", "earliest, latest, a sequence, or a time")
        return protobuf_responses.group_of(
            await self._desk.ask(lambda service: service.seek(request.queue, request.group, to))
        )

    async def ListConsumers(
        self, request: pb.ListConsumersRequest, context: Context
    ) -> pb.ListConsumersResponse:
        found = await self._desk.ask(lambda service: service.consumers(request.queue))
        return pb.ListConsumersResponse(consumers=[protobuf_responses.consumer_of(view) for view in found])

    # ---- exclusive queues

    async def ListOwners(self, request: pb.ListOwnersRequest, context: Context) -> pb.ListOwnersResponse:
        limit = protobuf_requests.count(request.limit, protobuf_requests.QUEUES, "limit")
        found = await self._desk.ask(lambda service: service.owners(request.prefix, request.after, limit))
        return pb.ListOwnersResponse(owners=[protobuf_responses.owner_of(view) for view in found])

    async def GetOwner(self, request: pb.GetOwnerRequest, context: Context) -> pb.Owner:
        return protobuf_responses.owner_of(await self._desk.ask(lambda service: service.owner(request.client)))

    async def PeekOwner(self, request: pb.PeekOwnerRequest, context: Context) -> pb.PeekMessagesResponse:
        limit = protobuf_requests.count(request.limit, protobuf_requests.MESSAGES, "limit")
        size = protobuf_requests.count(request.payload_bytes, protobuf_requests.PAYLOAD_BYTES, "payload_bytes")
        found = await self._desk.ask(
            lambda service: service.peek_owner(request.client, request.start, limit, size)
        )
        return pb.PeekMessagesResponse(messages=protobuf_responses.messages_of(found))

    async def PurgeOwner(self, request: pb.PurgeOwnerRequest, context: Context) -> pb.PurgeQueueResponse:
        done = await self._desk.ask(lambda service: service.purge_owner(request.client))
        return pb.PurgeQueueResponse(purged=done)

    # ---- dead letters

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        wanted = protobuf_requests.filter_of(request.filter)
        limit = protobuf_requests.count(request.limit, protobuf_requests.MESSAGES, "limit")
        size = protobuf_requests.count(request.payload_bytes, protobuf_requests.PAYLOAD_BYTES, "payload_bytes")
        found = await self._desk.ask(
            lambda service: service.dead_letters(request.queue, wanted, request.after, limit + 1, size)
        )
        return pb.ListDeadLettersResponse(
            letters=protobuf_responses.messages_of(found[:limit]),
            next=found[limit - 1].message_id if len(found) > limit else "",
        )

    async def GetDeadLetter(self, request: pb.GetDeadLetterRequest, context: Context) -> pb.Message:
        size = protobuf_requests.count(request.payload_bytes, protobuf_requests.WHOLE_PAYLOAD_BYTES, "payload_bytes")
        found = await self._desk.ask(
            lambda service: service.dead_letter(request.queue, request.message_id, size)
        )
        return protobuf_responses.message_of(found)

    async def RetryDeadLetter(self, request: pb.RetryDeadLetterRequest, context: Context) -> pb.Redriven:
        done = await self._desk.ask(
            lambda service: service.retry_dead_letter(request.queue, request.message_id, request.to_all)
        )
        return protobuf_responses.redriven_of(done)

    async def RetryDeadLetters(self, request: pb.RetryDeadLettersRequest, context: Context) -> pb.Redriven:
        wanted = protobuf_requests.filter_of(request.filter)
        limit = protobuf_requests.count(request.limit, protobuf_requests.LETTERS, "limit")
        done = await self._desk.ask(
            lambda service: service.retry_dead_letters(request.queue, wanted, limit, request.to_all)
        )
        return protobuf_responses.redriven_of(done)

    async def PurgeDeadLetters(
        self, request: pb.PurgeDeadLettersRequest, context: Context
    ) -> pb.PurgeDeadLettersResponse:
        wanted = protobuf_requests.filter_of(request.filter)
        purged = await self._desk.ask(lambda service: service.purge_dead_letters(request.queue, wanted))
        return pb.PurgeDeadLettersResponse(purged=purged)

    async def DeleteDeadLetter(
        self, request: pb.DeleteDeadLetterRequest, context: Context
    ) -> pb.DeleteDeadLetterResponse:
        await self._desk.ask(lambda service: service.delete_dead_letter(request.queue, request.message_id))
        return pb.DeleteDeadLetterResponse()

    # ---- the whole

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.Diagnosis:
        return protobuf_responses.diagnosis_of(
            await self._desk.ask(lambda service: service.diagnose(request.queue, request.group))
        )

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        return pb.VerifyResponse(faults=await self._desk.ask(lambda service: service.verify()))

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.Node:
        return protobuf_responses.node_of(await self._desk.ask(lambda service: service.node()))

    async def GetStore(self, request: pb.GetStoreRequest, context: Context) -> pb.Store:
        return protobuf_responses.store_of(await self._desk.ask(lambda service: service.store()))

    async def ListLosses(self, request: pb.ListLossesRequest, context: Context) -> pb.ListLossesResponse:
        found = await self._desk.ask(lambda service: service.losses())
        return pb.ListLossesResponse(losses=[protobuf_responses.loss_of(view) for view in found])

    async def ConfirmLoss(self, request: pb.ConfirmLossRequest, context: Context) -> pb.Loss:
        return protobuf_responses.loss_of(await self._desk.ask(lambda service: service.confirm_loss(request.cell)))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        found = await self._desk.ask(lambda service: service.nodes())
        return pb.ListNodesResponse(nodes=[protobuf_responses.node_of(view) for view in found])

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.Cluster:
        if self._directory is None:
            return pb.Cluster()
        return protobuf_responses.cluster_of(self._directory, plain(request.place_of))

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.Identity:
        return protobuf_responses.identity_of(CALLER.get())


async def _look(
    service: AdminService, prefix: str, limit: int, name: str
) -> tuple[NodeView, list[QueueView], QueueDetail | None]:
    """One moment for whoever watches. A queue that is not there may come yet: that is no refusal."""
    detail: QueueDetail | None = None
    if name:
        try:
            detail = await service.queue(name)
        except UnknownQueue:
            detail = None
    return await service.node(), await service.list_queues(prefix, "", limit), detail

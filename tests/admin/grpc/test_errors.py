"""Errors of the gRPC API: their codes and texts, and authorization."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.access.identity import AdminAuthenticator, Identity, Role
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.interceptor import METHOD_ROLES, SERVICE, STATUS_CODES
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.service import AdminService
from tests.admin.grpc.conftest import GrpcApi, serve_on_any_port
from tests.admin.live_broker import Worker, live_broker

Code = grpc.StatusCode


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Return status code, details and error code of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details() or "", str(trailing.get("sluice-error", ""))


TOO_LATE = Timestamp(seconds=1 << 40)
DEAD_TOO_LATE = pb.LetterFilter(since=TOO_LATE)  # words: allowed

REFUSALS: list[tuple[str, Any, grpc.StatusCode, str, str]] = [
    (
        "CreateQueue",
        pb.CreateQueueRequest(),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "config_json",
    ),
    (
        "CreateQueue",
        pb.CreateQueueRequest(config_json="{"),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "JSON",
    ),
    (
        "CreateQueue",
        pb.CreateQueueRequest(config_json='{"name": "a", "partitions": NaN}'),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "NaN",
    ),
    (
        "CreateQueue",
        pb.CreateQueueRequest(config_json="[" * 100_000),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "JSON",
    ),
    (
        "CreateQueue",
        pb.CreateQueueRequest(config_json='{"name": "a", "partitions": 0}'),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "partitions",
    ),
    (
        "CreateQueue",
        pb.CreateQueueRequest(config_json='{"name": "jobs"}'),
        Code.ALREADY_EXISTS,
        "queue_exists",
        "configuration",
    ),
    ("GetQueue", pb.GetQueueRequest(name="none"), Code.NOT_FOUND, "unknown_queue", "create it"),
    ("GetQueue", pb.GetQueueRequest(), Code.NOT_FOUND, "unknown_queue", "create it"),
    (
        "GetQueueStats",
        pb.GetQueueStatsRequest(name="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "DeleteQueue",
        pb.DeleteQueueRequest(name="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    ("GetConfig", pb.GetConfigRequest(name="none"), Code.NOT_FOUND, "unknown_queue", "create it"),
    (
        "UpdateConfig",
        pb.UpdateConfigRequest(name="none", config_json="{}"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "UpdateConfig",
        pb.UpdateConfigRequest(name="jobs", config_json='{"colour": 1}'),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "colour",
    ),
    ("PurgeQueue", pb.PurgeQueueRequest(name="none"), Code.NOT_FOUND, "unknown_queue", "create it"),
    (
        "ListQueues",
        pb.ListQueuesRequest(limit=-1),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "limit",
    ),
    (
        "ListQueues",
        pb.ListQueuesRequest(limit=10_001),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "10,000",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="a/+", payload=b""),
        Code.INVALID_ARGUMENT,
        "invalid_queue_name",
        "tasks/image",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="full", payload=b""),
        Code.RESOURCE_EXHAUSTED,
        "queue_full",
        "overflow",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="small", payload=b"x" * 65),
        Code.INVALID_ARGUMENT,
        "message_too_large",
        "max_message_size",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="strict", payload=b"{}"),
        Code.INVALID_ARGUMENT,
        "invalid_payload",
        "payload",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="jobs", priority=10),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "priority",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="jobs", delay=Duration(seconds=-1)),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "delay",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="jobs", expiry=Duration(seconds=1 << 40)),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "expiry",
    ),
    (
        "Publish",
        pb.PublishRequest(queue="jobs", deliver_at=TOO_LATE),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "deliver_at",
    ),
    (
        "PeekMessages",
        pb.PeekMessagesRequest(queue="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "PeekMessages",
        pb.PeekMessagesRequest(queue="jobs", limit=1001),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "limit",
    ),
    (
        "PeekMessages",
        pb.PeekMessagesRequest(queue="jobs", partition=-1),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "partition",
    ),
    (
        "PeekMessages",
        pb.PeekMessagesRequest(queue="jobs", partition=99),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "partition 99",
    ),
    (
        "PeekMessages",
        pb.PeekMessagesRequest(queue="jobs", group="none"),
        Code.NOT_FOUND,
        "unknown_group",
        "none",
    ),
    (
        "GetMessage",
        pb.GetMessageRequest(queue="jobs", message_id="none"),
        Code.NOT_FOUND,
        "unknown_message",
        "none",
    ),
    (
        "GetMessage",
        pb.GetMessageRequest(queue="jobs", message_id="1-0", payload_bytes=-1),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "payload_bytes",
    ),
    (
        "Explain",
        pb.ExplainRequest(queue="none", message_id="1-0"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create",
    ),
    (
        "Explain",
        pb.ExplainRequest(queue="jobs", message_id="x"),
        Code.NOT_FOUND,
        "unknown_message",
        "x",
    ),
    (
        "ListGroups",
        pb.ListGroupsRequest(queue="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "GetGroup",
        pb.GetGroupRequest(queue="jobs", group="none"),
        Code.NOT_FOUND,
        "unknown_group",
        "none",
    ),
    (
        "CreateGroup",
        pb.CreateGroupRequest(queue="jobs", group="a/b"),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "a/b",
    ),
    (
        "CreateGroup",
        pb.CreateGroupRequest(queue="jobs", group="new", start="soon"),
        Code.INVALID_ARGUMENT,
        "invalid_queue_config",
        "soon",
    ),
    (
        "CreateGroup",
        pb.CreateGroupRequest(queue="jobs", group="team"),
        Code.ALREADY_EXISTS,
        "group_exists",
        "seek",
    ),
    (
        "DeleteGroup",
        pb.DeleteGroupRequest(queue="jobs", group="none"),
        Code.NOT_FOUND,
        "unknown_group",
        "none",
    ),
    (
        "SeekGroup",
        pb.SeekGroupRequest(queue="jobs", group="team"),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "earliest",
    ),
    (
        "SeekGroup",
        pb.SeekGroupRequest(queue="jobs", group="none", to="latest"),
        Code.NOT_FOUND,
        "unknown_group",
        "none",
    ),
    (
        "ListConsumers",
        pb.ListConsumersRequest(queue="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "ListDeadLetters",
        pb.ListDeadLettersRequest(queue="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create it",
    ),
    (
        "ListDeadLetters",
        pb.ListDeadLettersRequest(queue="jobs", filter=DEAD_TOO_LATE),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "filter.since",
    ),
    (
        "GetDeadLetter",
        pb.GetDeadLetterRequest(queue="jobs", message_id="none"),
        Code.NOT_FOUND,
        "unknown_message",
        "none",
    ),
    (
        "RetryDeadLetter",
        pb.RetryDeadLetterRequest(queue="jobs", message_id="none"),
        Code.NOT_FOUND,
        "unknown_message",
        "none",
    ),
    (
        "RetryDeadLetters",
        pb.RetryDeadLettersRequest(queue="jobs", limit=-5),
        Code.INVALID_ARGUMENT,
        "invalid_request",
        "limit",
    ),
    (
        "PurgeDeadLetters",
        pb.PurgeDeadLettersRequest(queue="none"),
        Code.NOT_FOUND,
        "unknown_queue",
        "create",
    ),
    (
        "DeleteDeadLetter",
        pb.DeleteDeadLetterRequest(queue="jobs", message_id="none"),
        Code.NOT_FOUND,
        "unknown_message",
        "none",
    ),
]


async def create_resources(grpc_api: GrpcApi) -> None:
    """Queues that refuse publishes."""
    for config in (
        {"name": "jobs", "partitions": 2},
        {"name": "full", "limits": {"max_queue_depth": 1}},
        {"name": "small", "limits": {"max_message_size": 64}},
        {"name": "strict", "schema": {"type": "object", "required": ["id"]}},
    ):
        await grpc_api.admin.CreateQueue(pb.CreateQueueRequest(config_json=json.dumps(config)))
    await grpc_api.admin.Publish(pb.PublishRequest(queue="full", payload=b"x"))
    await grpc_api.admin.CreateGroup(pb.CreateGroupRequest(queue="jobs", group="team"))


async def test_impossible_request_is_refused_with_code_and_remedy(grpc_api: GrpcApi) -> None:
    await create_resources(grpc_api)
    for method, request, code, kind, word in REFUSALS:
        answered, details, reported = await refusal(getattr(grpc_api.admin, method)(request))
        assert (answered, reported) == (code, kind), (method, details)
        assert word in details, (method, details)
        assert re.search(r"\. [A-Z]| must | is not a setting ", details), (
            f"{method} does not say what to do: {details}"
        )


async def test_resource_in_use_is_not_deleted(grpc_api: GrpcApi) -> None:
    await create_resources(grpc_api)
    async with grpc_api.harness.client("worker-1") as client:
        await Worker(client, "jobs").join(consumer_group="team")
        call = grpc_api.admin.DeleteGroup(pb.DeleteGroupRequest(queue="jobs", group="team"))
        code, details, kind = await refusal(call)
    assert (code, kind) == (Code.FAILED_PRECONDITION, "in_use")
    assert "unsubscribe" in details


async def test_request_above_size_limit_is_refused(grpc_api: GrpcApi) -> None:
    code, _, _ = await refusal(
        grpc_api.admin.Publish(pb.PublishRequest(queue="jobs", payload=bytes(17 << 20)))
    )
    assert code == Code.RESOURCE_EXHAUSTED
    assert (await grpc_api.admin.ListQueues(pb.ListQueuesRequest())).queues == []


async def test_internal_error_reveals_nothing_and_is_logged(
    grpc_api: GrpcApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(service: AdminService) -> None:
        raise ZeroDivisionError("the secret")

    monkeypatch.setattr(AdminService, "node", fail)
    code, details, kind = await refusal(grpc_api.admin.GetNode(pb.GetNodeRequest()))
    assert (code, kind) == (Code.INTERNAL, "internal")
    assert "log" in details and "secret" not in details
    assert "ZeroDivisionError" in caplog.text


# ---- authorization


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as fault:
        return fault.code()
    return Code.OK


class FakeKeyring:
    """Credentials of a test: the token is the role."""

    def verify_bearer(self, text: str) -> Identity | None:
        return (
            Identity(f"{text}-1", Role.parse(text))
            if text in ("viewer", "operator", "admin")
            else None
        )

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        return Identity(peer, Role.VIEWER) if (name, password) == ("ada", "pass") else None


@pytest.fixture
async def secured_channel() -> AsyncIterator[grpc.aio.Channel]:
    async with live_broker() as harness:
        server = await serve_on_any_port(harness.loop_bridge, AdminAuthenticator(FakeKeyring()))
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            yield channel
        await server.stop(0)


REQUESTS = {
    method.name: method.input_type.name
    for method in pb.DESCRIPTOR.services_by_name["QueueAdmin"].methods
}


def call(channel: grpc.aio.Channel, method: str, authorization: str = "") -> Any:
    metadata = (("authorization", authorization),) if authorization else ()
    asked = getattr(QueueAdminStub(channel), method)(
        getattr(pb, REQUESTS[method])(), metadata=metadata
    )
    return asked.read() if method == "Watch" else asked


def test_every_method_has_a_role() -> None:
    assert METHOD_ROLES.keys() == REQUESTS.keys()


def test_error_table_lists_subclasses_before_their_base() -> None:
    for nth, (kind, _) in enumerate(STATUS_CODES):
        assert not any(issubclass(kind, other) for other, _ in STATUS_CODES[:nth]), kind


@pytest.mark.parametrize("authorization", ["", "Bearer unknown", "Basic !", "Digest x", "Bearer"])
async def test_call_without_credentials_is_refused(
    secured_channel: grpc.aio.Channel, authorization: str
) -> None:
    for method in REQUESTS:
        code, details, kind = await refusal(call(secured_channel, method, authorization))
        assert (code, kind) == (Code.UNAUTHENTICATED, "not_authenticated"), method
        assert "Bearer" in details


async def test_request_of_unauthenticated_caller_is_not_parsed(
    secured_channel: grpc.aio.Channel,
) -> None:
    """The request exceeds the limit; gRPC would refuse it if it were read."""
    request = pb.PublishRequest(queue="jobs", payload=bytes(17 << 20))
    code, _, _ = await refusal(QueueAdminStub(secured_channel).Publish(request))
    assert code == Code.UNAUTHENTICATED


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_may_call_only_its_methods(
    secured_channel: grpc.aio.Channel, role: Role
) -> None:
    for method, (needed, _) in METHOD_ROLES.items():
        asked = call(secured_channel, method, f"Bearer {role.label}")
        if role < needed:
            code, details, kind = await refusal(asked)
            assert (code, kind) == (Code.PERMISSION_DENIED, "not_allowed"), method
            assert f"{role.label}-1" in details and needed.label in details
        else:
            # The requests are empty, so some are refused; only authorized callers learn that.
            assert await code_of(asked) in (Code.OK, Code.NOT_FOUND, Code.INVALID_ARGUMENT), method


async def test_caller_can_ask_for_its_identity(secured_channel: grpc.aio.Channel) -> None:
    reported = await call(secured_channel, "WhoAmI", "Bearer operator")
    assert (reported.name, reported.role, reported.anonymous) == ("operator-1", "operator", False)
    reported = await call(secured_channel, "WhoAmI", "Basic YWRhOnBhc3M=")
    assert (reported.name, reported.role) == ("127.0.0.1", "viewer")  # the address without its port


async def test_without_users_everybody_is_administrator(grpc_api: GrpcApi) -> None:
    reported = await grpc_api.admin.WhoAmI(pb.WhoAmIRequest())
    assert (reported.name, reported.role, reported.anonymous) == ("anonymous", "admin", True)


async def test_with_queues_disabled_only_node_methods_answer() -> None:
    async with live_broker() as harness:
        server = await serve_on_any_port(
            harness.loop_bridge, AdminAuthenticator(), queues_enabled=False
        )
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            for method in REQUESTS:
                if method in (
                    "GetNode",
                    "ListNodes",
                    "GetCluster",
                    "GetStore",
                    "ListClients",
                    "ListLosses",
                    "WhoAmI",
                ):
                    await call(channel, method)
                elif method in ("ConfirmLoss", "GetClient", "KickClient"):
                    assert (await refusal(call(channel, method)))[2] != "queues_disabled"
                else:
                    code, details, kind = await refusal(call(channel, method))
                    assert (code, kind) == (Code.FAILED_PRECONDITION, "queues_disabled"), method
                    assert "queues.enabled" in details
        await server.stop(0)


async def test_empty_or_malformed_request_is_refused(grpc_api: GrpcApi) -> None:
    call = grpc_api.channel.stream_unary(f"/{SERVICE}/GetNode")
    code, details, kind = await refusal(call(iter(())))
    assert (code, kind) == (Code.INVALID_ARGUMENT, "invalid_request")
    assert "Send one message" in details
    code, details, kind = await refusal(
        grpc_api.channel.unary_unary(f"/{SERVICE}/Publish")(b"\xff" * 10)
    )
    assert (code, kind) == (Code.INVALID_ARGUMENT, "invalid_request")
    assert "queue_admin.proto" in details
    assert (await grpc_api.admin.GetNode(pb.GetNodeRequest())).name


async def test_unknown_method_is_unimplemented(grpc_api: GrpcApi) -> None:
    unknown = grpc_api.channel.unary_unary(f"/{SERVICE}/Explode")
    code, _, _ = await refusal(unknown(b""))
    assert code == Code.UNIMPLEMENTED

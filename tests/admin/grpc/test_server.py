"""The gRPC server: ports, TLS, health, reflection, stop, and a broker on another thread's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sluice.access.identity import AdminAuthenticator
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.server import GrpcTls, bind_sockets
from sluice.broker.net.listener import ListenerError
from sluice.errors import ConfigError
from tests.admin.grpc.conftest import GrpcApi, serve_on_any_port
from tests.admin.live_broker import LiveBroker, live_broker
from tests.admin.rest.conftest import Tokens
from tests.support.broker_process import StartBroker


async def test_free_port_is_chosen_and_reported(grpc_api: GrpcApi) -> None:
    assert grpc_api.server.address.host == "127.0.0.1"
    assert grpc_api.server.address.port > 0


async def test_occupied_port_is_refused_with_an_explanation(grpc_api: GrpcApi) -> None:
    taken = grpc_api.server.address
    with pytest.raises(
        ListenerError, match=rf"127\.0\.0\.1:{taken.port}: .*in use.*--grpc HOST:PORT"
    ):
        bind_sockets("grpc", taken)
    await grpc_api.admin.GetNode(pb.GetNodeRequest())


async def test_health_is_reported_for_server_and_service(grpc_api: GrpcApi) -> None:
    stub = health_pb2_grpc.HealthStub(grpc_api.channel)
    for service in ("", "sluice.admin.v1.QueueAdmin"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_services_and_describes_every_method(grpc_api: GrpcApi) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(grpc_api.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="sluice.admin.v1.QueueAdmin"),
    ]
    answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    assert {one.name for one in answers[0].list_services_response.service} == {
        "sluice.admin.v1.QueueAdmin",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert pb.DESCRIPTOR.serialized_pb in answers[1].file_descriptor_response.file_descriptor_proto


async def read_to_the_end(watch: Any) -> None:
    async for _ in watch:
        pass


async def test_watcher_is_notified_when_the_server_stops(grpc_api: GrpcApi) -> None:
    stub = health_pb2_grpc.HealthStub(grpc_api.channel)
    healths = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await healths.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch = aiter(grpc_api.admin.Watch(pb.WatchRequest()))
    await anext(watch)
    stopping = asyncio.create_task(grpc_api.server.stop(5.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end(watch)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "stopping" in (caught.value.details() or "")
    assert (await healths.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    healths.cancel()
    await stopping


async def test_running_call_is_answered_before_the_server_stops(
    grpc_api: GrpcApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> list[str]:
        begun.set()
        await go.wait()
        return ["done"]

    monkeypatch.setattr(grpc_api.harness.service, "verify", slowly)
    call = asyncio.ensure_future(grpc_api.admin.Verify(pb.VerifyRequest()))
    await begun.wait()
    stopping = asyncio.create_task(grpc_api.server.stop(10.0))
    await asyncio.sleep(0)
    go.set()
    assert list((await call).faults) == ["done"]
    await stopping


async def test_cancelled_call_cancels_its_request(
    grpc_api: GrpcApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def block_forever() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return []

    monkeypatch.setattr(grpc_api.harness.service, "verify", block_forever)
    call = grpc_api.admin.Verify(pb.VerifyRequest())
    asked = asyncio.ensure_future(call)
    await begun.wait()
    call.cancel()
    async with asyncio.timeout(30):
        await gone.wait()
    with pytest.raises(asyncio.CancelledError):
        await asked


# ---- TLS

CA = trustme.CA()


def tls(client_ca: bool = False) -> GrpcTls:
    issued = CA.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(one.bytes() for one in issued.cert_chain_pems)
    return GrpcTls(
        chain, issued.private_key_pem.bytes(), CA.cert_pem.bytes() if client_ca else None
    )


def channel_to(address: object, own: bool) -> grpc.aio.Channel:
    issued = CA.issue_cert("client@example.org")
    credentials = grpc.ssl_channel_credentials(
        CA.cert_pem.bytes(),
        issued.private_key_pem.bytes() if own else None,
        b"".join(one.bytes() for one in issued.cert_chain_pems) if own else None,
    )
    return grpc.aio.secure_channel(str(address), credentials)


async def test_watcher_that_loses_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.grpc.interceptor.REAUTHENTICATE_SECONDS", 0.0)
    monkeypatch.setattr("sluice.admin.grpc.servicer.WATCH_INTERVAL_SECONDS", 0.01)
    tokens = Tokens()
    async with live_broker() as harness:
        server = await serve_on_any_port(harness.loop_bridge, AdminAuthenticator(tokens))
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            who = (("authorization", "Bearer viewer"),)
            watch = QueueAdminStub(channel).Watch(pb.WatchRequest(), metadata=who)
            assert [(await watch.read()).node.queues for _ in range(3)] == [0, 0, 0]
            monkeypatch.setattr(tokens, "verify_bearer", lambda text: None)
            assert await watch.code() == grpc.StatusCode.UNAUTHENTICATED
        await server.stop(0)


async def test_tls_uses_the_configured_certificate() -> None:
    async with live_broker() as harness:
        server = await serve_on_any_port(harness.loop_bridge, harness.keyring, tls())
        async with channel_to(server.address, False) as channel:
            assert (await QueueAdminStub(channel).GetNode(pb.GetNodeRequest())).name
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await QueueAdminStub(channel).GetNode(pb.GetNodeRequest(), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await server.stop(0)


async def test_client_ca_requires_a_client_certificate() -> None:
    async with live_broker() as harness:
        server = await serve_on_any_port(harness.loop_bridge, harness.keyring, tls(client_ca=True))
        async with channel_to(server.address, True) as channel:
            assert (await QueueAdminStub(channel).GetNode(pb.GetNodeRequest())).name
        async with channel_to(server.address, False) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await QueueAdminStub(channel).GetNode(pb.GetNodeRequest(), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await server.stop(0)


async def test_invalid_tls_files_are_refused() -> None:
    async with live_broker() as harness:
        with pytest.raises(ConfigError, match=r"TLS files.*PEM"):
            await serve_on_any_port(harness.loop_bridge, harness.keyring, GrpcTls(b"no", b"pem"))


def test_private_key_is_not_shown() -> None:
    assert "secret" not in repr(GrpcTls(b"chain", b"secret"))


# ---- two threads, as in `sluice serve`


@pytest.fixture
def broker_on_other_loop() -> Iterator[LiveBroker]:
    """Run a broker on its own loop in another thread."""
    opened: Future[LiveBroker] = Future()
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with live_broker() as harness:
            opened.set_result(harness)
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    yield opened.result(20)
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(20)


async def test_broker_on_another_loop_answers(broker_on_other_loop: LiveBroker) -> None:
    server = await serve_on_any_port(broker_on_other_loop.loop_bridge, broker_on_other_loop.keyring)
    async with grpc.aio.insecure_channel(str(server.address)) as channel:
        admin = QueueAdminStub(channel)
        calls = [admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x")) for _ in range(50)]
        for call in calls:
            assert (await call).queue == "jobs"
        assert (
            await admin.GetQueueStats(pb.GetQueueStatsRequest(name="jobs"))
        ).total_messages == 50
        watch = admin.Watch(pb.WatchRequest())
        assert (await watch.read()).queues[0].total_messages == 50
        watch.cancel()
    await server.stop(0)


async def test_running_server_answers_and_stops_with_an_open_watch(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(config="[auth]\nallow_anonymous = true")
    async with grpc.aio.insecure_channel(str(broker.address("grpc"))) as channel:
        admin = QueueAdminStub(channel)
        await admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x"))
        watch = aiter(admin.Watch(pb.WatchRequest()))
        assert (await anext(watch)).queues[0].total_messages == 1
        await asyncio.to_thread(broker.stop)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(watch)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "Traceback" not in broker.log_text()

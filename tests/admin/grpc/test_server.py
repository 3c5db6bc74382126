"""The gRPC server itself: ports, TLS, health, reflection, stopping, and a broker on another thread's loop."""

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

from sluice.access.identity import Keyring
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.grpc.server import GrpcTls, serve_grpc
from sluice.broker.net.listener import ListenerError
from sluice.errors import ConfigError
from tests.admin.grpc.conftest import Door
from tests.admin.live_broker import Living, living
from tests.admin.rest.conftest import Tokens
from tests.support.broker_process import StartBroker


async def test_a_free_port_is_taken_and_told(door: Door) -> None:
    assert door.server.address.host == "127.0.0.1"
    assert door.server.address.port > 0


async def test_a_port_that_is_taken_is_refused_in_words(door: Door) -> None:
    port = door.server.address.port
    with pytest.raises(ListenerError, match=rf"127\.0\.0\.1:{port}: .*in use.*--grpc HOST:PORT"):
        await serve_grpc(door.house.desk, door.house.keyring, "127.0.0.1", port, None)
    mqtt = door.house.mqtt
    with pytest.raises(ListenerError):
        await serve_grpc(door.house.desk, door.house.keyring, mqtt.host, mqtt.port, None)
    await door.admin.GetNode(pb.GetNodeRequest())


async def test_health_is_told_for_the_server_and_the_service(door: Door) -> None:
    stub = health_pb2_grpc.HealthStub(door.channel)
    for service in ("", "sluice.admin.v1.QueueAdmin"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services_and_describes_every_call(door: Door) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(door.channel)
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


async def test_who_watches_is_told_that_the_server_stops(door: Door) -> None:
    stub = health_pb2_grpc.HealthStub(door.channel)
    healths = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await healths.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch = aiter(door.admin.Watch(pb.WatchRequest()))
    await anext(watch)
    stopping = asyncio.create_task(door.server.stop(5.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end(watch)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "stopping" in (caught.value.details() or "")
    assert (await healths.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    healths.cancel()
    await stopping


async def test_a_call_under_way_is_answered_before_the_server_stops(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> list[str]:
        begun.set()
        await go.wait()
        return ["done"]

    monkeypatch.setattr(door.house.service, "verify", slowly)
    call = asyncio.ensure_future(door.admin.Verify(pb.VerifyRequest()))
    await begun.wait()
    stopping = asyncio.create_task(door.server.stop(10.0))
    await asyncio.sleep(0)
    go.set()
    assert list((await call).faults) == ["done"]
    await stopping


async def test_a_caller_that_goes_away_takes_its_question_along(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def for_ever() -> list[str]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return []

    monkeypatch.setattr(door.house.service, "verify", for_ever)
    call = door.admin.Verify(pb.VerifyRequest())
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
    return GrpcTls(chain, issued.private_key_pem.bytes(), CA.cert_pem.bytes() if client_ca else None)


def channel_to(address: object, own: bool) -> grpc.aio.Channel:
    issued = CA.issue_cert("client@example.org")
    credentials = grpc.ssl_channel_credentials(
        CA.cert_pem.bytes(),
        issued.private_key_pem.bytes() if own else None,
        b"".join(one.bytes() for one in issued.cert_chain_pems) if own else None,
    )
    return grpc.aio.secure_channel(str(address), credentials)


async def test_who_may_not_watch_any_more_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.grpc.interceptor.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("sluice.admin.grpc.servicer.WATCH_SECONDS", 0.01)
    tokens = Tokens()
    async with living() as house:
        server = await serve_grpc(house.desk, Keyring(tokens), "127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            who = (("authorization", "Bearer viewer"),)
            watch = QueueAdminStub(channel).Watch(pb.WatchRequest(), metadata=who)
            assert [(await watch.read()).node.queues for _ in range(3)] == [0, 0, 0]
            monkeypatch.setattr(tokens, "of_bearer", lambda text: None)
            assert await watch.code() == grpc.StatusCode.UNAUTHENTICATED
        await server.stop(0)


async def test_over_tls_the_certificate_is_the_one_that_was_given() -> None:
    async with living() as house:
        server = await serve_grpc(house.desk, house.keyring, "127.0.0.1", 0, tls())
        async with channel_to(server.address, False) as channel:
            assert (await QueueAdminStub(channel).GetNode(pb.GetNodeRequest())).name
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await QueueAdminStub(channel).GetNode(pb.GetNodeRequest(), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await server.stop(0)


async def test_with_a_client_ca_a_client_must_show_its_certificate() -> None:
    async with living() as house:
        server = await serve_grpc(house.desk, house.keyring, "127.0.0.1", 0, tls(client_ca=True))
        async with channel_to(server.address, True) as channel:
            assert (await QueueAdminStub(channel).GetNode(pb.GetNodeRequest())).name
        async with channel_to(server.address, False) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await QueueAdminStub(channel).GetNode(pb.GetNodeRequest(), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await server.stop(0)


async def test_tls_files_that_are_none_are_refused() -> None:
    async with living() as house:
        with pytest.raises(ConfigError, match=r"TLS files.*PEM"):
            await serve_grpc(house.desk, house.keyring, "127.0.0.1", 0, GrpcTls(b"no", b"pem"))


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(GrpcTls(b"chain", b"secret"))


# ---- two threads, as in `sluice serve`


@pytest.fixture
def far_away() -> Iterator[Living]:
    """A broker on a loop of its own, in another thread."""
    opened: Future[Living] = Future()
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with living() as house:
            opened.set_result(house)
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    yield opened.result(20)
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(20)


async def test_a_broker_on_another_loop_is_asked_and_answers(far_away: Living) -> None:
    server = await serve_grpc(far_away.desk, far_away.keyring, "127.0.0.1", 0, None)
    async with grpc.aio.insecure_channel(str(server.address)) as channel:
        admin = QueueAdminStub(channel)
        calls = [admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x")) for _ in range(50)]
        for call in calls:
            assert (await call).queue == "jobs"
        assert (await admin.GetQueueStats(pb.GetQueueStatsRequest(name="jobs"))).total == 50
        watch = admin.Watch(pb.WatchRequest())
        assert (await watch.read()).queues[0].total == 50
        watch.cancel()
    await server.stop(0)


async def test_a_server_as_users_run_it_answers_and_stops_though_somebody_watches(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(config="[auth]\nallow_anonymous = true")
    async with grpc.aio.insecure_channel(str(broker.address("grpc"))) as channel:
        admin = QueueAdminStub(channel)
        await admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x"))
        watch = aiter(admin.Watch(pb.WatchRequest()))
        assert (await anext(watch)).queues[0].total == 1
        await asyncio.to_thread(broker.stop)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(watch)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "Traceback" not in broker.log_text()

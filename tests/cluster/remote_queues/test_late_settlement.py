"""Settlements of deliveries whose queue has moved: late ones still count, in every form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sluice.broker.acl import AccessControl, AuthCallback, AuthResult, PeerInfo
from sluice.client import Client, PublishRefused
from sluice.client.message import Message
from sluice.cluster.remote_queues.session_proxies import MqttSessionProxies
from sluice.queues.model.ledger import build_ledger, verify
from sluice.wire.packets import Connect
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, queue_in, two_nodes

# Ids that the publisher assigned; unlike Sluice's own ids, they contain no position.
PUBLISHER_IDS = [f"order/{n}" for n in range(5)]


async def next_message(client: Client) -> Message:
    async with asyncio.timeout(30):
        return await anext(aiter(client.messages()))


def settlement_sent(message: Message) -> dict[str, str]:
    return dict(message.properties.user)


async def deliver(net: MemoryCluster, worker: Client, name: str, **options: str) -> list[Message]:
    """Publish one message with each id, and return the deliveries to the worker."""
    async with net.nodes["a"].client(client_in(2, "maker")) as publisher:
        for publisher_id in PUBLISHER_IDS:
            await publisher.publish(
                f"$queue/{name}", publisher_id.encode(), qos=1, user=[("message-id", publisher_id)]
            )
    await worker.subscribe(f"$queue/{name}", qos=1, user={"consumer-group": "g", **options})
    return [await next_message(worker) for _ in PUBLISHER_IDS]


async def receives_only(net: MemoryCluster, client: Client, name: str, payload: bytes) -> None:
    """Check that the next delivery is of a message that is published now."""
    async with net.nodes["a"].client(client_in(2, "maker")) as publisher:
        await publisher.publish(f"$queue/{name}", payload, qos=1)
    assert (await next_message(client)).payload == payload


async def lose_owner(net: MemoryCluster, how: str) -> None:
    """Take cell 1 from its node, so that it has no owner."""
    if how == "killed":
        net.kill("b")
    else:
        await net.nodes["b"].close(1)


async def wait_settled(net: MemoryCluster, client: Client, count: int = 1) -> None:
    """Wait until the client's node has `count` pending requests for cell 1, which has no owner."""
    session = net.nodes["a"].node.local_cells[0].broker.registry.sessions[client.client_id]
    assert isinstance(session.proxies, MqttSessionProxies)
    session_proxy = session.proxies._proxies[1]
    await until(lambda: len(session_proxy._backlog) + len(session_proxy._in_flight) >= count)


FORMS: dict[str, list[tuple[str, bytes, list[str]]]] = {
    "in one batch": [("", b"", PUBLISHER_IDS)],
    "one by one": [("", b"", [publisher_id]) for publisher_id in PUBLISHER_IDS],
    "in the topic": [(f"/{publisher_id}", b"", []) for publisher_id in PUBLISHER_IDS],
    "in the payload": [("", json.dumps(PUBLISHER_IDS).encode(), [])],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("how", ["killed", "handed over"])
async def test_delivery_acked_while_its_queue_has_no_owner_is_never_redelivered(
    how: str, lasting: bool, form: str
) -> None:
    name = queue_in(1)
    options: dict[str, Any] = {"clean_start": False, "session_expiry": 600} if lasting else {}
    async with two_nodes() as net, net.nodes["a"].client(client_in(0), **options) as worker:
        await deliver(net, worker, name)
        await lose_owner(net, how)
        acking = [
            asyncio.create_task(
                worker.publish(
                    f"$queue/{name}/$ack{level}",
                    payload,
                    qos=1,
                    user=[("message-id", one) for one in ids],
                )
            )
            for level, payload, ids in FORMS[form]
        ]
        await wait_settled(net, worker, len(acking))
        await net.nodes["a"].open(1)
        assert [(await one).reason for one in acking] == [0] * len(acking)
        queue = net.nodes["a"].engine(1).queues[name]
        assert queue.depth == 0
        await receives_only(net, worker, name, b"next")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", ["$nack", "$reject", "$release", "$extend"])
@pytest.mark.parametrize("how", ["killed", "handed over"])
async def test_every_settlement_sent_while_a_queue_has_no_owner_counts(
    how: str, verb: str, form: str
) -> None:
    name = queue_in(1)
    reported = {"$nack": [("delay", "1h")], "$reject": [("reason", "unacceptable")]}.get(verb, [])
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as worker:
        await deliver(net, worker, name)
        await lose_owner(net, how)
        saying = [
            asyncio.create_task(
                worker.publish(
                    f"$queue/{name}/{verb}{level}",
                    payload,
                    qos=1,
                    user=[*reported, *(("message-id", one) for one in ids)],
                )
            )
            for level, payload, ids in FORMS[form]
        ]
        await wait_settled(net, worker, len(saying))
        await net.nodes["a"].open(1)
        assert [(await one).reason for one in saying] == [0] * len(saying)
        engine = net.nodes["a"].engine(1)
        account = build_ledger(engine.queues[name], engine.queues[name].groups["g"])
        assert verify(engine.queues) == []
        if verb == "$release":
            again = [await next_message(worker) for _ in PUBLISHER_IDS]
            assert [settlement_sent(one)["attempt"] for one in again] == ["1"] * len(PUBLISHER_IDS)
            return
        await receives_only(net, worker, name, b"next")
        if verb == "$nack":
            assert account.retrying == engine.queues[name].groups["g"].nacked == len(PUBLISHER_IDS)
        elif verb == "$reject":
            assert account.dead == engine.queues[f"dlq/{name}"].depth == len(PUBLISHER_IDS)
        else:
            assert account.delivered == len(PUBLISHER_IDS)
            ids = [("message-id", publisher_id) for publisher_id in PUBLISHER_IDS]
            assert (await worker.publish(f"$queue/{name}/$ack", b"", qos=1, user=ids)).reason == 0
            assert engine.queues[name].depth == 1, "only the last message is left"


async def test_failed_puback_after_a_move_counts_as_failure() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0), manual_ack=True) as worker:
        messages = await deliver(net, worker, name, **{"ack-mode": "puback"})
        await lose_owner(net, "handed over")
        for message in messages:
            await message.ack(0x80)
        await wait_settled(net, worker, len(PUBLISHER_IDS))
        await net.nodes["a"].open(1)
        group = net.nodes["a"].engine(1).queues[name].groups["g"]
        await until(lambda: group.nacked == len(PUBLISHER_IDS))


async def test_settlement_applied_but_not_confirmed_is_not_counted_again() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as worker:
        await deliver(net, worker, name)
        engine, store = net.nodes["b"].engine(1), net.stores[1]
        store.hold()
        failing = asyncio.create_task(
            worker.publish(
                f"$queue/{name}/$nack",
                b"",
                qos=1,
                user=[
                    *(("message-id", publisher_id) for publisher_id in PUBLISHER_IDS),
                    ("delay", "1h"),
                ],
            )
        )
        await until(
            lambda: (
                engine.queues[name].groups["g"].nacked == len(PUBLISHER_IDS)
                and store.count_unsynced() > 0
            )
        )
        net.kill("b", stored=True)
        await net.nodes["a"].open(1)
        assert (await failing).reason == 0
        cursors = net.nodes["a"].engine(1).queues[name].groups["g"].cursors
        assert [lease.failures for cursor in cursors for lease in cursor.leases.values()] == [
            1
        ] * len(PUBLISHER_IDS)


async def test_batch_settles_what_it_can_and_reports_the_rest() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as worker:
        await deliver(net, worker, name)
        await lose_owner(net, "handed over")
        ids = [("message-id", one) for one in ["unknown", *PUBLISHER_IDS[:3], "nothing"]]
        acking = asyncio.create_task(worker.publish(f"$queue/{name}/$ack", b"", qos=1, user=ids))
        await wait_settled(net, worker)
        await net.nodes["a"].open(1)
        answer = await acking
        assert answer.reason == 0x10 and "2 of 2 could not be settled" in (
            answer.reason_string or ""
        )
        again = [bytes((await next_message(worker)).payload).decode() for _ in PUBLISHER_IDS[3:]]
        assert sorted(again) == PUBLISHER_IDS[3:]
        assert net.nodes["a"].engine(1).queues[name].depth == 2


async def test_redelivered_message_is_settled_by_its_id_as_on_one_node() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as worker:
        first = await deliver(net, worker, name)
        await net.move(1, "a")
        again = [await next_message(worker) for _ in PUBLISHER_IDS]
        assert {settlement_sent(one)["message-id"] for one in again} == set(PUBLISHER_IDS)
        assert not {settlement_sent(one)["delivery-token"] for one in [*first, *again]} & {""}
        ids = [("message-id", publisher_id) for publisher_id in PUBLISHER_IDS]
        assert (await worker.publish(f"$queue/{name}/$ack", b"", qos=1, user=ids)).reason == 0
        assert net.nodes["a"].engine(1).queues[name].depth == 0


async def test_delivery_of_another_consumer_is_not_settled_by_the_old_holder() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as worker:
        await deliver(net, worker, name)
        await worker.unsubscribe(f"$queue/{name}")
        async with net.nodes["a"].client(client_in(4, "other")) as other:
            await other.subscribe(f"$queue/{name}", qos=1, user={"consumer-group": "g"})
            for _ in PUBLISHER_IDS:
                await next_message(other)
            await net.move(1, "a")
            for _ in PUBLISHER_IDS:
                await next_message(other)
            ids = [("message-id", publisher_id) for publisher_id in PUBLISHER_IDS]
            with pytest.raises(PublishRefused, match="no longer leased to this client"):
                await worker.publish(
                    f"$queue/{name}/$ack", b"", qos=1, user=[*ids, ("consumer-group", "g")]
                )
            assert net.nodes["a"].engine(1).queues[name].depth == len(PUBLISHER_IDS)
            assert (await other.publish(f"$queue/{name}/$ack", b"", qos=1, user=ids)).reason == 0


async def test_puback_does_not_ack_a_delivery_that_its_client_has_nacked_by_id() -> None:
    name = queue_in(1)
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0), version=4, manual_ack=True) as worker,
    ):
        await worker.subscribe(f"$queue/{name}/$group/g", qos=1)
        async with net.nodes["a"].client(client_in(2)) as publisher:
            await publisher.publish(f"$queue/{name}", b"", qos=1, user=[("message-id", "mine")])
        message = await next_message(worker)
        await lose_owner(net, "handed over")
        failing = asyncio.create_task(worker.publish(f"$queue/{name}/$nack/mine", b"", qos=1))
        await wait_settled(net, worker)
        await message.ack()
        await net.nodes["a"].open(1)
        await failing
        queue = net.nodes["a"].engine(1).queues[name]
        assert queue.depth == 1 and queue.groups["g"].nacked == 1


class ByName(AccessControl):
    """Authenticates every client as the user that it names."""

    def authenticate(self, connect: Connect, caller: PeerInfo, reply: AuthCallback) -> None:
        reply(AuthResult(user=connect.username or ""))


async def test_delivery_of_another_cell_is_bound_to_the_user_of_its_client() -> None:
    name, client_id = queue_in(1), client_in(0)
    async with two_nodes() as net:
        net.nodes["a"].node.local_cells[0].broker.access = ByName()
        group = ("consumer-group", "g")
        async with net.nodes["a"].client(client_id, username="alice") as alice:
            (message, *_) = await deliver(net, alice, name)
            named = ("message-id", settlement_sent(message)["message-id"])
            await alice.publish(f"$queue/{name}/$nack", qos=1, user=[named, ("delay", "60s")])
        async with net.nodes["a"].client(client_id, username="mallory") as mallory:
            with pytest.raises(PublishRefused) as refusal:
                await mallory.publish(f"$queue/{name}/$ack", qos=1, user=[named, group])
            assert refusal.value.reason == 0x87
        async with net.nodes["a"].client(client_id, username="alice") as alice:
            await alice.publish(f"$queue/{name}/$ack", qos=1, user=[named, group])

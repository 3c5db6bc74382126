"""Publishing to queues and consuming from them with the client library."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from sluice.client import (
    Client,
    ClientClosed,
    Delivery,
    OutgoingMessage,
    PartialFailure,
    PublishesFailed,
    PublishRefused,
    Unsupported,
)
from sluice.client.queues.settler import MAX_IDS_PER_PUBLISH
from sluice.testing import VirtualBroker


async def take(client: Client, queue: str, count: int, **options: object) -> list[Delivery]:
    consumer = client.consumer(queue, **options)  # type: ignore[arg-type]
    return [await anext(consumer) for _ in range(count)]


async def test_message_is_delivered_with_all_its_properties(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("shop-1") as client:
        name = await client.publisher("orders").send({"n": 1}, key="ann", headers={"colour": "red"})
        [order] = await take(client, "orders", 1)
    assert (order.id, order.queue, order.group, order.attempt) == (name, "orders", "shop", 1)
    assert (order.json(), order.text, order.key) == ({"n": 1}, '{"n":1}', "ann")
    assert order.headers == {"partition-key": "ann", "colour": "red"}
    assert order.properties.content_type == "application/json"


async def test_many_messages_are_sent_at_once_each_with_its_own_id(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client() as client:
        names = await client.publisher("$queue/orders").send_many(
            ["a", OutgoingMessage("b", id="mine"), "c"]
        )
    assert len(set(names)) == 3 and names[1] == "mine"
    assert sorted(one.payload for one in sluice_broker.messages("orders")) == [b"a", b"b", b"c"]


async def test_refused_message_does_not_block_the_others() -> None:
    broker = VirtualBroker(queues={"small": {"limits": {"max_message_size": 10}}})
    async with broker.client() as client:
        with pytest.raises(PartialFailure, match="1 of 3 messages were not stored") as caught:
            await client.publisher("small").send_many(["a", "x" * 11, "c"])
        assert list(caught.value.refused) == [1]
        with pytest.raises(PublishRefused, match="small"):
            await client.publisher("small").send("x" * 11)
    assert sorted(one.payload for one in broker.messages("small")) == [b"a", b"c"]


async def test_drain_reports_refused_publishes_whose_confirms_were_not_awaited() -> None:
    broker = VirtualBroker(queues={"small": {"limits": {"max_message_size": 10}}})
    async with broker.client() as client:
        small = client.publisher("small")
        for payload in ("a", "x" * 11, "y" * 11):
            small.send_nowait(payload)
        client.publish_nowait("$queue/small", b"z" * 11, 1)
        with pytest.raises(PublishesFailed, match="3 publishes failed, the first") as caught:
            await client.drain()
        assert (caught.value.count, type(caught.value.__cause__)) == (3, PublishRefused)
        await client.drain()  # each failure is reported once
        seen, unseen = small.send_nowait("x" * 11), small.send_nowait("y" * 11)
        with pytest.raises(PublishRefused):
            await seen
        with pytest.raises(PublishesFailed, match="1 publish failed"):
            await client.drain()
        with pytest.raises(PublishRefused):
            await unseen  # after the report that counted it
        late = small.send_nowait("x" * 11)
        await client.wait_for_capacity()
        with pytest.raises(PublishesFailed, match="1 publish failed"):
            await client.drain()
        assert late.done


async def test_message_is_delayed_on_request(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        publisher = client.publisher("mail")
        later = datetime.fromtimestamp(sluice_broker.time.now, UTC) + timedelta(minutes=2)
        await publisher.send("second", deliver_at=later)
        await publisher.send("first", delay=60)
        await publisher.send("never", delay="5m", expiry_seconds=10)
        consumer = client.consumer("mail")
        await consumer.open()
        await sluice_broker.advance(seconds=59)
        assert consumer.buffered == 0
        await sluice_broker.advance(seconds=2)
        assert [one.payload for one in consumer.take_waiting()] == [b"first"]
        await sluice_broker.advance(minutes=1)
        assert [one.payload for one in consumer.take_waiting() if one.attempt == 1] == [b"second"]
        await sluice_broker.advance(minutes=5)
        assert sluice_broker.depth("mail") == 2


async def test_job_whose_deadline_passes_while_buffered_is_handed_out_once(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("x")
        consumer = client.consumer("jobs")
        await consumer.open()
        await sluice_broker.advance(minutes=2)
        [job] = consumer.take_waiting()
        assert job.attempt == 3 and await job.ack(confirm=True)


async def test_each_settlement_has_its_effect(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        names = ["ack", "nack", "reject", "release", "invalid"]
        await client.publisher("jobs").send_many(OutgoingMessage(name, id=name) for name in names)
        jobs = {job.text: job for job in await take(client, "jobs", 5)}
        assert await jobs["ack"].ack()
        assert await jobs["nack"].nack("1m", "not now")
        assert await jobs["reject"].reject("delivery-error", "no good")
        assert await jobs["invalid"].reject("unacceptable", "unreadable")
        assert await jobs["release"].release()
        assert not await jobs["ack"].ack()
        await sluice_broker.settle()
        ledger = sluice_broker.ledger("jobs", "w")
        assert (ledger.acked, ledger.retrying, ledger.dead, ledger.delivered) == (1, 1, 2, 1)
    dead_letters = {one.payload.decode(): one for one in sluice_broker.dead_letters("jobs")}
    assert dead_letters["reject"].description == "no good"
    assert dead_letters["invalid"].headers["rejectionReason"] == "Unacceptable"


async def test_ack_publishes_in_the_same_step(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("order")
        [job] = await take(client, "jobs", 1)
        draft = OutgoingMessage(
            {"n": 1}, id="bill-1", key="k", content_type="a/b", headers={"x": "y"}
        )
        assert await job.ack(publish=[("bills", draft), ("$queue/mail", b"\0\xff")])
        assert not await job.ack() and sluice_broker.depth("jobs") == 0
        [bill] = await take(client, "bills", 1)
        assert (bill.id, bill.key, bill.headers["x"], bill.json()) == ("bill-1", "k", "y", {"n": 1})
        [mail] = await take(client, "mail", 1)
        assert mail.payload == b"\0\xff"


async def test_refused_message_of_an_ack_leaves_the_delivery_unsettled(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.declare_queue("bills", limits={"max_message_size": 3})
        await client.publisher("jobs").send("order")
        [job] = await take(client, "jobs", 1)
        with pytest.raises(PublishRefused):
            await job.ack(publish=[("bills", "too long")])
        assert not job.settled and sluice_broker.depth("bills") == 0
        assert await job.ack(publish=[("bills", "ok")])
    assert (sluice_broker.depth("jobs"), sluice_broker.depth("bills")) == (0, 1)


@pytest.mark.parametrize(
    ("description", "stored"),
    [("a\0b", "a b"), ("half \ud800", "half ?"), ("ü" * 100_000, "ü" * 16_383)],
)
async def test_description_that_no_packet_can_carry_costs_neither_job_nor_connection(
    sluice_broker: VirtualBroker, description: str, stored: str
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("x")
        [job] = await take(client, "jobs", 1)
        assert await job.reject(description=description, confirm=True)
    [dead_letter] = sluice_broker.dead_letters("jobs")
    assert dead_letter.description == stored


@pytest.mark.parametrize("text", ["a\0b", "half \ud800", "ü" * 40_000, "x" * 65_536])
async def test_property_that_no_packet_can_carry_is_refused_before_sending(
    sluice_broker: VirtualBroker, text: str
) -> None:
    async with sluice_broker.client("w-1") as client:
        for given in ({"user": {"a": text}}, {"user": [(text, "a")]}, {"content_type": text}):
            with pytest.raises(Unsupported, match="fits no packet"):
                await client.publish("$queue/jobs", b"x", qos=1, **given)
        with pytest.raises(Unsupported, match="fits no packet"):
            await client.subscribe("$queue/jobs", user={"consumer-group": text})
        await client.publish("$queue/jobs", b"x", qos=1, user={"a": "x" * 65_535})
    assert sluice_broker.depth("jobs") == 1


async def test_released_job_is_redelivered_without_counting_as_failure(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("x")
        consumer = client.consumer("jobs")
        await (await anext(consumer)).release()
        assert (await anext(consumer)).attempt == 1


async def test_extended_job_does_not_time_out(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("x")
        consumer = client.consumer("jobs")
        job = await anext(consumer)
        for _ in range(3):
            await sluice_broker.advance(seconds=20)
            assert await job.extend(confirm=True)
        assert consumer.buffered == 0
        await sluice_broker.advance(seconds=36)  # the deadline and then the backoff
        assert (await anext(consumer)).attempt == 2


async def test_late_settlement_is_refused_and_reported(
    sluice_broker: VirtualBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with sluice_broker.client("w-1") as slow, sluice_broker.client("w-2") as quick:
        await slow.publisher("jobs").send("x")
        [late] = await take(slow, "jobs", 1)
        other = quick.consumer("jobs", priority=1)  # this one gets all deliveries from now on
        await other.open()
        await sluice_broker.advance(seconds=36)
        job = await other.take(30)
        assert job is not None and job.attempt == 2
        with pytest.raises(PublishRefused, match="is no longer leased to this client"):
            await late.nack(confirm=True)
        late.settled = False
        with caplog.at_level(logging.WARNING, "sluice.client"):
            await late.ack()
            await sluice_broker.settle()
        assert f"$ack of {late.id} was refused" in caplog.text
        assert await job.ack(confirm=True)


async def test_concurrent_acks_are_sent_as_one_publish(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send_many(str(n) for n in range(50))
        jobs = await take(client, "jobs", 50)
        for job in jobs:
            await job.ack()
        assert client.unconfirmed == 0  # nothing is in flight yet
        await asyncio.sleep(0)
        assert client.unconfirmed == 1
        await client.drain()
    assert sluice_broker.ledger("jobs", "w").acked == 50


async def test_concurrent_acks_that_exceed_one_publish_are_all_sent(
    sluice_broker: VirtualBroker,
) -> None:
    count = 2 * MAX_IDS_PER_PUBLISH + 1
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send_many(str(n) for n in range(count))
        jobs = await take(client, "jobs", count, prefetch=count)
        for job in jobs:
            await job.ack()
        await asyncio.sleep(0)
        assert client.unconfirmed == 3
        await client.drain()
        assert sluice_broker.ledger("jobs", "w").acked == count


async def test_closing_the_client_does_not_lose_acks(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send("x")
        [job] = await take(client, "jobs", 1)
        await job.ack()
    assert sluice_broker.ledger("jobs", "w").acked == 1


async def test_closed_consumer_releases_its_unsettled_jobs(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send_many(["a", "b", "c"])
        async with client.consumer("jobs") as consumer:
            await anext(consumer)
            await sluice_broker.settle()
            assert consumer.buffered == 2
        assert sluice_broker.ledger("jobs", "w").waiting == 3
        assert {job.attempt for job in await take(client, "jobs", 3)} == {1}


async def test_closed_client_releases_the_jobs_of_its_consumers(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send_many(["a", "b", "c"])
        await (await anext(client.consumer("jobs"))).ack()
    ledger = sluice_broker.ledger("jobs", "w")
    assert (ledger.acked, ledger.waiting, ledger.retrying) == (1, 2, 0)


async def test_failed_client_leaves_its_jobs_to_others_as_failures(
    sluice_broker: VirtualBroker,
) -> None:
    with suppress(ValueError):
        async with sluice_broker.client("w-1") as client:
            await client.publisher("jobs").send("x")
            await anext(client.consumer("jobs"))
            raise ValueError("the program breaks")
    async with sluice_broker.client("w-2") as client:
        assert (await anext(client.consumer("jobs"))).attempt == 2


async def test_several_consumers_share_a_connection_with_plain_subscriptions(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.subscribe("plain/#")
        wide, narrow = client.consumer("jobs/#"), client.consumer("news")
        await wide.open()
        await narrow.open()
        await client.publisher("jobs/a").send("1")
        await client.publisher("jobs/b").send("2")
        await client.publisher("news").send("3")
        await client.publish("plain/x", "4")
        assert {(await anext(wide)).text, (await anext(wide)).text} == {"1", "2"}
        assert (await anext(narrow)).text == "3"
        assert (await anext(client.messages())).payload == b"4"


async def test_consumers_end_with_their_client(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        waiting = asyncio.create_task(consumer.take())
        await asyncio.sleep(0)
    assert await waiting is None


async def test_get_with_timeout_reports_that_nothing_came(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        with pytest.raises(TimeoutError):
            await client.consumer("jobs").take(0.01)


# ---- broken connections


async def test_publish_with_lost_acknowledgement_is_resent_and_stored_once(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("p-1") as client:
        await sluice_broker.publish("jobs", "first")
        sending = asyncio.create_task(client.publisher("jobs").send("once"))
        for _ in range(100):
            if sluice_broker.depth("jobs") == 2:
                break  # stored, and the PUBACK is not read yet
            await asyncio.sleep(0)
        assert not sending.done()
        sluice_broker.disconnect_clients()
        await sending
    assert [one.payload for one in sluice_broker.messages("jobs")] == [b"first", b"once"]


async def test_with_a_resumed_session_nothing_is_delivered_twice(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1", session_expiry=60) as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        await client.publisher("jobs").send_many(["a", "b", "c"])
        first = await anext(consumer)
        sluice_broker.disconnect_clients()
        await sluice_broker.settle()
        await first.ack()
        await client.wait_connected()
        await sluice_broker.settle()
        others = [await anext(consumer), await anext(consumer)]
        for job in others:
            assert job.attempt == 1
            await job.ack()
        await client.drain()
        assert consumer.buffered == 0
    assert sluice_broker.ledger("jobs", "w").acked == 3


async def test_resent_delivery_with_lost_puback_is_handed_out_once(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1", session_expiry=60) as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        await sluice_broker.publish("jobs", "once")
        for _ in range(100):
            if consumer.buffered:
                break
            await asyncio.sleep(0)
        sluice_broker.disconnect_clients()  # the broker has not received the PUBACK
        await sluice_broker.settle()
        await client.wait_connected()
        await sluice_broker.settle()
        [job] = consumer.take_waiting()
        assert await job.ack(confirm=True)
    assert sluice_broker.ledger("jobs", "w").acked == 1


async def test_job_redelivered_after_a_lost_ack_is_not_handed_out_again(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        server_end = sluice_broker._connections[-1].peer
        consumer = client.consumer("jobs")
        await consumer.open()
        await sluice_broker.publish("jobs", "once")
        job = await anext(consumer)
        server_end.pause_reading()  # the broker does not read from here on
        await job.ack()
        await sluice_broker.advance(minutes=1)
        await sluice_broker.settle()
        assert sluice_broker.ledger("jobs", "w").acked == 0
        assert consumer.settler.tracked[job.id].token != job.token, "redelivered with a new token"
        assert consumer.take_waiting() == []
        server_end.resume_reading()
        await client.drain()
        await sluice_broker.advance(minutes=10)
        assert consumer.take_waiting() == [] and consumer.settler.tracked == {}
    ledger = sluice_broker.ledger("jobs", "w")
    assert (ledger.acked, ledger.retrying, ledger.dead) == (1, 0, 0)


async def test_buffered_job_is_dropped_when_another_consumer_has_it(
    sluice_broker: VirtualBroker,
) -> None:
    gate = asyncio.Event()
    gate.set()

    async def dial(protocol: asyncio.Protocol) -> None:
        await gate.wait()
        await sluice_broker.dial(protocol)

    async with sluice_broker.client("w-1", dial=dial) as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        await sluice_broker.publish("jobs", "x")
        await sluice_broker.settle()
        assert consumer.buffered == 1
        gate.clear()
        sluice_broker.disconnect_clients()
        await sluice_broker.settle()
        async with sluice_broker.client("w-2") as other:
            preferred = other.consumer("jobs", priority=1)
            await preferred.open()
            gate.set()
            await client.wait_connected()
            await sluice_broker.settle()
            assert (consumer.buffered, preferred.buffered) == (0, 1)
            assert consumer.settler.tracked == {}


async def test_without_a_session_buffered_jobs_are_dropped_and_redelivered(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        await client.publisher("jobs").send_many(["a", "b"])
        await sluice_broker.settle()
        assert consumer.buffered == 2
        sluice_broker.disconnect_clients()
        await sluice_broker.settle()
        await client.wait_connected()
        await sluice_broker.settle()
        jobs = consumer.take_waiting()
        assert [job.attempt for job in jobs] == [2, 2]
        for job in jobs:
            assert await job.ack(confirm=True)


async def test_two_deliveries_of_one_id_are_distinguished_by_their_tokens(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1") as client:
        consumer = client.consumer("jobs")
        await consumer.open()
        publisher = client.publisher("jobs")
        await publisher.send("first", id="same")
        first = await anext(consumer)
        for _ in range(8):  # beyond the dedup window, with extended leases
            await first.extend()
            await sluice_broker.advance(seconds=20)
        await publisher.send("second", id="same")
        second = await anext(consumer)
        assert (first.id, first.text, second.text) == ("same", "first", "second")
        await first.ack()
        await client.drain()
        await second.nack("1h", confirm=True)
    ledger = sluice_broker.ledger("jobs", "w")
    assert (ledger.acked, ledger.retrying) == (1, 1)


# ---- MQTT 3.1.1


async def test_3_1_1_consumer_settles_by_topic_and_by_puback(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client("w-1", version=4) as client:
        publisher = client.publisher("jobs")
        await publisher.send_many(["ack", "nack", "reject", "release"])
        jobs = {job.text: job for job in await take(client, "jobs", 4, group="old")}
        await jobs["ack"].ack()
        await jobs["nack"].nack()
        await jobs["reject"].reject()
        await jobs["release"].release()
        await sluice_broker.settle()
        ledger = sluice_broker.ledger("jobs", "old")
        assert (ledger.acked, ledger.retrying, ledger.dead, ledger.delivered) == (1, 1, 1, 1)


async def test_3_1_1_client_refuses_what_it_cannot_carry(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1", version=4) as client:
        with pytest.raises(Unsupported, match="cannot carry key"):
            await client.publisher("jobs").send("x", key="k")
        with pytest.raises(Unsupported, match="cannot carry prefetch"):
            await client.consumer("jobs", prefetch=5).open()
        await client.publisher("jobs").send("x")
        [job] = await take(client, "jobs", 1)
        with pytest.raises(Unsupported, match="cannot carry delay"):
            await job.nack(5)


async def test_declare_creates_or_changes_a_queue(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        assert await client.declare_queue("jobs", retry_policy={"max_retries": 0})
        assert not await client.declare_queue("$queue/jobs", limits={"max_queue_depth": 1})
        await client.publisher("jobs").send("x")
        with pytest.raises(PublishRefused, match="is full"):
            await client.publisher("jobs").send("y")
        with pytest.raises(PublishRefused, match="colour"):
            await client.declare_queue("jobs", colour="red")
        job = await anext(client.consumer("jobs"))
        await job.nack(confirm=True)
    assert [one.reason for one in sluice_broker.dead_letters("jobs")] == ["max_retries"]


async def test_closed_consumer_yields_nothing_more(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        async with client.consumer("jobs") as consumer:
            pass
        assert await consumer.take() is None
        with pytest.raises(ClientClosed, match="Make a new one"):
            await consumer.open()


async def test_ack_after_the_end_of_the_client_is_no_error(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client("w-1") as client:
        await client.publisher("jobs").send_many(["a", "b"])
        first, second = await take(client, "jobs", 2)
        await client.close(drain_seconds=0)
    assert await first.ack()
    await asyncio.sleep(0)
    with pytest.raises(ClientClosed):
        await second.ack(confirm=True)


async def test_index_of_each_refused_message_is_reported() -> None:
    broker = VirtualBroker(queues={"small": {"limits": {"max_message_size": 10}}})
    async with broker.client(max_unconfirmed=5) as client:  # so that answers arrive in between
        with pytest.raises(PartialFailure) as caught:
            await client.publisher("small").send_many(
                "x" * (11 if number % 7 == 3 else 1) for number in range(50)
            )
    assert list(caught.value.refused) == [3, 10, 17, 24, 31, 38, 45]
    assert broker.depth("small") == 43


async def test_client_is_one_member_of_one_group_of_a_queue(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        async with client.consumer("jobs", group="one"):
            with pytest.raises(Unsupported, match="use a second client for another group"):
                await client.consumer("jobs", group="other").open()
        await client.consumer("jobs", group="other").open()

"""What the admin service does for the plain cases, seen from the service and from the clients at once."""

from __future__ import annotations

import asyncio

import pytest

from sluice.admin.views import LetterFilter, Outgoing, QueueDetail
from sluice.errors import (
    GroupExists,
    InUse,
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    QueueError,
    QueueExists,
    QueueFull,
    UnknownGroup,
    UnknownMessage,
    UnknownQueue,
)
from tests.admin.conftest import MakeHouse
from tests.admin.kit import AdminHouse, facts, join, put, settle, take


async def test_a_queue_is_made_listed_changed_and_deleted(house: AdminHouse) -> None:
    admin = house.admin
    detail = await house.ask(admin.create_queue({"name": "tasks", "partitions": 3}))
    assert (detail.stats.name, detail.stats.partitions, len(detail.partitions)) == ("tasks", 3, 3)
    assert detail.config["limits"]["message_ttl"] == "7d"  # type: ignore[index]
    with pytest.raises(QueueExists):
        await house.ask(admin.create_queue({"name": "tasks"}))
    after = await house.ask(admin.configure("$queue/tasks", {"performance": {"prefetch": 7}}))
    assert after["performance"]["prefetch"] == 7 and after["partitions"] == 3  # type: ignore[index]
    assert await house.ask(admin.config("tasks")) == after
    with pytest.raises(InvalidQueueConfig, match="only become more"):
        await house.ask(admin.configure("tasks", {"partitions": 1}))
    await house.ask(admin.create_queue({"name": "other"}))
    assert [view.name for view in await house.ask(admin.list_queues())] == ["other", "tasks"]
    await house.ask(admin.delete_queue("tasks"))
    assert [view.name for view in await house.ask(admin.list_queues())] == ["other"]
    for refused in (admin.stats("tasks"), admin.delete_queue("tasks"), admin.config("tasks")):
        with pytest.raises(UnknownQueue):
            await house.ask(refused)


async def test_a_queue_that_is_deleted_while_it_is_made_was_made(house: AdminHouse) -> None:
    async def both() -> QueueDetail:
        made = asyncio.ensure_future(house.admin.create_queue({"name": "brief"}))
        await asyncio.sleep(0)
        await house.admin.delete_queue("brief")
        return await made

    assert (await house.ask(both())).stats.name == "brief"
    assert [one.name for one in await house.ask(house.admin.list_queues())] == []


@pytest.mark.parametrize("name", ["responses/x", "$queue/responses/x", "responses"])
async def test_no_queue_is_made_among_the_answers(house: AdminHouse, name: str) -> None:
    with pytest.raises(QueueError, match="responses is reserved"):
        await house.ask(house.admin.create_queue({"name": name}))
    reason, told = put(house.connect("c"), "$admin/queue/create", b'{"name": "%s"}' % name.encode())
    assert reason == 0x99 and "responses is reserved" in told
    assert not house.engine.queues


async def test_a_list_is_told_by_prefix_and_page(house: AdminHouse) -> None:
    for name in ("b/2", "a/1", "b/1", "c", "b"):
        await house.ask(house.admin.create_queue({"name": name}))

    async def names(**wishes: object) -> list[str]:
        return [one.name for one in await house.ask(house.admin.list_queues(**wishes))]  # type: ignore[arg-type]

    assert await names() == ["a/1", "b", "b/1", "b/2", "c"]
    assert await names(prefix="b/") == ["b/1", "b/2"]
    assert await names(prefix="$queue/b") == ["b", "b/1", "b/2"]
    assert await names(after="b", limit=2) == ["b/1", "b/2"]
    assert await names(prefix="b", after="b/1") == ["b/2"]
    assert await names(prefix="x") == []


async def test_a_change_is_answered_when_the_store_has_it_and_outlives_a_restart(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks", "partitions": 2}))
    await house.ask(house.admin.create_group("tasks", "late", "latest"))
    await house.ask(house.admin.publish("tasks", Outgoing(b"kept", key="k")))
    house.restart()
    (message,) = await house.ask(house.admin.peek("tasks"))
    assert (message.payload, message.key) == (b"kept", "k")
    assert [group.name for group in await house.ask(house.admin.groups("tasks"))] == ["late"]


async def test_what_is_published_goes_to_a_waiting_consumer_at_once(house: AdminHouse) -> None:
    worker = house.worker()
    published = await house.ask(
        house.admin.publish(
            "tasks",
            Outgoing(
                b'{"n": 1}',
                message_id="order-1",
                key="blue",
                content_type="application/json",
                response_topic="answers/1",
                correlation_data=b"\x01",
                properties=[("a", "1"), ("a", "2")],
            ),
        )
    )
    assert (published.message_id, published.queue, published.duplicate) == ("order-1", "tasks", False)
    (delivery,) = worker.messages()
    properties = delivery.properties()
    assert delivery.payload == b'{"n": 1}'
    assert properties.content_type == "application/json"
    assert (properties.response_topic, properties.correlation_data) == ("answers/1", b"\x01")
    assert [pair for pair in properties.user if pair[0] == "a"] == [("a", "1"), ("a", "2")]
    assert ("message-id", "order-1") in properties.user


async def test_publishing_obeys_the_rules_that_clients_obey(make_house: MakeHouse) -> None:
    house = make_house(
        ("small", {"limits": {"max_queue_depth": 1}}),
        ("over", {"limits": {"max_queue_depth": 1, "overflow": "dead-letter"}}),
        ("typed", {"schema": {"type": "object"}}),
    )
    admin = house.admin
    first = await house.ask(admin.publish("tasks", Outgoing(b"1", message_id="same")))
    second = await house.ask(admin.publish("tasks", Outgoing(b"2", message_id="same")))
    assert (first.duplicate, second.duplicate) == (False, True)
    assert [one.payload for one in await house.ask(admin.peek("tasks"))] == [b"1"]
    named = await house.ask(admin.publish("small", Outgoing(b"1")))
    assert (await house.ask(admin.message("small", named.message_id))).payload == b"1"
    with pytest.raises(QueueFull):
        await house.ask(admin.publish("small", Outgoing(b"2")))
    assert not (await house.ask(admin.publish("over", Outgoing(b"1")))).dead_letter
    assert (await house.ask(admin.publish("over", Outgoing(b"2")))).dead_letter
    with pytest.raises(InvalidPayload):
        await house.ask(admin.publish("typed", Outgoing(b"[]")))
    for wrong in (
        Outgoing(b"", priority=10),
        Outgoing(b"", delay=-1.0),
        Outgoing(b"", delay=float("nan")),
        Outgoing(b"", content_type="x" * 70_000),
        Outgoing(b"", response_topic="a/#"),
        Outgoing(b"", properties=[("a", "\0")]),
        Outgoing(b"", properties=[("a", "\ud800")]),
    ):
        with pytest.raises(InvalidQueueConfig):
            await house.ask(admin.publish("tasks", wrong))
    for name in ("", "a//b", "a/+", "responses/1", "dlq"):
        with pytest.raises(InvalidQueueName):
            await house.ask(admin.publish(name, Outgoing(b"")))


async def test_a_delayed_and_an_expiring_message_wait_and_go_like_those_of_clients(house: AdminHouse) -> None:
    worker = house.worker()
    await house.ask(house.admin.publish("tasks", Outgoing(b"later", delay=5.0)))
    await house.ask(house.admin.publish("tasks", Outgoing(b"at", deliver_at=house.loop.now + 7.0)))
    (one, two) = await house.ask(house.admin.peek("tasks"))
    assert (one.state, two.state) == ("delayed", "delayed")
    assert (one.deliver_at, two.deliver_at) == (house.loop.now + 5.0, house.loop.now + 7.0)
    assert worker.messages() == []
    house.advance(5)
    assert worker.payloads() == [b"later"]
    house.advance(2)
    assert worker.payloads() == [b"at"]
    await house.ask(house.admin.publish("other", Outgoing(b"short", expiry=3.0)))
    house.advance(4)
    assert await house.ask(house.admin.peek("other")) == []


async def test_a_publish_has_a_delay_or_a_time_not_both(house: AdminHouse) -> None:
    both = Outgoing(b"when", delay=5.0, deliver_at=house.loop.now + 7.0)
    with pytest.raises(InvalidQueueConfig, match="both delay and deliver_at"):
        await house.ask(house.admin.publish("tasks", both))


async def test_a_strict_queue_says_that_it_has_one_partition(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "line", "ordering": "strict", "partitions": 10}))
    assert (await house.ask(house.admin.config("line")))["partitions"] == 1


async def test_the_figures_of_a_queue_follow_its_messages(house: AdminHouse) -> None:
    worker = house.worker("w-1")
    for number in range(4):
        house.publish(b"%d" % number)
    acked, nacked, held, _ = take(worker)
    settle(worker, "ack", acked)
    settle(worker, "nack", nacked)
    stats = await house.ask(house.admin.stats("tasks"))
    assert (stats.depth, stats.inflight, stats.retrying, stats.acked, stats.enqueued) == (3, 2, 1, 1, 4)
    assert (stats.active_consumers, stats.partitions_assigned, stats.groups) == (1, 10, 1)
    assert (stats.retried, stats.dlq, stats.is_dead_letters) == (1, "dlq/tasks", False)
    settle(worker, "reject", held)
    stats = await house.ask(house.admin.stats("tasks"))
    assert (stats.dead, stats.dlq_depth) == ({"rejected": 1}, 1)
    assert (await house.ask(house.admin.stats("dlq/tasks"))).is_dead_letters
    group = await house.ask(house.admin.group("tasks", "w"))
    ledger = group.ledger
    assert (ledger.enqueued, ledger.delivered, ledger.retrying, ledger.acked, ledger.dead) == (4, 1, 1, 1, 1)
    assert (group.lag, group.nacked) == (2, 1)
    (consumer,) = await house.ask(house.admin.consumers("tasks"))
    assert (consumer.client, consumer.inflight, consumer.connected) == ("w-1", 1, True)
    assert consumer.partitions == list(range(10))
    node = await house.ask(house.admin.node())
    assert (node.queues, node.messages, node.connections) == (2, 3, 1)
    assert (await house.ask(house.admin.nodes()))[0].name == "local"


async def test_rates_do_not_depend_on_who_looks_how_often(house: AdminHouse) -> None:
    worker = house.worker(prefetch=1000)
    await house.ask(house.admin.stats("tasks"))
    seen: list[tuple[float, float, float]] = []
    for second in range(12):
        for _ in range(10):
            house.publish(b"x")
        for message in take(worker):
            settle(worker, "ack", message)
        house.advance(0.5)
        for _ in range(second % 3 * 5):  # somebody who looks again and again
            await house.ask(house.admin.list_queues())
        house.advance(0.5)
        stats = await house.ask(house.admin.stats("tasks"))
        seen.append((stats.enqueue_rate, stats.deliver_rate, stats.ack_rate))
    assert seen[6:] == [(10.0, 10.0, 10.0)] * 6
    house.advance(60)
    await house.ask(house.admin.stats("tasks"))
    house.advance(5)
    assert (await house.ask(house.admin.stats("tasks"))).enqueue_rate == 0.0


async def test_peeking_shows_the_oldest_first_and_takes_nothing(house: AdminHouse) -> None:
    for number in range(6):
        house.publish(b"%d" % number, partition_key=f"k{number}")
        house.advance(1)
    found = await house.ask(house.admin.peek("tasks"))
    assert [one.payload for one in found] == [b"%d" % number for number in range(6)]
    assert {one.state for one in found} == {"waiting"}
    assert [one.payload for one in await house.ask(house.admin.peek("tasks", limit=2))] == [b"0", b"1"]
    assert await house.ask(house.admin.peek("tasks", limit=0)) == []
    (one,) = await house.ask(house.admin.peek("tasks", partition=found[0].partition, limit=1))
    assert one.message_id == found[0].message_id
    cut = await house.ask(house.admin.peek("tasks", limit=1, payload_bytes=0))
    assert (cut[0].payload, cut[0].size) == (b"", 1)
    worker = house.worker(prefetch=2)
    first, _ = take(worker)
    settle(worker, "ack", first)
    left = await house.ask(house.admin.peek("tasks", group="w"))
    assert len(left) == 5 and {one.state for one in left} == {"delivered", "waiting"}
    assert {one.consumer for one in left if one.state == "delivered"} == {"w-1"}
    with pytest.raises(InvalidQueueConfig, match="no partition 10"):
        await house.ask(house.admin.peek("tasks", partition=10))
    with pytest.raises(UnknownGroup):
        await house.ask(house.admin.peek("tasks", group="nobody"))


async def test_a_message_is_found_by_either_of_its_names(house: AdminHouse) -> None:
    house.publish(b"mine", message_id="order-1")
    house.publish(b"ours")
    mine, ours = await house.ask(house.admin.peek("tasks"))
    for name, payload in (("order-1", b"mine"), (ours.message_id, b"ours")):
        assert (await house.ask(house.admin.message("tasks", name))).payload == payload
    house.advance(1000)  # the dedup window has forgotten it
    house.publish(b"new", message_id="order-2")
    house.restart()
    assert (await house.ask(house.admin.message("tasks", "order-1"))).sequence == mine.sequence
    with pytest.raises(UnknownMessage):
        await house.ask(house.admin.message("tasks", "order-3"))
    with pytest.raises(UnknownMessage):
        await house.ask(house.admin.message("tasks", "1-99"))


async def test_purging_leaves_what_somebody_works_on(house: AdminHouse) -> None:
    worker = house.worker(prefetch=2)
    for number in range(600):
        await house.ask(house.admin.publish("tasks", Outgoing(b"%d" % number)))
    assert await house.ask(house.admin.purge("tasks")) == 598
    assert (await house.ask(house.admin.stats("tasks"))).depth == 2
    for message in take(worker):
        settle(worker, "ack", message)
    assert await house.ask(house.admin.purge("tasks")) == 0


async def test_groups_are_made_sought_and_deleted(house: AdminHouse) -> None:
    admin = house.admin
    house.publish(b"1")
    house.advance(10)
    house.publish(b"2")
    late = await house.ask(admin.create_group("tasks", "late", "latest"))
    early = await house.ask(admin.create_group("tasks", "early"))
    assert (late.lag, early.lag) == (0, 2)
    assert early.oldest_at == house.loop.now - 10
    with pytest.raises(GroupExists):
        await house.ask(admin.create_group("tasks", "late"))
    for name in ("", "a/b", "a+", "x" * 300):
        with pytest.raises(InvalidQueueConfig):
            await house.ask(admin.create_group("tasks", name))
    assert (await house.ask(admin.seek("tasks", "late", "earliest"))).lag == 2
    assert (await house.ask(admin.seek("tasks", "late", f"@{house.loop.now - 5}"))).lag == 1
    assert (await house.ask(admin.seek("tasks", "late", "2000-01-01T00:00:00Z"))).lag == 2
    for wrong in ("", "soon", "@x", "@1e300"):
        with pytest.raises(InvalidQueueConfig):
            await house.ask(admin.seek("tasks", "late", wrong))
    await house.ask(admin.delete_group("tasks", "early"))
    with pytest.raises(UnknownGroup):
        await house.ask(admin.group("tasks", "early"))
    house.worker("late-1")
    with pytest.raises(InUse, match=r"has 1 consumer\."):
        await house.ask(admin.delete_group("tasks", "late"))


async def test_a_seek_brings_messages_back_to_a_connected_consumer_at_once(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"limits": {"retention": "1h"}}))
    worker = house.worker()
    house.publish(b"again")
    for message in take(worker):
        settle(worker, "ack", message)
    await house.ask(house.admin.seek("tasks", "w", "earliest"))
    assert worker.payloads() == [b"again"]


async def test_who_consumed_a_deleted_queue_consumes_the_one_of_its_name(house: AdminHouse) -> None:
    worker = house.worker()
    await house.ask(house.admin.delete_queue("tasks"))
    await house.ask(house.admin.create_queue({"name": "tasks"}))
    await house.ask(house.admin.publish("tasks", Outgoing(b"new")))
    assert worker.payloads() == [b"new"]


async def test_a_changed_binding_captures_from_then_on(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks", "bindings": ["a/+"]}))
    author = house.connect("author")
    put(author, "a/1", b"1")
    await house.ask(house.admin.configure("tasks", {"bindings": ["b/#"]}))
    put(author, "a/2", b"2")
    put(author, "b/3", b"3")
    found = await house.ask(house.admin.peek("tasks"))
    assert [(one.payload, one.topic) for one in found] == [(b"1", "a/1"), (b"3", "b/3")]


# ---- dead letters


async def bury_some(house: AdminHouse, *payloads: bytes, **wishes: str) -> None:
    """Each of them rejected by a consumer of group w, a second apart."""
    worker = house.worker("w-9")
    for payload in payloads:
        house.publish(payload)
        for message in take(worker):
            settle(worker, "reject", message, **wishes)
        house.advance(1)
    worker.disconnect()
    house.advance(1)


async def test_dead_letters_are_listed_page_by_page_and_by_filter(house: AdminHouse) -> None:
    admin = house.admin
    start = house.loop.now
    await bury_some(house, b"red 1", b"blue 2", b"red 3", b"blue 4")
    await house.ask(admin.create_queue({"name": "other", "dlq_config": {"topic": "dlq/tasks"}}))
    stranger = house.worker("o-1", "other")
    house.publish(b"not ours", "other")
    settle(stranger, "reject", take(stranger)[0])

    async def payloads(after: str = "", limit: int = 50, **wanted: object) -> list[bytes]:
        wish = LetterFilter(**wanted)  # type: ignore[arg-type]
        return [one.payload for one in await house.ask(admin.dead_letters("tasks", wish, after, limit))]

    assert await payloads() == [b"red 1", b"blue 2", b"red 3", b"blue 4"]
    assert await payloads(contains="red") == [b"red 1", b"red 3"]
    assert await payloads(since=start + 1, until=start + 3) == [b"blue 2", b"red 3"]
    assert await payloads(group="w") != [] and await payloads(group="x") == []
    assert await payloads(reason="rejected") != [] and await payloads(reason="max_retries") == []
    first, second, *_ = await house.ask(admin.dead_letters("tasks"))
    assert await payloads(after=second.message_id) == [b"red 3", b"blue 4"]
    assert await payloads(after=first.message_id, limit=1) == [b"blue 2"]
    await house.ask(admin.delete_dead_letter("tasks", second.message_id))
    assert await payloads(after=second.message_id) == [b"red 3", b"blue 4"], "also when that one is gone"
    assert second.headers["original-queue"] == "tasks"
    shown = await house.ask(admin.dead_letter("tasks", first.headers["original-message-id"]))
    assert shown.message_id == first.message_id
    assert [one.payload for one in await house.ask(admin.dead_letters("other"))] == [b"not ours"]


async def test_a_retried_dead_letter_is_delivered_again_at_once(house: AdminHouse) -> None:
    await bury_some(house, b"poison")
    worker = house.worker("w-1")
    other = house.worker("v-1", start="latest")
    (letter,) = await house.ask(house.admin.dead_letters("tasks"))
    done = await house.ask(house.admin.retry_dead_letter("tasks", letter.message_id))
    assert (done.retried, done.skipped, done.left) == (1, 0, 0)
    (again,) = take(worker)
    assert again.payload == b"poison" and other.messages() == [], "it goes to the group that failed it"
    assert facts(again)["message-id"] == letter.headers["original-message-id"]
    assert await house.ask(house.admin.dead_letters("tasks")) == []
    with pytest.raises(UnknownMessage):
        await house.ask(house.admin.retry_dead_letter("tasks", letter.message_id))
    settle(worker, "reject", again)
    (letter,) = await house.ask(house.admin.dead_letters("tasks"))
    by_old_name = letter.headers["original-message-id"]
    await house.ask(house.admin.retry_dead_letter("tasks", by_old_name, to_all=True))
    assert worker.payloads() == other.payloads() == [b"poison"]


async def test_many_dead_letters_are_retried_by_filter_and_up_to_a_limit(house: AdminHouse) -> None:
    await bury_some(house, b"red 1", b"blue 2", b"red 3", b"red 4")
    wanted = LetterFilter(contains="red")
    done = await house.ask(house.admin.retry_dead_letters("tasks", wanted, limit=2))
    assert (done.retried, done.skipped, done.left) == (2, 0, 1)
    left = [one.payload for one in await house.ask(house.admin.dead_letters("tasks"))]
    assert left == [b"blue 2", b"red 4"]
    worker = house.worker("w-1")
    assert sorted(worker.payloads()) == [b"red 1", b"red 3"]
    with pytest.raises(InvalidQueueConfig):
        await house.ask(house.admin.retry_dead_letters("tasks", limit=0))


async def test_a_letter_that_somebody_works_on_is_left_alone(house: AdminHouse) -> None:
    await bury_some(house, b"1", b"2")
    reader = house.worker("r-1", "dlq/tasks", prefetch=1)
    (held,) = take(reader)
    name = facts(held)["message-id"]
    for refused in (
        house.admin.retry_dead_letter("tasks", name),
        house.admin.delete_dead_letter("tasks", name),
    ):
        with pytest.raises(InUse, match="working on"):
            await house.ask(refused)
    done = await house.ask(house.admin.retry_dead_letters("tasks"))
    assert (done.retried, done.skipped) == (1, 1)


async def test_a_letter_whose_queue_is_gone_says_so(house: AdminHouse) -> None:
    await bury_some(house, b"1")
    await house.ask(house.admin.delete_queue("tasks"))
    (letter,) = await house.ask(house.admin.dead_letters("tasks"))
    with pytest.raises(InUse, match="is gone"):
        await house.ask(house.admin.retry_dead_letter("tasks", letter.message_id))


async def test_dead_letters_are_purged_by_filter(house: AdminHouse) -> None:
    await bury_some(house, b"red 1", b"blue 2", b"red 3")
    assert await house.ask(house.admin.purge_dead_letters("tasks", LetterFilter(contains="red"))) == 2
    assert [one.payload for one in await house.ask(house.admin.dead_letters("dlq/tasks"))] == [b"blue 2"]
    house.restart()
    assert [one.payload for one in await house.ask(house.admin.dead_letters("tasks"))] == [b"blue 2"]


async def test_letters_of_the_invalid_channel_are_dead_letters_too(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"dlq_config": {"invalid_topic": "invalid/tasks"}}))
    await bury_some(house, b"nonsense", reason="unacceptable")
    await bury_some(house, b"poison")
    letters = await house.ask(house.admin.dead_letters("tasks"))
    assert {(one.payload, one.queue) for one in letters} == {
        (b"nonsense", "invalid/tasks"),
        (b"poison", "dlq/tasks"),
    }
    (only,) = await house.ask(house.admin.dead_letters("tasks", LetterFilter(reason="unacceptable")))
    assert only.payload == b"nonsense"


async def test_the_books_are_verified_and_faults_are_named(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"1")
    take(worker)
    assert await house.ask(house.admin.verify()) == []
    house.engine.queues["tasks"].depth += 1
    (fault,) = await house.ask(house.admin.verify())
    assert "depth 2 on the books, 1 counted" in fault
    house.engine.queues["tasks"].depth -= 1


async def test_what_is_asked_by_mqtt_is_decided_by_the_same_service(house: AdminHouse) -> None:
    client = house.connect("boss")
    assert put(client, "$admin/queue/create", b'{"name": "tasks", "partitions": 4}')[0] == 0
    assert (await house.ask(house.admin.stats("tasks"))).partitions == 4
    join(client, "$admin/queue/tasks/stats", 0)
    await house.ask(house.admin.publish("tasks", Outgoing(b"x")))
    house.advance(1.5)
    assert b'"depth": 1' in client.messages()[-1].payload


async def test_a_look_past_much_that_is_settled_lets_the_broker_work(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("tasks", {"partitions": 1, "ordering": "none"}))
    busy, _ = house.worker("busy-1", prefetch=2000), house.worker("idle-1", prefetch=1)
    for _ in range(1000):
        await house.ask(house.admin.publish("tasks", Outgoing(b"x")))
    first, *rest = take(busy)
    for message in rest:
        settle(busy, "ack", message)
    breaths = 0
    breathe = house.admin._hands.breathe

    async def count() -> None:
        nonlocal breaths
        breaths += 1
        await breathe()

    monkeypatch.setattr(house.admin._hands, "breathe", count)
    found = await house.ask(house.admin.peek("tasks", "busy"))
    assert [one.message_id for one in found] == [facts(first)["message-id"]]
    assert breaths >= 4


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
async def test_a_name_that_no_packet_can_carry_is_refused(house: AdminHouse, name: str) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks"}))
    with pytest.raises(InvalidQueueConfig, match="cannot be a group"):
        await house.ask(house.admin.create_group("tasks", name))
    assert await house.ask(house.admin.groups("tasks")) == []
    with pytest.raises(InvalidQueueName, match="can carry"):
        await house.ask(house.admin.publish(name, Outgoing(b"x")))

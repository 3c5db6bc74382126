"""Lookups of retained messages in a cluster: they run in slices and leave no state behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sluice.broker.sessions.retained_messages import STEPS_PER_SLICE
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription
from sluice.cluster.cell import MAX_LOOKUPS_PER_SESSION
from sluice.cluster.plain.interest import Interest
from sluice.cluster.plain.retained_search import RetainedSearches, SearchListener
from sluice.wire.packets import Publish
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, topic_in, two_nodes


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


class RecordingListener(SearchListener):
    def __init__(self) -> None:
        self.topics: list[bytes] = []
        self.over: list[tuple[int, bool]] = []
        self.waits = True

    def is_wanted(self) -> bool:
        return self.waits

    def on_found(self, messages: list[Publish]) -> None:
        self.topics += [message.topic for message in messages]

    def on_done(self, cell: int, has_moved: bool) -> None:
        self.over.append((cell, has_moved))


def fill(net: MemoryCluster, count: int) -> None:
    retained = net.nodes["b"].node.local_cells[1].broker.router.retained
    for nth in range(count):
        retained.put(Publish(b"a/%d" % nth, b"x", 0, True), False)


async def test_all_lookups_of_a_node_share_one_slice_of_a_turn(net: MemoryCluster) -> None:
    count = 10 * STEPS_PER_SLICE
    fill(net, count)
    cell = net.nodes["b"].node.local_cells[1]
    searches = RetainedSearches(0.0)  # one step in each turn
    listeners = [RecordingListener() for _ in range(3)]
    for listener in listeners:
        searches.start(cell, b"a/+", listener)
    assert sum(len(listener.topics) for listener in listeners) < STEPS_PER_SLICE
    turns = 0
    while not all(listener.over for listener in listeners):
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 30
    for listener in listeners:
        assert listener.topics == [b"a/%d" % nth for nth in range(count)]
        assert listener.over == [(1, False)]


async def test_lookup_ends_when_its_cell_moves_or_it_is_unwanted(net: MemoryCluster) -> None:
    fill(net, 3 * STEPS_PER_SLICE)
    cell = net.nodes["b"].node.local_cells[1]
    searches = RetainedSearches(0.0)
    gone, stays = RecordingListener(), RecordingListener()
    searches.start(cell, b"a/+", gone)
    searches.start(cell, b"a/+", stays)
    gone.waits = False
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    net.nodes["b"].node.on_cell_closed(1)
    await until(lambda: stays.over, "the search is over")
    assert (gone.over, stays.over) == ([(1, False)], [(1, True)])
    assert len(stays.topics) < 3 * STEPS_PER_SLICE


async def test_filter_without_wildcards_does_not_wait_for_lookups(net: MemoryCluster) -> None:
    fill(net, 3 * STEPS_PER_SLICE)
    cell = net.nodes["b"].node.local_cells[1]
    searches = RetainedSearches(0.0)
    searches.start(cell, b"#", RecordingListener())
    exact = RecordingListener()
    searches.start(cell, b"a/1", exact)
    assert (exact.topics, exact.over) == ([b"a/1"], [(1, False)])


async def test_filters_above_the_lookup_limit_all_get_their_messages(net: MemoryCluster) -> None:
    fill(net, 2)
    filters = [
        f"+/{nth % 2}" if nth < 2 else f"+/x{nth}" for nth in range(3 * MAX_LOOKUPS_PER_SESSION)
    ]
    filters.append("#")
    async with net.nodes["a"].client(client_in(0)) as client:
        await client.subscribe(filters)
        cell = net.nodes["a"].node.local_cells[0]
        got = []
        async with asyncio.timeout(30):
            async for message in client.messages():
                got.append(message.topic)
                if len(got) == 4:
                    break
        assert sorted(got) == ["a/0", "a/0", "a/1", "a/1"]
        await until(
            lambda: not cell.lookups and not cell.cluster_port._pending_lookups,
            "all lookups are over",
        )
        assert cell.cluster_port._active_lookups == {}


def test_levels_of_removed_filters_are_deleted_from_the_interest() -> None:
    interest = Interest(2)
    interest.replace_table(0, {b"a/b/c": 1, b"$share/g/a/b": 2, b"\0a/b/c": 1})
    interest.replace_table(1, {b"a/+": 1})
    interest.apply_changes(0, {b"a/b/c": 0, b"$share/g/a/b": 0})
    assert interest.match(b"a/b/c").cells == {0}  # by the binding
    assert interest.match(b"a/b").cells == {1}
    interest.apply_changes(0, {b"\0a/b/c": 0, b"never/announced": 0})
    assert interest.match(b"a/b/c").cells == set()
    interest.replace_table(1, {})
    assert interest._root.children == {}


async def test_lookups_that_wait_for_an_owner_do_not_block_other_filters(
    net: MemoryCluster,
) -> None:
    a, b = net.nodes["a"], net.nodes["b"]
    local_topic = topic_in(0, "here")
    a.node.local_cells[0].broker.router.retained.put(
        Publish(local_topic.encode(), b"x", 0, True), False
    )
    b.drop(1)
    lost = [topic_in(1, f"lost{nth}") for nth in range(MAX_LOOKUPS_PER_SESSION + 6)]
    async with a.client(client_in(0)) as client, asyncio.timeout(20):
        await client.subscribe([*lost, local_topic])
        assert (await anext(client.messages())).topic == local_topic
        port = a.node.local_cells[0].cluster_port
        assert port._active_lookups == {} and len(a.node._parked) == len(lost)
        await b.open(1)
        await until(
            lambda: not a.node._parked and not port.published_topics, "all lookups are over"
        )
        assert port._active_lookups == {} and port._started_lookups == {}


async def test_value_published_while_its_filter_waits_for_a_slot_is_not_followed_by_the_older_one(
    net: MemoryCluster,
) -> None:
    a = net.nodes["a"]
    cell = a.node.local_cells[0]
    session = Session("s", cell.broker.router.session_services)
    for nth in range(MAX_LOOKUPS_PER_SESSION + 2):
        subscription = Subscription(session, b"+/%d" % nth, 0, False, False, 0, 0)
        cell.broker.router.subscribe(subscription)
        cell.cluster_port.send_retained(subscription)
    seen = cell.cluster_port.published_topics[session]
    assert session in cell.cluster_port._pending_lookups
    cell.note_published(Publish(b"a/65", b"new", 0, True))
    since = [since for _, since in cell.cluster_port._pending_lookups[session].values()]
    assert since == [0, 0] and seen.has(b"a/65", since[0])
    assert not seen.has(b"a/65", seen.count), "a later SUBSCRIBE gets it"
    await until(lambda: session not in cell.cluster_port.published_topics, "all lookups are over")


async def test_retained_will_is_newer_than_a_running_lookup(net: MemoryCluster) -> None:
    cell = net.nodes["a"].node.local_cells[0]
    session = Session("s", cell.broker.router.session_services)
    subscription = Subscription(session, b"a/+", 0, False, False, 0, 0)
    cell.broker.router.subscribe(subscription)
    cell.cluster_port.send_retained(subscription)
    seen = cell.cluster_port.published_topics[session]
    cell.cluster_port.publish_unacknowledged(Publish(b"a/1", b"gone", 0, True), None)
    assert seen.has(b"a/1", 0)
    await until(lambda: session not in cell.cluster_port.published_topics, "the lookup is over")

"""Lookups of retained messages in a cluster: in slices, and without a trace when they are over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sluice.broker.sessions.retained import STEPS
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription
from sluice.cluster.cell import LOOKUPS_AT_ONCE
from sluice.cluster.plain.interest import Interest
from sluice.cluster.plain.retained_search import Searches, Seeker
from sluice.wire.packets import Publish
from tests.cluster.kit import until
from tests.cluster.memory_cluster import Net, client_in, topic_in, two_nodes


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    async with two_nodes() as made:
        yield made


class Asking(Seeker):
    def __init__(self) -> None:
        self.topics: list[bytes] = []
        self.over: list[tuple[int, bool]] = []
        self.waits = True

    def is_waiting(self) -> bool:
        return self.waits

    def found(self, messages: list[Publish]) -> None:
        self.topics += [message.topic for message in messages]

    def is_over(self, cell: int, moved: bool) -> None:
        self.over.append((cell, moved))


def fill(net: Net, count: int) -> None:
    retained = net.nodes["b"].node.local[1].broker.router.retained
    for nth in range(count):
        retained.put(Publish(b"a/%d" % nth, b"x", 0, True), False)


async def test_all_searches_of_a_node_share_one_slice_of_a_turn(net: Net) -> None:
    count = 10 * STEPS
    fill(net, count)
    cell = net.nodes["b"].node.local[1]
    searches = Searches(0.0)  # one step in each turn
    seekers = [Asking() for _ in range(3)]
    for seeker in seekers:
        searches.begin(cell, b"a/+", seeker)
    assert sum(len(seeker.topics) for seeker in seekers) < STEPS
    turns = 0
    while not all(seeker.over for seeker in seekers):
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 30
    for seeker in seekers:
        assert seeker.topics == [b"a/%d" % nth for nth in range(count)]
        assert seeker.over == [(1, False)]


async def test_a_search_ends_when_its_cell_moves_or_nobody_waits(net: Net) -> None:
    fill(net, 3 * STEPS)
    cell = net.nodes["b"].node.local[1]
    searches = Searches(0.0)
    gone, stays = Asking(), Asking()
    searches.begin(cell, b"a/+", gone)
    searches.begin(cell, b"a/+", stays)
    gone.waits = False
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    net.nodes["b"].node.closed(1)
    await until(lambda: stays.over, "the search is over")
    assert (gone.over, stays.over) == ([(1, False)], [(1, True)])
    assert len(stays.topics) < 3 * STEPS


async def test_a_filter_without_wildcards_does_not_wait_for_searches(net: Net) -> None:
    fill(net, 3 * STEPS)
    cell = net.nodes["b"].node.local[1]
    searches = Searches(0.0)
    searches.begin(cell, b"#", Asking())
    exact = Asking()
    searches.begin(cell, b"a/1", exact)
    assert (exact.topics, exact.over) == ([b"a/1"], [(1, False)])


async def test_more_filters_than_are_looked_up_at_once_all_get_their_messages(net: Net) -> None:
    fill(net, 2)
    filters = [f"+/{nth % 2}" if nth < 2 else f"+/x{nth}" for nth in range(3 * LOOKUPS_AT_ONCE)]
    filters.append("#")
    async with net.nodes["a"].client(client_in(0)) as client:
        await client.subscribe(filters)
        cell = net.nodes["a"].node.local[0]
        got = []
        async with asyncio.timeout(30):
            async for message in client.messages():
                got.append(message.topic)
                if len(got) == 4:
                    break
        assert sorted(got) == ["a/0", "a/0", "a/1", "a/1"]
        await until(lambda: not cell.lookups and not cell.abroad._pending, "all lookups are over")
        assert cell.abroad._running == {}


def test_levels_of_filters_that_are_gone_are_deleted_from_the_interest() -> None:
    interest = Interest(2)
    interest.replace(0, {b"a/b/c": 1, b"$share/g/a/b": 2, b"\0a/b/c": 1})
    interest.replace(1, {b"a/+": 1})
    interest.change(0, {b"a/b/c": 0, b"$share/g/a/b": 0})
    assert interest.match(b"a/b/c").cells == {0}  # by the binding
    assert interest.match(b"a/b").cells == {1}
    interest.change(0, {b"\0a/b/c": 0, b"never/told": 0})
    assert interest.match(b"a/b/c").cells == set()
    interest.replace(1, {})
    assert interest._root.children == {}


async def test_lookups_that_wait_for_an_owner_do_not_block_other_filters(net: Net) -> None:
    a, b = net.nodes["a"], net.nodes["b"]
    here = topic_in(0, "here")
    a.node.local[0].broker.router.retained.put(Publish(here.encode(), b"x", 0, True), False)
    b.drop(1)
    lost = [topic_in(1, f"lost{nth}") for nth in range(LOOKUPS_AT_ONCE + 6)]
    async with a.client(client_in(0)) as client, asyncio.timeout(20):
        await client.subscribe([*lost, here])
        assert (await anext(client.messages())).topic == here
        abroad = a.node.local[0].abroad
        assert abroad._running == {} and len(a.node._parked) == len(lost)
        await b.open(1)
        await until(lambda: not a.node._parked and not abroad.seen, "all lookups are over")
        assert abroad._running == {} and abroad._lookups == {}


async def test_value_published_while_its_filter_waits_for_a_slot_is_not_followed_by_the_older_one(
    net: Net,
) -> None:
    a = net.nodes["a"]
    cell = a.node.local[0]
    session = Session("s", cell.broker.router)
    for nth in range(LOOKUPS_AT_ONCE + 2):
        subscription = Subscription(session, b"+/%d" % nth, 0, False, False, 0, 0)
        cell.broker.router.subscribe(subscription)
        cell.abroad.send_retained(subscription)
    seen = cell.abroad.seen[session]
    assert session in cell.abroad._pending
    cell.note(Publish(b"a/65", b"new", 0, True))
    since = [since for _, since in cell.abroad._pending[session].values()]
    assert since == [0, 0] and seen.has(b"a/65", since[0])
    assert not seen.has(b"a/65", seen.count), "a later SUBSCRIBE gets it"
    await until(lambda: session not in cell.abroad.seen, "all lookups are over")


async def test_retained_will_counts_as_newer_than_what_is_being_looked_up(net: Net) -> None:
    cell = net.nodes["a"].node.local[0]
    session = Session("s", cell.broker.router)
    subscription = Subscription(session, b"a/+", 0, False, False, 0, 0)
    cell.broker.router.subscribe(subscription)
    cell.abroad.send_retained(subscription)
    seen = cell.abroad.seen[session]
    cell.abroad.spread_own(Publish(b"a/1", b"gone", 0, True), None)
    assert seen.has(b"a/1", 0)
    await until(lambda: session not in cell.abroad.seen, "the lookup is over")

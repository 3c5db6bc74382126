"""Nodes that join, leave, own cells and fall silent, with a real etcd and a real Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster.etcd.etcd_client import EtcdClient
from sluice.cluster.etcd.etcd_kv import EtcdKv
from sluice.cluster.membership.coordinator import (
    LINK_PROTOCOL_VERSION,
    CoordinatorError,
    NodeInfo,
    decode_node,
)
from sluice.cluster.membership.kv import Change, CoordinationKv, Lease
from sluice.cluster.membership.redis_kv import RedisKv
from tests.cluster.conftest import MembershipHarness, kv_at
from tests.cluster.kit import until
from tests.support.etcd_process import EtcdProcess, make_members
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import RedisProcess


async def test_nodes_see_each_other_join_and_leave(cluster_members: MembershipHarness) -> None:
    one = await cluster_members.join("one")
    two = await cluster_members.join("two")
    assert two.sees(one, two)
    assert two.membership.nodes[one.id] == one.this_node
    await until(lambda: one.sees(one, two))
    await two.membership.stop()
    await until(lambda: one.sees(one))
    assert one.lost == two.lost == 0 and not two.membership.may_own


async def test_one_of_two_claimants_wins(cluster_members: MembershipHarness) -> None:
    nodes = [await cluster_members.join(name) for name in ("one", "two", "three")]
    won = await asyncio.gather(*(node.membership.claim(3, None) for node in nodes))
    assert sorted(won) == [False, False, True]
    winner = nodes[won.index(True)]
    await until(lambda: all(node.membership.claims == {3: winner.id} for node in nodes))


async def test_cell_is_handed_from_one_node_to_the_next(cluster_members: MembershipHarness) -> None:
    one, two = await cluster_members.join("one"), await cluster_members.join("two")
    assert await one.membership.claim(0, None)
    assert not await two.membership.claim(0, None)
    await one.membership.release(0)
    assert 0 not in one.membership.claims
    assert await two.membership.claim(0, None)
    await one.membership.release(0)  # which it no longer owns
    assert two.membership.claims == {0: two.id}


async def test_claim_of_a_dead_node_stays_and_is_taken_over_by_name(
    cluster_members: MembershipHarness,
) -> None:
    one, two = await cluster_members.join("one"), await cluster_members.join("two")
    assert await one.membership.claim(0, None)
    await two.membership.evict(one.id)
    await until(lambda: one.lost == 1)
    assert not one.membership.may_own
    assert not await one.membership.claim(1, None)
    assert two.membership.claims == {0: one.id}
    assert not await two.membership.claim(0, "another node")
    assert await two.membership.claim(0, one.id)
    assert two.membership.claims == {0: two.id}


async def test_claim_can_be_confirmed_as_long_as_it_is_held(
    cluster_members: MembershipHarness,
) -> None:
    one, two = await cluster_members.join("one"), await cluster_members.join("two")
    assert await one.membership.claim(0, None)
    assert await one.membership.claim(0, one.id)
    await two.membership.evict(one.id)
    assert await two.membership.claim(0, one.id)
    one.membership.claims[0] = one.id  # as a suspended process believes
    assert not await one.membership.claim(0, one.id)
    await until(lambda: two.membership.claims == {0: two.id})


async def test_evicted_node_returns_with_a_new_id(cluster_members: MembershipHarness) -> None:
    one, two = await cluster_members.join("one"), await cluster_members.join("two")
    await two.membership.evict(one.id)
    await until(lambda: one.lost)
    before = one.id
    await one.start()
    assert one.membership.may_own
    await until(lambda: two.sees(one, two))
    assert (
        before not in two.membership.nodes
        and one.this_node.name == two.membership.nodes[one.id].name
    )


async def test_dead_node_is_removed_when_its_lease_ends(cluster_members: MembershipHarness) -> None:
    one = await cluster_members.join("one", lease=1.0)
    two = await cluster_members.join("two")
    await until(lambda: two.sees(one, two))
    one.membership._deregister()  # as if it were stopped: its lease is not renewed
    await until(lambda: two.sees(two))


async def test_suspicions_are_visible_to_all_and_end_with_their_author(
    cluster_members: MembershipHarness,
) -> None:
    one, two, three_nodes = [await cluster_members.join(name) for name in ("one", "two", "three")]
    await one.membership.suspect(three_nodes.id, True)
    await two.membership.suspect(three_nodes.id, True)
    await until(lambda: two.membership.suspicions == {three_nodes.id: {one.id, two.id}})
    await one.membership.suspect(three_nodes.id, False)
    await until(lambda: three_nodes.membership.suspicions == {three_nodes.id: {two.id}})
    await two.membership.stop()
    await until(lambda: three_nodes.membership.suspicions == {})


async def test_avoided_cells_are_visible_to_all_and_end_with_their_node(
    cluster_members: MembershipHarness,
) -> None:
    one, two = await cluster_members.join("one"), await cluster_members.join("two")
    await one.membership.avoid(3)
    assert one.membership.avoided == {3: {one.id}}
    await until(lambda: two.membership.avoided == {3: {one.id}})
    await one.membership.stop()
    await until(lambda: two.membership.avoided == {})


async def test_node_of_an_incompatible_version_is_refused_with_a_remedy(
    cluster_members: MembershipHarness,
) -> None:
    one = await cluster_members.join("one", speaks=LINK_PROTOCOL_VERSION + 1)
    with pytest.raises(
        CoordinatorError,
        match=rf"'one' uses version {LINK_PROTOCOL_VERSION + 1}.*Stop every node",
    ):
        await cluster_members.join("two")
    await one.membership.stop()
    await cluster_members.join("three")


async def test_all_nodes_of_a_cluster_get_one_secret_from_the_coordinator(
    cluster_members: MembershipHarness, server: Any
) -> None:
    nodes = [await cluster_members.join(name) for name in ("one", "two", "three")]
    found = await asyncio.gather(*(node.membership.shared_secret() for node in nodes))
    assert len(set(found)) == 1 and len(found[0]) >= 32
    await nodes[0].membership.stop()
    # The secret outlives the node that created it.
    assert await nodes[1].membership.shared_secret() == found[0]
    cluster_members.make_kv = lambda: kv_at(server, os.urandom(4).hex())
    other_cluster = await cluster_members.join("one")
    assert await other_cluster.membership.shared_secret() != found[0]


async def test_node_with_a_different_secret_is_refused_with_a_remedy(
    cluster_members: MembershipHarness,
) -> None:
    one = await cluster_members.join("one", link="here:1", key="aa")
    with pytest.raises(
        CoordinatorError, match=r"'one' has another cluster secret.*same cluster\.secret"
    ):
        await cluster_members.join("two", key="bb")
    # The only node may restart with another secret.
    again = await cluster_members.join("one", link="here:1", key="bb")
    await until(lambda: one.lost)
    assert again.sees(again)


async def test_node_with_a_different_number_of_cells_is_refused_with_a_remedy(
    cluster_members: MembershipHarness,
) -> None:
    await cluster_members.join("one")
    with pytest.raises(
        CoordinatorError, match=r"has 6 cells.*cluster\.cells is 7 here\. Set cluster\.cells = 6"
    ):
        await cluster_members.join("two", cells=7)


async def test_restarted_node_replaces_its_registration_at_the_same_address(
    cluster_members: MembershipHarness,
) -> None:
    before = await cluster_members.join("one", link="here:1")
    after = await cluster_members.join("one", link="here:1")
    assert after.sees(after)
    await until(lambda: before.lost)


async def test_second_node_of_the_same_name_elsewhere_is_refused(
    cluster_members: MembershipHarness,
) -> None:
    await cluster_members.join("one", lease=1.0, link="here:1")
    with pytest.raises(
        CoordinatorError, match=r"'one' is in the cluster already, at here:1\. Give each node"
    ):
        await cluster_members.join("one", lease=0.5, link="there:1")


class SlowKv:
    """A coordination KV whose lease answers and watch events can be held back."""

    def __init__(self, kv: CoordinationKv) -> None:
        self._kv = kv
        self._permits: asyncio.Queue[None] | None = None  # None: each answer arrives at once
        self._held_events: list[Callable[[], None]] | None = None  # None: so does each event
        self.asked: list[tuple[float, float]] = []  # time and length of each lease request

    def hold_answers(self) -> None:
        """From now on, let an answer about a lease arrive when `answer` is called."""
        self._permits = asyncio.Queue()

    def answer(self) -> None:
        assert self._permits is not None
        self._permits.put_nowait(None)

    def hold_watch_events(self) -> None:
        self._held_events = []

    def release_watch_events(self) -> None:
        held, self._held_events = self._held_events or [], None
        for event in held:
            event()

    async def _arrive(self, asked_at: float, lease: Lease) -> None:
        self.asked.append((asked_at, lease.seconds))
        if self._permits is not None:
            await self._permits.get()

    def _deliver(self, event: Callable[[], None]) -> None:
        if self._held_events is None:
            event()
        else:
            self._held_events.append(event)

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        self._kv.watch(
            lambda entries: self._deliver(lambda: on_snapshot(entries)),
            lambda changes: self._deliver(lambda: on_changes(changes)),
        )

    async def close(self) -> None:
        await self._kv.close()

    async def grant(self, seconds: float) -> Lease:
        asked_at = asyncio.get_running_loop().time()
        lease = await self._kv.grant(seconds)
        await self._arrive(asked_at, lease)
        return lease

    async def keep_alive(self, lease: Lease) -> bool:
        asked_at = asyncio.get_running_loop().time()
        is_alive = await self._kv.keep_alive(lease)
        await self._arrive(asked_at, lease)
        return is_alive

    async def revoke(self, lease: Lease) -> None:
        await self._kv.revoke(lease)

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None:
        await self._kv.put_with_lease(key, value, lease)

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        return await self._kv.compare_and_swap(key, old, new, guard)

    async def revoke_lease_of(self, key: str) -> None:
        await self._kv.revoke_lease_of(key)


@pytest.mark.parametrize("late", ["grant", "keep"])
async def test_lease_counts_from_the_request_however_late_the_reply_arrives(
    cluster_members: MembershipHarness, late: str
) -> None:
    """The coordinator counts from the request: a node that counts from the answer owns too long."""
    kv = SlowKv(cluster_members.make_kv())
    clock = asyncio.get_running_loop().time
    if late == "grant":
        kv.hold_answers()
    joining = asyncio.create_task(cluster_members.join("one", lease=3.0, kv=kv))
    if late == "keep":
        await joining
        kv.hold_answers()
        kv.asked.clear()
    await until(lambda: kv.asked)
    asked_at, seconds = kv.asked[0]
    await until(lambda: clock() > asked_at + seconds / 2)
    kv.answer()  # this answer only
    one = await joining
    await until(lambda: clock() >= asked_at + seconds)
    assert not one.membership.may_own
    await until(lambda: one.lost == 1)


async def test_evicted_node_that_has_not_noticed_can_claim_nothing(
    cluster_members: MembershipHarness,
) -> None:
    kv = SlowKv(cluster_members.make_kv())
    one = await cluster_members.join("one", lease=60.0, kv=kv)
    two = await cluster_members.join("two", lease=60.0)
    await until(lambda: one.sees(one, two))
    kv.hold_watch_events()
    await two.membership.evict(one.id)
    assert one.membership.may_own and one.sees(one, two)  # as far as it knows
    assert not await one.membership.claim(3, None)
    assert await two.membership.claim(3, None)
    assert two.membership.claims == {3: two.id}
    kv.release_watch_events()
    await until(lambda: one.lost == 1)


@pytest.fixture
def proxy(server: Any) -> Iterator[FaultProxy]:
    running = FaultProxy(server.port)
    yield running
    running.close()


async def test_partitioned_node_stops_owning_before_its_lease_ends(
    server: Any, proxy: FaultProxy, cluster_members: MembershipHarness
) -> None:
    """The coordinator counts from a later moment, so that two nodes never both may own a cell."""
    cluster = os.urandom(4).hex()
    proxied_kv = (
        RedisKv(f"redis://127.0.0.1:{proxy.port}", "sluice", cluster)
        if isinstance(server, RedisProcess)
        else EtcdKv(EtcdClient([f"127.0.0.1:{proxy.port}"]), cluster)
    )
    cluster_members.make_kv = lambda: kv_at(server, cluster)
    cut = await cluster_members.join("cut", lease=2.0, kv=proxied_kv)
    other = await cluster_members.join("other")
    await until(lambda: other.sees(cut, other))
    may_own_after_eviction: list[bool] = []
    watched = other.membership.on_change

    def record() -> None:
        watched()
        if cut.id not in other.membership.nodes:
            may_own_after_eviction.append(cut.membership.may_own)

    other.membership.on_change = record
    proxy.hold()
    await until(lambda: may_own_after_eviction)
    assert not any(may_own_after_eviction)
    assert cut.lost == 1
    proxy.release()
    await cut.start()
    await until(lambda: other.sees(cut, other))


@pytest.fixture(params=["etcd", "redis"])
def killable_server(
    request: pytest.FixtureRequest, redis_folder: Path
) -> Iterator[EtcdProcess | RedisProcess]:
    """A server that belongs to the test, which may kill it."""
    folder = redis_folder / os.urandom(4).hex()
    running = (
        EtcdProcess(folder).start() if request.param == "etcd" else RedisProcess(folder).start()
    )
    yield running
    running.stop()


async def test_coordinator_restart_is_survived(killable_server: EtcdProcess | RedisProcess) -> None:
    async with AsyncExitStack() as stack:
        cluster_members = MembershipHarness(lambda: kv_at(killable_server, "c"), stack)
        one, two = (
            await cluster_members.join("one", lease=20.0),
            await cluster_members.join("two", lease=20.0),
        )
        assert await one.membership.claim(0, None)
        killable_server.kill()
        claiming = asyncio.create_task(two.membership.claim(1, None))
        await asyncio.to_thread(killable_server.start)
        assert await claiming
        await until(lambda: one.membership.claims == {0: one.id, 1: two.id})
        assert one.sees(one, two) and one.lost == two.lost == 0
        three_nodes = await cluster_members.join("three")
        await until(lambda: one.sees(one, two, three_nodes))


async def test_etcd_leader_loss_is_survived(redis_folder: Path) -> None:
    members = await asyncio.to_thread(make_members, redis_folder / "etcd3", 3)
    try:
        async with AsyncExitStack() as stack:
            leader = next(one for one in members if one.is_leader())
            others = [one for one in members if one is not leader]
            at_leader = EtcdKv(
                EtcdClient([leader.endpoint, *(one.endpoint for one in others)]), "c"
            )
            at_other = EtcdKv(EtcdClient([one.endpoint for one in others]), "c")
            cluster_members = MembershipHarness(lambda: at_other, stack)
            one = await cluster_members.join("one", lease=20.0, kv=at_leader)
            two = await cluster_members.join("two", lease=20.0)
            leader.kill()
            assert await one.membership.claim(0, None)
            assert await two.membership.claim(1, None)
            await until(
                lambda: one.membership.claims == two.membership.claims == {0: one.id, 1: two.id}
            )
            assert one.lost == two.lost == 0 and one.sees(one, two)
    finally:
        for member in members:
            member.stop()


async def test_compacted_etcd_watch_is_restarted_with_all_keys(
    etcd_server: EtcdProcess,
) -> None:
    """Cut off while claims change and etcd is compacted: only a full listing has the changes."""
    cluster = os.urandom(4).hex()
    proxy = FaultProxy(etcd_server.port)
    client = EtcdClient([etcd_server.endpoint])
    try:
        async with AsyncExitStack() as stack:
            cluster_members = MembershipHarness(lambda: kv_at(etcd_server, cluster), stack)
            proxied_kv = EtcdKv(EtcdClient([f"127.0.0.1:{proxy.port}"]), cluster)
            cut = await cluster_members.join("cut", lease=20.0, kv=proxied_kv)
            other = await cluster_members.join("other")
            await until(lambda: cut.sees(cut, other))
            proxy.hold()
            for cell in range(3):
                assert await other.membership.claim(cell, None)
            await other.membership.release(0)
            await client.compact((await client.range(b"x")).header.revision)
            proxy.cut()
            proxy.release()
            await until(lambda: cut.membership.claims == {1: other.id, 2: other.id})
            assert cut.lost == 0
    finally:
        await client.close()
        proxy.close()


def test_registration_of_another_version_is_read_as_far_as_known() -> None:
    node = NodeInfo("one-1", "one", "h:1")
    assert decode_node(node.encode()) == node
    assert decode_node(node.encode()[:-1] + b',"colour":"red"}') == node
    first = decode_node(b'{"id":"one-1","name":"one","link":"h:1"}')
    assert first is not None and first.speaks == 0  # written before versions existed
    assert decode_node(b"nonsense") is None and decode_node(b'{"name":"x"}') is None

"""Nodes that come, go, hold cells and fall silent, with a real etcd and a real Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster.membership.kv import Board, Change, Lease
from sluice.cluster.membership.coordinator import SPEAKS, CoordinatorError, NodeInfo, decode_node
from sluice.cluster.etcd.etcd_kv import EtcdBoard
from sluice.cluster.etcd.etcd_client import EtcdClient
from sluice.cluster.membership.redis_kv import RedisBoard
from tests.cluster.conftest import Meeting, board_at
from tests.cluster.kit import until
from tests.support.etcd_process import EtcdProcess, make_members
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import RedisProcess


async def test_nodes_see_each_other_come_and_go(meeting: Meeting) -> None:
    one = await meeting.join("one")
    two = await meeting.join("two")
    assert two.sees(one, two)
    assert two.membership.nodes[one.id] == one.me
    await until(lambda: one.sees(one, two))
    await two.membership.stop()
    await until(lambda: one.sees(one))
    assert one.lost == two.lost == 0 and not two.membership.may_own


async def test_of_two_claimants_one_wins(meeting: Meeting) -> None:
    nodes = [await meeting.join(name) for name in ("one", "two", "three")]
    won = await asyncio.gather(*(node.membership.claim(3, None) for node in nodes))
    assert sorted(won) == [False, False, True]
    winner = nodes[won.index(True)]
    await until(lambda: all(node.membership.claims == {3: winner.id} for node in nodes))


async def test_a_cell_is_handed_from_one_to_the_next(meeting: Meeting) -> None:
    one, two = await meeting.join("one"), await meeting.join("two")
    assert await one.membership.claim(0, None)
    assert not await two.membership.claim(0, None)
    await one.membership.release(0)
    assert 0 not in one.membership.claims
    assert await two.membership.claim(0, None)
    await one.membership.release(0)  # which it no longer holds
    assert two.membership.claims == {0: two.id}


async def test_the_claim_of_a_dead_node_stays_and_is_taken_from_it_by_name(meeting: Meeting) -> None:
    one, two = await meeting.join("one"), await meeting.join("two")
    assert await one.membership.claim(0, None)
    await two.membership.put_out(one.id)
    await until(lambda: one.lost == 1)
    assert not one.membership.may_own
    assert not await one.membership.claim(1, None)
    assert two.membership.claims == {0: one.id}
    assert not await two.membership.claim(0, "somebody else")
    assert await two.membership.claim(0, one.id)
    assert two.membership.claims == {0: two.id}


async def test_a_claim_can_be_confirmed_as_long_as_it_is_held(meeting: Meeting) -> None:
    one, two = await meeting.join("one"), await meeting.join("two")
    assert await one.membership.claim(0, None)
    assert await one.membership.claim(0, one.id)
    await two.membership.put_out(one.id)
    assert await two.membership.claim(0, one.id)
    one.membership.claims[0] = one.id  # as one that slept believes
    assert not await one.membership.claim(0, one.id)
    await until(lambda: two.membership.claims == {0: two.id})


async def test_a_node_that_was_put_out_comes_back_as_another(meeting: Meeting) -> None:
    one, two = await meeting.join("one"), await meeting.join("two")
    await two.membership.put_out(one.id)
    await until(lambda: one.lost)
    before = one.id
    await one.start()
    assert one.membership.may_own
    await until(lambda: two.sees(one, two))
    assert before not in two.membership.nodes and one.me.name == two.membership.nodes[one.id].name


async def test_a_node_that_dies_is_gone_when_its_lease_is(meeting: Meeting) -> None:
    one = await meeting.join("one", lease=1.0)
    two = await meeting.join("two")
    await until(lambda: two.sees(one, two))
    one.membership._leave()  # as if it were stopped: nobody keeps its lease any more
    await until(lambda: two.sees(two))


async def test_suspicions_are_seen_by_all_and_end_with_those_who_have_them(meeting: Meeting) -> None:
    one, two, three = [await meeting.join(name) for name in ("one", "two", "three")]
    await one.membership.suspect(three.id, True)
    await two.membership.suspect(three.id, True)
    await until(lambda: two.membership.suspicions == {three.id: {one.id, two.id}})
    await one.membership.suspect(three.id, False)
    await until(lambda: three.membership.suspicions == {three.id: {two.id}})
    await two.membership.stop()
    await until(lambda: three.membership.suspicions == {})


async def test_a_node_that_the_others_would_not_understand_is_refused_with_a_cure(meeting: Meeting) -> None:
    one = await meeting.join("one", speaks=SPEAKS + 1)
    with pytest.raises(CoordinatorError, match=rf"'one' speaks version {SPEAKS + 1}.*Stop every node"):
        await meeting.join("two")
    await one.membership.stop()
    await meeting.join("three")


async def test_all_nodes_of_a_cluster_get_one_secret_from_the_coordinator(
    meeting: Meeting, server: Any
) -> None:
    nodes = [await meeting.join(name) for name in ("one", "two", "three")]
    found = await asyncio.gather(*(node.membership.shared_secret() for node in nodes))
    assert len(set(found)) == 1 and len(found[0]) >= 32
    await nodes[0].membership.stop()
    assert await nodes[1].membership.shared_secret() == found[0]  # it outlives the node that made it
    meeting.make_board = lambda: board_at(server, os.urandom(4).hex())
    stranger = await meeting.join("one")
    assert await stranger.membership.shared_secret() != found[0]


async def test_a_node_with_another_secret_than_the_others_is_refused_with_a_remedy(meeting: Meeting) -> None:
    one = await meeting.join("one", link="here:1", key="aa")
    with pytest.raises(CoordinatorError, match=r"'one' has another cluster secret.*same cluster\.secret"):
        await meeting.join("two", key="bb")
    again = await meeting.join("one", link="here:1", key="bb")  # restarted with another one, alone
    await until(lambda: one.lost)
    assert again.sees(again)


async def test_a_node_with_another_number_of_cells_is_refused_with_a_cure(meeting: Meeting) -> None:
    await meeting.join("one")
    with pytest.raises(
        CoordinatorError, match=r"has 6 cells.*cluster\.cells is 7 here\. Set cluster\.cells = 6"
    ):
        await meeting.join("two", cells=7)


async def test_a_node_that_comes_back_at_its_address_replaces_what_it_was(meeting: Meeting) -> None:
    before = await meeting.join("one", link="here:1")
    after = await meeting.join("one", link="here:1")
    assert after.sees(after)
    await until(lambda: before.lost)


async def test_a_second_node_of_the_same_name_elsewhere_is_refused(meeting: Meeting) -> None:
    await meeting.join("one", lease=1.0, link="here:1")
    with pytest.raises(
        CoordinatorError, match=r"'one' is in the cluster already, at here:1\. Give each node"
    ):
        await meeting.join("one", lease=0.5, link="there:1")


class SlowBoard:
    """A board whose answers about leases and whose news can be held back."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._permits: asyncio.Queue[None] | None = None  # None: each answer arrives at once
        self._held_news: list[Callable[[], None]] | None = None  # None: so does all news
        self.asked: list[tuple[float, float]] = []  # when for a lease, and for how long it was given

    def hold_answers(self) -> None:
        """From now on, an answer about a lease arrives when `answer` is called."""
        self._permits = asyncio.Queue()

    def answer(self) -> None:
        assert self._permits is not None
        self._permits.put_nowait(None)

    def hold_news(self) -> None:
        self._held_news = []

    def release_news(self) -> None:
        held, self._held_news = self._held_news or [], None
        for tell in held:
            tell()

    async def _arrive(self, asked_at: float, lease: Lease) -> None:
        self.asked.append((asked_at, lease.seconds))
        if self._permits is not None:
            await self._permits.get()

    def _tell(self, tell: Callable[[], None]) -> None:
        if self._held_news is None:
            tell()
        else:
            self._held_news.append(tell)

    def follow(
        self, on_all: Callable[[dict[str, bytes]], None], on_changes: Callable[[Sequence[Change]], None]
    ) -> None:
        self._board.follow(
            lambda facts: self._tell(lambda: on_all(facts)),
            lambda changes: self._tell(lambda: on_changes(changes)),
        )

    async def close(self) -> None:
        await self._board.close()

    async def grant(self, seconds: float) -> Lease:
        asked_at = asyncio.get_running_loop().time()
        lease = await self._board.grant(seconds)
        await self._arrive(asked_at, lease)
        return lease

    async def keep(self, lease: Lease) -> bool:
        asked_at = asyncio.get_running_loop().time()
        kept = await self._board.keep(lease)
        await self._arrive(asked_at, lease)
        return kept

    async def revoke(self, lease: Lease) -> None:
        await self._board.revoke(lease)

    async def pin(self, key: str, value: bytes, lease: Lease) -> None:
        await self._board.pin(key, value, lease)

    async def swap(self, key: str, old: bytes | None, new: bytes | None, guard: str = "") -> bytes | None:
        return await self._board.swap(key, old, new, guard)

    async def evict(self, key: str) -> None:
        await self._board.evict(key)


@pytest.mark.parametrize("late", ["grant", "keep"])
async def test_a_lease_counts_from_the_question_however_late_the_answer_arrives(
    meeting: Meeting, late: str
) -> None:
    """The coordinator counts from the question: a node that counts from the answer owns for too long."""
    board = SlowBoard(meeting.make_board())
    clock = asyncio.get_running_loop().time
    if late == "grant":
        board.hold_answers()
    joining = asyncio.create_task(meeting.join("one", lease=3.0, board=board))
    if late == "keep":
        await joining
        board.hold_answers()
        board.asked.clear()
    await until(lambda: board.asked)
    asked_at, seconds = board.asked[0]
    await until(lambda: clock() > asked_at + seconds / 2)
    board.answer()  # this one, and no other
    one = await joining
    await until(lambda: clock() >= asked_at + seconds)
    assert not one.membership.may_own
    await until(lambda: one.lost == 1)


async def test_a_node_that_was_evicted_and_has_not_heard_of_it_can_claim_nothing(meeting: Meeting) -> None:
    board = SlowBoard(meeting.make_board())
    one = await meeting.join("one", lease=60.0, board=board)
    two = await meeting.join("two", lease=60.0)
    await until(lambda: one.sees(one, two))
    board.hold_news()
    await two.membership.put_out(one.id)
    assert one.membership.may_own and one.sees(one, two)  # as far as it knows
    assert not await one.membership.claim(3, None)
    assert await two.membership.claim(3, None)
    assert two.membership.claims == {3: two.id}
    board.release_news()
    await until(lambda: one.lost == 1)


@pytest.fixture
def proxy(server: Any) -> Iterator[FaultProxy]:
    running = FaultProxy(server.port)
    yield running
    running.close()


async def test_a_node_cut_off_stops_owning_before_its_lease_can_end(
    server: Any, proxy: FaultProxy, meeting: Meeting
) -> None:
    """The other is told by the board, which counts from a later moment: never do both think that they may own."""
    cluster = os.urandom(4).hex()
    through = (
        RedisBoard(f"redis://127.0.0.1:{proxy.port}", "sluice", cluster)
        if isinstance(server, RedisProcess)
        else EtcdBoard(EtcdClient([f"127.0.0.1:{proxy.port}"]), cluster)
    )
    meeting.make_board = lambda: board_at(server, cluster)
    cut = await meeting.join("cut", lease=2.0, board=through)
    other = await meeting.join("other")
    await until(lambda: other.sees(cut, other))
    may_own_when_gone: list[bool] = []
    watched = other.membership.on_change

    def look() -> None:
        watched()
        if cut.id not in other.membership.nodes:
            may_own_when_gone.append(cut.membership.may_own)

    other.membership.on_change = look
    proxy.hold()
    await until(lambda: may_own_when_gone)
    assert not any(may_own_when_gone)
    assert cut.lost == 1
    proxy.release()
    await cut.start()
    await until(lambda: other.sees(cut, other))


@pytest.fixture(params=["etcd", "redis"])
def mortal(request: pytest.FixtureRequest, redis_folder: Path) -> Iterator[EtcdProcess | RedisProcess]:
    """A server of the test's own, which it may kill."""
    folder = redis_folder / os.urandom(4).hex()
    running = EtcdProcess(folder).start() if request.param == "etcd" else RedisProcess(folder).start()
    yield running
    running.stop()


async def test_a_restart_of_the_server_is_survived(mortal: EtcdProcess | RedisProcess) -> None:
    async with AsyncExitStack() as stack:
        meeting = Meeting(lambda: board_at(mortal, "c"), stack)
        one, two = await meeting.join("one", lease=20.0), await meeting.join("two", lease=20.0)
        assert await one.membership.claim(0, None)
        mortal.kill()
        claiming = asyncio.create_task(two.membership.claim(1, None))
        await asyncio.to_thread(mortal.start)
        assert await claiming
        await until(lambda: one.membership.claims == {0: one.id, 1: two.id})
        assert one.sees(one, two) and one.lost == two.lost == 0
        three = await meeting.join("three")
        await until(lambda: one.sees(one, two, three))


async def test_an_etcd_that_loses_its_leader_is_survived(redis_folder: Path) -> None:
    members = await asyncio.to_thread(make_members, redis_folder / "etcd3", 3)
    try:
        async with AsyncExitStack() as stack:
            leader = next(one for one in members if one.is_leader())
            others = [one for one in members if one is not leader]
            at_leader = EtcdBoard(EtcdClient([leader.endpoint, *(one.endpoint for one in others)]), "c")
            at_other = EtcdBoard(EtcdClient([one.endpoint for one in others]), "c")
            meeting = Meeting(lambda: at_other, stack)
            one = await meeting.join("one", lease=20.0, board=at_leader)
            two = await meeting.join("two", lease=20.0)
            leader.kill()
            assert await one.membership.claim(0, None)
            assert await two.membership.claim(1, None)
            await until(lambda: one.membership.claims == two.membership.claims == {0: one.id, 1: two.id})
            assert one.lost == two.lost == 0 and one.sees(one, two)
    finally:
        for member in members:
            member.stop()


async def test_a_watch_that_etcd_has_forgotten_is_begun_anew_with_all_there_is(
    etcd_server: EtcdProcess,
) -> None:
    """Cut off while claims change and etcd is compacted: what was missed is nowhere any more but in the whole."""
    cluster = os.urandom(4).hex()
    proxy = FaultProxy(etcd_server.port)
    client = EtcdClient([etcd_server.endpoint])
    try:
        async with AsyncExitStack() as stack:
            meeting = Meeting(lambda: board_at(etcd_server, cluster), stack)
            through = EtcdBoard(EtcdClient([f"127.0.0.1:{proxy.port}"]), cluster)
            cut = await meeting.join("cut", lease=20.0, board=through)
            other = await meeting.join("other")
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


def test_a_registration_of_another_version_is_read_as_far_as_it_is_known() -> None:
    node = NodeInfo("one-1", "one", "h:1")
    assert decode_node(node.encode()) == node
    assert decode_node(node.encode()[:-1] + b',"colour":"red"}') == node
    first = decode_node(b'{"id":"one-1","name":"one","link":"h:1"}')
    assert first is not None and first.speaks == 0  # from before there were versions
    assert decode_node(b"nonsense") is None and decode_node(b'{"name":"x"}') is None

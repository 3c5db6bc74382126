"""Which nodes are evicted before their lease ends, and which are not."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import MethodType
from typing import Any

import pytest

from sluice.cluster.failure_detector import FailureDetector, nodes_to_evict
from sluice.cluster.membership.coordinator import NodeInfo
from tests.cluster.conftest import MembershipHarness, Node, kv_at
from tests.cluster.kit import LinkedNode, until
from tests.support.fault_proxy import FaultProxy

NODES = {name: NodeInfo(name, name, "", started_at=nth) for nth, name in enumerate("abcde")}


@pytest.mark.parametrize(
    ("nodes", "suspicions", "out"),
    [
        ("abc", {}, ""),
        ("abc", {"c": "a"}, ""),  # the single reporter may be the faulty one
        ("abc", {"c": "ab"}, "c"),
        ("abc", {"c": "ab", "a": "c", "b": "c"}, "c"),  # c is cut off and receives nothing
        ("abc", {"c": "ax"}, ""),  # one reporter has left the cluster
        ("abcde", {"e": "ab"}, ""),
        ("abcde", {"e": "abc"}, "e"),
        ("abcde", {"d": "abc", "e": "abc"}, "de"),
        ("ab", {"b": "a"}, "b"),
        ("ab", {"a": "b"}, "a"),
        ("ab", {"a": "b", "b": "a"}, "b"),  # the younger
        ("a", {"a": "a"}, ""),
        ("ab", {"x": "ab"}, ""),
    ],
)
def test_node_unheard_by_the_majority_is_evicted(nodes: str, suspicions: Any, out: str) -> None:
    received = {suspect: set(by) for suspect, by in suspicions.items()}
    assert nodes_to_evict({name: NODES[name] for name in nodes}, received) == set(out)


class ProxiedNode:
    """A node with link, registration and failure detector."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link = LinkedNode(name, {})
        self.proxy: FaultProxy | None = None
        self.node: Node | None = None

    @property
    def id(self) -> str:
        assert self.node is not None
        return self.node.id

    async def join(self, cluster_members: MembershipHarness, stack: AsyncExitStack) -> None:
        await self.link.open()
        stack.push_async_callback(self.link.streams.close)
        self.proxy = FaultProxy(self.link.streams.address.port)
        stack.callback(self.proxy.close)
        self.node = await cluster_members.join(
            self.name, lease=60.0, link=f"127.0.0.1:{self.proxy.port}", before=self.link.join
        )
        links, membership = self.link.streams, self.node.membership
        detector = FailureDetector(links, membership, 0.05, 1.0)
        stack.push_async_callback(detector.stop)
        membership.on_change = MethodType(lambda links: links.update_nodes(membership.nodes), links)
        membership.on_change()
        detector.start()


@pytest.fixture
async def three_nodes(server: Any) -> AsyncIterator[list[ProxiedNode]]:
    cluster = os.urandom(4).hex()
    async with AsyncExitStack() as stack:
        cluster_members = MembershipHarness(lambda: kv_at(server, cluster), stack)
        nodes = [ProxiedNode(name) for name in ("one", "two", "three")]
        for node in nodes:
            await node.join(cluster_members, stack)
        yield nodes


def sees(node: ProxiedNode, *others: ProxiedNode) -> bool:
    assert node.node is not None
    return set(node.node.membership.nodes) == {one.id for one in others}


async def test_node_whose_process_is_gone_is_evicted_at_once(
    three_nodes: list[ProxiedNode],
) -> None:
    """Evicted long before its lease ends, which lasts a minute here."""
    one, two, dead = three_nodes
    await until(lambda: all(sees(node, *three_nodes) for node in three_nodes))
    await dead.link.streams.close()
    assert dead.proxy is not None
    dead.proxy.close()
    await until(lambda: sees(one, one, two))


async def test_node_unreachable_for_the_majority_is_evicted(three_nodes: list[ProxiedNode]) -> None:
    one, two, cut = three_nodes
    await until(lambda: all(sees(node, *three_nodes) for node in three_nodes))
    assert cut.proxy is not None and cut.node is not None
    cut.proxy.hold()
    await until(lambda: sees(one, one, two) and sees(two, one, two))
    await until(lambda: cut.node is not None and cut.node.lost)
    assert one.node is not None and two.node is not None
    assert one.node.lost == two.node.lost == 0

"""Limits of one client: each limit, and the error when it is reached."""

from __future__ import annotations

from pathlib import Path

from sluice.access.acl_file import read_rules
from sluice.broker.acl import (
    AccessControl,
    AccessControlList,
    AuthCallback,
    AuthResult,
    Grant,
    PeerInfo,
)
from sluice.broker.net.connection import Connection
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
)
from sluice.wire.packets import SubscriptionRequest as Request
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, Peer


class ByName(AccessControl):
    """Accept every user name without a check."""

    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        on_result(AuthResult(user=connect.username or ""))


def test_connections_per_address_are_limited() -> None:
    harness = BrokerHarness(max_connections_per_address=2)
    first, second = harness.connect("a"), harness.connect("b")
    for version, code in ((V5, 0x97), (V311, 3)):
        refused = harness.connect("c", version)
        assert refused.connack.reason == code and refused.closed
    second.drop()
    assert harness.connect("c").connack.reason == 0
    first.ping()


def test_address_that_opens_far_too_many_sockets_is_disconnected_before_connect() -> None:
    harness = BrokerHarness(max_connections_per_address=2)
    peers = [harness.open() for _ in range(6)]
    assert [peer.transport.aborted for peer in peers] == [False] * 4 + [True] * 2


def test_connections_per_user_are_limited() -> None:
    harness = BrokerHarness(access=ByName(), max_connections_per_user=2)
    ann = [harness.connect(f"ann-{nth}", username="ann") for nth in range(2)]
    assert harness.connect("ann-2", username="ann").connack.reason == 0x97
    assert harness.connect("ann-2", V311, username="ann").connack.reason == 3
    assert harness.connect("bob", username="bob").connack.reason == 0
    # A client without a user name is not counted.
    assert [harness.connect(f"x{nth}").connack.reason for nth in range(4)] == [0] * 4
    # A takeover adds no connection.
    assert harness.connect("ann-1", username="ann").connack.reason == 0
    ann[0].disconnect()
    assert harness.connect("ann-2", username="ann").connack.reason == 0


def test_client_above_message_rate_is_not_read_until_it_has_waited() -> None:
    harness = BrokerHarness(max_publish_rate=10.0)
    listener = harness.connect("l")
    listener.subscribe("t")
    client = harness.connect("c")
    for _ in range(10):
        client.publish("t", b"x")
    assert client.transport.reading
    for _ in range(5):  # input that was read already is processed, nothing is dropped
        client.publish("t", b"x")
    assert not client.transport.reading
    assert len(listener.messages()) == 15
    harness.advance(0.4)
    assert not client.transport.reading
    harness.advance(0.2)
    assert client.transport.reading
    client.ping()


def test_client_above_byte_rate_is_not_read_until_it_has_waited() -> None:
    harness = BrokerHarness(max_publish_byte_rate=1000.0)
    client = harness.connect("c")
    client.publish("t", b"x" * 3000)
    assert not client.transport.reading
    harness.advance(1.9)
    assert not client.transport.reading
    harness.advance(0.2)
    assert client.transport.reading
    for _ in range(100):
        client.ping()  # only publishes are counted
    assert client.transport.reading


def test_throttled_client_does_not_hit_keep_alive() -> None:
    harness = BrokerHarness(max_publish_rate=1.0)
    client = harness.connect("c", keep_alive=2)
    for _ in range(20):
        client.publish("t", b"x")
    harness.advance(10)
    assert not client.closed


def test_without_rate_limit_nothing_is_measured() -> None:
    harness = BrokerHarness()
    harness.connect("c")
    connection = harness.broker.registry.sessions["c"].connection
    assert isinstance(connection, Connection) and connection.rate_limiter is None


def test_oversized_packet_ends_connection_on_its_header() -> None:
    harness = BrokerHarness(max_packet_size=100)
    client = harness.connect("c")
    client.feed(b"\x30\xff\x7f")
    assert client.fault()[0] == 0x95


def test_subscriptions_per_client_are_limited() -> None:
    client = BrokerHarness(max_subscriptions=2).connect("c")
    assert client.subscribe("a", "b", "c") == [0, 0, 0x97]


# ---- slow authentication


class Later(AccessControl):
    """Complete authentication when the test decides."""

    def __init__(self) -> None:
        self.replies: list[AuthCallback] = []

    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        self.replies.append(on_result)


def begin(harness: BrokerHarness, *more: object) -> Client:
    client = Client(harness)
    client.version = V5
    packets = [Connect("c", V5, True, 0), *more]
    client.feed(b"".join(encode(one, V5) for one in packets))  # type: ignore[arg-type]
    return client


def test_nothing_is_read_or_answered_before_authentication_completes() -> None:
    access = Later()
    harness = BrokerHarness(access=access)
    client = begin(harness, Subscribe(1, [Request(b"t", 0)]), Publish(b"t", b"early", 0))
    assert client.take() == [] and not client.transport.reading
    client.feed(encode(Pingreq(), V5)[:1])  # input that the socket had read already
    client.feed(encode(Pingreq(), V5)[1:])
    access.replies[0](AuthResult())
    harness.loop.settle()
    assert [type(one) for one in client.take()] == [Connack, Suback, Publish, Pingresp]
    assert client.transport.reading


def test_late_refusal_closes_connection_and_ignores_buffered_packets() -> None:
    access = Later()
    harness = BrokerHarness(access=access)
    client = begin(harness, Publish(b"t", b"early", 0))
    access.replies[0](AuthResult(0x86, "wrong"))
    harness.loop.settle()
    (connack,) = client.take()
    assert isinstance(connack, Connack) and connack.reason == 0x86 and client.closed
    assert harness.counters.publishes_received == 0


def test_authentication_result_for_closed_or_timed_out_connection_is_dropped() -> None:
    access = Later()
    harness = BrokerHarness(access=access, connect_timeout=10.0)
    gone, slow = begin(harness), begin(harness)
    gone.drop()
    harness.advance(11)
    assert slow.closed
    for reply in access.replies:
        reply(AuthResult())
    harness.loop.settle()
    assert harness.sessions() == set()


def test_second_authentication_result_is_ignored() -> None:
    access = Later()
    harness = BrokerHarness(access=access)
    client = begin(harness)
    access.replies[0](AuthResult())
    access.replies[0](AuthResult(0x86))
    harness.loop.settle()
    assert not client.closed and len(client.take()) == 1


def test_connection_ends_when_its_credentials_expire() -> None:
    class ForAMinute(AccessControl):
        def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
            on_result(AuthResult(user="eve", expires_at=harness.loop.now + 60))

    harness = BrokerHarness(access=ForAMinute())
    client = harness.connect("c")
    harness.advance(59)
    client.ping()
    harness.advance(2)
    assert client.fault()[0] == 0x87


def test_malformed_input_closes_only_that_connection(tmp_path: Path) -> None:
    harness = BrokerHarness()
    good = harness.connect("good")
    bad: Peer = harness.connect("bad")
    bad.feed(b"\xf0\xff\xff\xff\xff")
    assert bad.closed
    good.ping()
    acl = AccessControlList(read_rules('[[rule]]\nallow = "connect"'))
    assert not Grant(acl, "", "c").may_publish(Publish(b"\xc3\xa4/x", b"", 0))

"""What one client may take of the broker: each limit, and what is said when it is reached."""

from __future__ import annotations

from pathlib import Path

from sluice.access.acl_file import read_rules
from sluice.broker.acl.access import Caller, Reply, Verdict
from sluice.broker.acl.grants import Grant
from sluice.broker.acl.acl import Book
from sluice.wire.encode import encode
from sluice.wire.packets import V5, V311, Connack, Connect, Pingreq, Pingresp, Publish, Suback, Subscribe
from sluice.wire.packets import SubscriptionRequest as Request
from tests.broker.kit import Client, House, Peer


class ByName:
    """Takes everybody's word for their name."""

    def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
        reply(Verdict(user=connect.username or ""))


def test_an_address_has_so_many_connections_and_no_more() -> None:
    house = House(max_connections_per_address=2)
    first, second = house.connect("a"), house.connect("b")
    for version, code in ((V5, 0x97), (V311, 3)):
        refused = house.connect("c", version)
        assert refused.connack.reason == code and refused.closed
    second.drop()
    assert house.connect("c").connack.reason == 0
    first.ping()


def test_an_address_that_opens_far_too_many_sockets_is_cut_off_before_it_speaks() -> None:
    house = House(max_connections_per_address=2)
    peers = [house.open() for _ in range(6)]
    assert [peer.transport.aborted for peer in peers] == [False] * 4 + [True] * 2


def test_a_user_has_so_many_connections_and_no_more() -> None:
    house = House(ByName(), max_connections_per_user=2)
    ann = [house.connect(f"ann-{nth}", username="ann") for nth in range(2)]
    assert house.connect("ann-2", username="ann").connack.reason == 0x97
    assert house.connect("ann-2", V311, username="ann").connack.reason == 3
    assert house.connect("bob", username="bob").connack.reason == 0
    assert [house.connect(f"x{nth}").connack.reason for nth in range(4)] == [
        0
    ] * 4  # who has no name is not counted
    assert house.connect("ann-1", username="ann").connack.reason == 0  # a takeover makes it no fuller
    ann[0].disconnect()
    assert house.connect("ann-2", username="ann").connack.reason == 0


def test_who_publishes_too_fast_is_not_read_until_it_has_waited() -> None:
    house = House(max_publish_rate=10.0)
    listener = house.connect("l")
    listener.subscribe("t")
    client = house.connect("c")
    for _ in range(10):
        client.publish("t", b"x")
    assert client.transport.reading
    for _ in range(5):  # what has been read already is worked off, nothing is dropped
        client.publish("t", b"x")
    assert not client.transport.reading
    assert len(listener.messages()) == 15
    house.advance(0.4)
    assert not client.transport.reading
    house.advance(0.2)
    assert client.transport.reading
    client.ping()


def test_who_publishes_too_many_bytes_waits_as_well() -> None:
    house = House(max_publish_byte_rate=1000.0)
    client = house.connect("c")
    client.publish("t", b"x" * 3000)
    assert not client.transport.reading
    house.advance(1.9)
    assert not client.transport.reading
    house.advance(0.2)
    assert client.transport.reading
    for _ in range(100):
        client.ping()  # only publishes are counted
    assert client.transport.reading


def test_a_client_that_waits_is_not_taken_for_dead() -> None:
    house = House(max_publish_rate=1.0)
    client = house.connect("c", keep_alive=2)
    for _ in range(20):
        client.publish("t", b"x")
    house.advance(10)
    assert not client.closed


def test_without_a_rate_nothing_is_measured() -> None:
    house = House()
    house.connect("c")
    session = house.broker.registry.sessions["c"]
    assert session.connection is not None and session.connection.meter is None


def test_a_packet_larger_than_allowed_ends_the_connection_on_its_header() -> None:
    house = House(max_packet_size=100)
    client = house.connect("c")
    client.feed(b"\x30\xff\x7f")
    assert client.fault()[0] == 0x95


def test_a_client_has_so_many_subscriptions() -> None:
    client = House(max_subscriptions=2).connect("c")
    assert client.subscribe("a", "b", "c") == [0, 0, 0x97]


# ---- an answer that takes its time


class Later:
    """Says who it is when told to."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
        self.replies.append(reply)


def begin(house: House, *more: object) -> Client:
    client = Client(house)
    client.version = V5
    packets = [Connect("c", V5, True, 0), *more]
    client.feed(b"".join(encode(one, V5) for one in packets))  # type: ignore[arg-type]
    return client


def test_nothing_is_read_or_answered_until_it_is_known_who_it_is() -> None:
    access = Later()
    house = House(access)
    client = begin(house, Subscribe(1, [Request(b"t", 0)]), Publish(b"t", b"early", 0))
    assert client.take() == [] and not client.transport.reading
    client.feed(encode(Pingreq(), V5)[:1])  # what the socket had read already
    client.feed(encode(Pingreq(), V5)[1:])
    access.replies[0](Verdict())
    house.loop.settle()
    assert [type(one) for one in client.take()] == [Connack, Suback, Publish, Pingresp]
    assert client.transport.reading


def test_a_late_refusal_closes_and_what_came_meanwhile_is_not_looked_at() -> None:
    access = Later()
    house = House(access)
    client = begin(house, Publish(b"t", b"early", 0))
    access.replies[0](Verdict(0x86, "wrong"))
    house.loop.settle()
    (connack,) = client.take()
    assert isinstance(connack, Connack) and connack.reason == 0x86 and client.closed
    assert house.counters.publishes_received == 0


def test_an_answer_for_somebody_who_has_left_or_waited_too_long_is_dropped() -> None:
    access = Later()
    house = House(access, connect_timeout=10.0)
    gone, slow = begin(house), begin(house)
    gone.drop()
    house.advance(11)
    assert slow.closed
    for reply in access.replies:
        reply(Verdict())
    house.loop.settle()
    assert house.sessions() == set()


def test_a_second_answer_changes_nothing() -> None:
    access = Later()
    house = House(access)
    client = begin(house)
    access.replies[0](Verdict())
    access.replies[0](Verdict(0x86))
    house.loop.settle()
    assert not client.closed and len(client.take()) == 1


def test_a_connection_lasts_as_long_as_its_proof() -> None:
    class ForAMinute:
        def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
            reply(Verdict(user="eve", expires_at=house.loop.now + 60))

    house = House(ForAMinute())
    client = house.connect("c")
    house.advance(59)
    client.ping()
    house.advance(2)
    assert client.fault()[0] == 0x87


def test_malformed_input_closes_that_connection_and_no_other(tmp_path: Path) -> None:
    house = House()
    good = house.connect("good")
    bad: Peer = house.connect("bad")
    bad.feed(b"\xf0\xff\xff\xff\xff")
    assert bad.closed
    good.ping()
    book = Book(read_rules('[[rule]]\nallow = "connect"'))
    assert not Grant(book, "", "c").may_publish(Publish(b"\xc3\xa4/x", b"", 0))

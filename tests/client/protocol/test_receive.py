"""Messages from the server, without a network: acknowledging, exactly once, aliases, and the server's own faults."""

from __future__ import annotations

import pytest

from sluice.client.errors import ConnectionLost
from sluice.client.protocol.client_protocol import Ended
from sluice.wire.packets import V5, V311, Ack, Disconnect, Publish, publish_with
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.client.protocol_kit import Line, make_properties


def arrival(qos: int, packet_id: int = 0, dup: bool = False, payload: bytes = b"x") -> Publish:
    return Publish(b"t", payload, qos, dup=dup, packet_id=packet_id)


@pytest.mark.parametrize("version", [V311, V5])
async def test_a_qos_1_message_is_acknowledged_when_the_application_says_so(version: int) -> None:
    line = Line(version=version)
    line.connect()
    (message,) = line.messages(arrival(1, 5))
    assert line.heard() == []
    assert await message.ack()
    answer = line.heard_one(Ack)
    assert (answer.kind, answer.packet_id, answer.reason) == (PUBACK, 5, 0)
    assert not await message.ack()
    assert line.heard() == []


async def test_an_acknowledgement_can_say_why_not() -> None:
    line = Line()
    line.connect()
    (message,) = line.messages(arrival(1, 5))
    await message.ack(0x83, "no such customer")
    answer = line.heard_one(Ack)
    assert answer.reason == 0x83
    assert answer.properties is not None
    assert answer.properties.reason_string == "no such customer"


async def test_a_qos_0_message_has_nothing_to_acknowledge() -> None:
    line = Line()
    line.connect()
    (message,) = line.messages(arrival(0))
    assert not await message.ack()
    assert line.heard() == []


@pytest.mark.parametrize("version", [V311, V5])
async def test_a_qos_2_message_is_handed_out_once_however_often_it_is_sent(version: int) -> None:
    line = Line(version=version)
    line.connect()
    (message,) = line.messages(arrival(2, 9))
    assert line.messages(arrival(2, 9, dup=True)) == []
    await message.ack()
    assert line.heard_one(Ack).kind == PUBREC
    assert line.messages(arrival(2, 9, dup=True)) == []
    assert line.heard_one(Ack).kind == PUBREC
    line.say(Ack(PUBREL, 9))
    assert line.heard_one(Ack).kind == PUBCOMP
    assert len(line.messages(arrival(2, 9))) == 1  # the identifier is free again


async def test_a_refused_qos_2_message_frees_its_identifier() -> None:
    line = Line()
    line.connect()
    (message,) = line.messages(arrival(2, 9))
    await message.ack(0x97)
    assert line.heard_one(Ack).reason == 0x97
    assert len(line.messages(arrival(2, 9))) == 1


def test_a_pubrel_for_an_unknown_message_is_answered_so() -> None:
    line = Line()
    line.connect()
    line.say(Ack(PUBREL, 9))
    answer = line.heard_one(Ack)
    assert (answer.kind, answer.reason) == (PUBCOMP, 0x92)


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_held_over_a_reconnect_is_not_handed_out_again(qos: int) -> None:
    line = Line(session_expiry=60)
    line.connect()
    (message,) = line.messages(arrival(qos, 5))
    line.cut()
    line.connect(session_present=True)
    assert line.messages(arrival(qos, 5, dup=True)) == []
    assert line.heard() == []
    assert await message.ack()
    assert line.heard_one(Ack).packet_id == 5


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_acknowledged_while_the_line_is_down_is_answered_when_it_comes_again(
    qos: int,
) -> None:
    line = Line(session_expiry=60)
    line.connect()
    (message,) = line.messages(arrival(qos, 5))
    line.cut()
    assert await message.ack(0x10)
    line.connect(session_present=True)
    assert line.heard() == []
    assert line.messages(arrival(qos, 5, dup=True)) == []
    answer = line.heard_one(Ack)
    assert (answer.packet_id, answer.reason) == (5, 0x10)


async def test_a_qos_2_message_stays_exactly_once_when_its_pubrec_was_lost_with_the_line() -> None:
    line = Line(session_expiry=60)
    line.connect()
    (message,) = line.messages(arrival(2, 5))
    await message.ack()
    line.cut()
    line.connect(session_present=True)
    assert line.messages(arrival(2, 5, dup=True)) == []
    assert line.heard_one(Ack).kind == PUBREC
    line.say(Ack(PUBREL, 5))
    assert line.heard_one(Ack).kind == PUBCOMP


async def test_a_new_message_may_take_the_identifier_of_one_the_server_gave_up() -> None:
    line = Line(session_expiry=60)
    line.connect()
    (old,) = line.messages(arrival(1, 5, payload=b"old"))
    line.cut()
    line.connect(session_present=True)
    (new,) = line.messages(arrival(1, 5, payload=b"new"))
    assert new.payload == b"new"
    assert not await old.ack()
    assert line.heard() == []
    assert await new.ack()


async def test_a_message_of_a_lost_session_cannot_be_acknowledged_any_more() -> None:
    line = Line()
    line.connect()
    (message,) = line.messages(arrival(1, 5))
    line.cut()
    line.connect(session_present=False)
    assert not await message.ack()
    assert line.heard() == []


def test_a_server_that_exceeds_the_receive_maximum_is_borne_with_and_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = Line(receive_maximum=2)
    line.connect()
    assert len(line.messages(*(arrival(1, nth) for nth in range(1, 6)))) == 5
    assert caplog.text.count("receive maximum of 2") == 1


def test_topic_aliases_of_the_server_are_resolved() -> None:
    line = Line(topic_alias_maximum=3)
    line.connect()
    first, second = Publish(b"long/topic", b"1", 0), Publish(b"", b"2", 0)
    first.alias = second.alias = 3
    assert [message.topic for message in line.messages(first, second)] == ["long/topic"] * 2


@pytest.mark.parametrize(("alias", "topic"), [(4, b"t"), (2, b"")])
def test_a_topic_alias_out_of_bounds_or_unknown_ends_the_connection(alias: int, topic: bytes) -> None:
    line = Line(topic_alias_maximum=3)
    line.connect()
    packet = Publish(topic, b"", 0)
    packet.alias = alias
    (event,) = line.say(packet)
    assert isinstance(event, Ended)
    assert line.heard_one(Disconnect).reason == 0x94


def test_topic_aliases_do_not_outlive_their_connection() -> None:
    line = Line(topic_alias_maximum=3, session_expiry=60)
    line.connect()
    first, second = Publish(b"t", b"", 0), Publish(b"", b"", 0)
    first.alias = second.alias = 1
    line.say(first)
    line.cut()
    line.connect(session_present=True)
    (event,) = line.say(second)
    assert isinstance(event, Ended)


def test_a_message_shows_what_came_with_it() -> None:
    line = Line()
    line.connect()
    packet = publish_with(
        "töpic".encode(),
        b"payload",
        1,
        True,
        make_properties(content_type="text/plain", user=[("a", "1"), ("a", "2")], subscription_ids=[4, 7]),
    )
    packet.packet_id = 3
    (message,) = line.messages(packet)
    assert (message.topic, message.payload, message.qos, message.retain, message.dup) == (
        "töpic",
        b"payload",
        1,
        True,
        False,
    )
    assert message.subscription_ids == [4, 7]
    assert message.properties.content_type == "text/plain"
    assert message.properties.user == [("a", "1"), ("a", "2")]
    assert message.properties is message.properties


def test_what_came_before_malformed_bytes_counts() -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(1)
    line.heard()
    line.say(Ack(PUBACK, 1))
    (event,) = line.protocol.receive(b"\x00\x00")
    assert isinstance(event, Ended)
    assert isinstance(event.error, ConnectionLost)
    assert outgoing.done
    assert line.heard_one(Disconnect).reason == 0x81


def test_a_packet_larger_than_we_allow_is_refused_by_its_header() -> None:
    line = Line(maximum_packet_size=1_000)
    line.connect()
    assert line.connect_packet.properties.maximum_packet_size == 1_000  # type: ignore[attr-defined]
    (event,) = line.protocol.receive(b"\x30\xff\xff\x03")
    assert isinstance(event, Ended)
    assert line.heard_one(Disconnect).reason == 0x95

"""Receiving without a network: acknowledgements, exactly once, aliases, server faults."""

from __future__ import annotations

import pytest

from sluice.client.errors import ConnectionLost, Unsupported
from sluice.client.protocol.client_protocol import ConnectionEnded
from sluice.wire.packets import V5, V311, Ack, Disconnect, Publish, build_publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.client.protocol_kit import ProtocolPair, make_properties


def arrival(qos: int, packet_id: int = 0, dup: bool = False, payload: bytes = b"x") -> Publish:
    return Publish(b"t", payload, qos, dup=dup, packet_id=packet_id)


@pytest.mark.parametrize("version", [V311, V5])
async def test_qos_1_message_is_acknowledged_by_the_application(version: int) -> None:
    pair = ProtocolPair(version=version)
    pair.connect()
    (message,) = pair.messages(arrival(1, 5))
    assert pair.sent_packets() == []
    assert await message.ack()
    answer = pair.sent_packet(Ack)
    assert (answer.kind, answer.packet_id, answer.reason) == (PUBACK, 5, 0)
    assert not await message.ack()
    assert pair.sent_packets() == []


async def test_acknowledgement_can_carry_an_error_reason() -> None:
    pair = ProtocolPair()
    pair.connect()
    (message,) = pair.messages(arrival(1, 5))
    await message.ack(0x83, "no such customer")
    answer = pair.sent_packet(Ack)
    assert answer.reason == 0x83
    assert answer.properties is not None
    assert answer.properties.reason_string == "no such customer"


@pytest.mark.parametrize("reason", [0x01, 0x81, 0x95, 0x100])
async def test_reason_that_a_puback_may_not_carry_is_refused_before_sending(reason: int) -> None:
    pair = ProtocolPair()
    pair.connect()
    (message,) = pair.messages(arrival(1, 5))
    with pytest.raises(Unsupported, match="0x83"):
        await message.ack(reason)
    assert pair.sent_packets() == []
    assert await message.ack()


async def test_a_qos_0_message_has_nothing_to_acknowledge() -> None:
    pair = ProtocolPair()
    pair.connect()
    (message,) = pair.messages(arrival(0))
    assert not await message.ack()
    assert pair.sent_packets() == []


@pytest.mark.parametrize("version", [V311, V5])
async def test_qos_2_message_is_handed_out_once_however_often_it_is_sent(version: int) -> None:
    pair = ProtocolPair(version=version)
    pair.connect()
    (message,) = pair.messages(arrival(2, 9))
    assert pair.messages(arrival(2, 9, dup=True)) == []
    await message.ack()
    assert pair.sent_packet(Ack).kind == PUBREC
    assert pair.messages(arrival(2, 9, dup=True)) == []
    assert pair.sent_packet(Ack).kind == PUBREC
    pair.server_sends(Ack(PUBREL, 9))
    assert pair.sent_packet(Ack).kind == PUBCOMP
    assert len(pair.messages(arrival(2, 9))) == 1  # the packet id is free again


async def test_refused_qos_2_message_frees_its_packet_id() -> None:
    pair = ProtocolPair()
    pair.connect()
    (message,) = pair.messages(arrival(2, 9))
    await message.ack(0x97)
    assert pair.sent_packet(Ack).reason == 0x97
    assert len(pair.messages(arrival(2, 9))) == 1


def test_pubrel_for_an_unknown_message_is_answered_as_unknown() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.server_sends(Ack(PUBREL, 9))
    answer = pair.sent_packet(Ack)
    assert (answer.kind, answer.reason) == (PUBCOMP, 0x92)


@pytest.mark.parametrize("qos", [1, 2])
async def test_message_held_over_a_reconnect_is_not_handed_out_again(qos: int) -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    (message,) = pair.messages(arrival(qos, 5))
    pair.disconnect()
    pair.connect(session_present=True)
    assert pair.messages(arrival(qos, 5, dup=True)) == []
    assert pair.sent_packets() == []
    assert await message.ack()
    assert pair.sent_packet(Ack).packet_id == 5


@pytest.mark.parametrize("qos", [1, 2])
async def test_message_acknowledged_while_disconnected_is_acknowledged_when_resent(
    qos: int,
) -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    (message,) = pair.messages(arrival(qos, 5))
    pair.disconnect()
    assert await message.ack(0x10)
    pair.connect(session_present=True)
    assert pair.sent_packets() == []
    assert pair.messages(arrival(qos, 5, dup=True)) == []
    answer = pair.sent_packet(Ack)
    assert (answer.packet_id, answer.reason) == (5, 0x10)


async def test_qos_2_message_stays_exactly_once_when_its_pubrec_was_lost() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    (message,) = pair.messages(arrival(2, 5))
    await message.ack()
    pair.disconnect()
    pair.connect(session_present=True)
    assert pair.messages(arrival(2, 5, dup=True)) == []
    assert pair.sent_packet(Ack).kind == PUBREC
    pair.server_sends(Ack(PUBREL, 5))
    assert pair.sent_packet(Ack).kind == PUBCOMP


async def test_new_message_may_reuse_the_packet_id_of_one_the_server_abandoned() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    (old,) = pair.messages(arrival(1, 5, payload=b"old"))
    pair.disconnect()
    pair.connect(session_present=True)
    (new,) = pair.messages(arrival(1, 5, payload=b"new"))
    assert new.payload == b"new"
    assert not await old.ack()
    assert pair.sent_packets() == []
    assert await new.ack()


async def test_message_of_a_lost_session_cannot_be_acknowledged() -> None:
    pair = ProtocolPair()
    pair.connect()
    (message,) = pair.messages(arrival(1, 5))
    pair.disconnect()
    pair.connect(session_present=False)
    assert not await message.ack()
    assert pair.sent_packets() == []


def test_server_that_exceeds_receive_maximum_is_tolerated_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = ProtocolPair(receive_maximum=2)
    pair.connect()
    assert len(pair.messages(*(arrival(1, nth) for nth in range(1, 6)))) == 5
    assert caplog.text.count("receive maximum of 2") == 1


def test_topic_aliases_of_the_server_are_resolved() -> None:
    pair = ProtocolPair(topic_alias_maximum=3)
    pair.connect()
    first, second = Publish(b"long/topic", b"1", 0), Publish(b"", b"2", 0)
    first.topic_alias = second.topic_alias = 3
    assert [message.topic for message in pair.messages(first, second)] == ["long/topic"] * 2


@pytest.mark.parametrize(("alias", "topic"), [(4, b"t"), (2, b"")])
def test_invalid_topic_alias_ends_the_connection(alias: int, topic: bytes) -> None:
    pair = ProtocolPair(topic_alias_maximum=3)
    pair.connect()
    packet = Publish(topic, b"", 0)
    packet.topic_alias = alias
    (event,) = pair.server_sends(packet)
    assert isinstance(event, ConnectionEnded)
    assert pair.sent_packet(Disconnect).reason == 0x94


def test_topic_aliases_end_with_their_connection() -> None:
    pair = ProtocolPair(topic_alias_maximum=3, session_expiry=60)
    pair.connect()
    first, second = Publish(b"t", b"", 0), Publish(b"", b"", 0)
    first.topic_alias = second.topic_alias = 1
    pair.server_sends(first)
    pair.disconnect()
    pair.connect(session_present=True)
    (event,) = pair.server_sends(second)
    assert isinstance(event, ConnectionEnded)


def test_message_exposes_its_properties() -> None:
    pair = ProtocolPair()
    pair.connect()
    packet = build_publish(
        "töpic".encode(),
        b"payload",
        1,
        True,
        make_properties(
            content_type="text/plain", user=[("a", "1"), ("a", "2")], subscription_ids=[4, 7]
        ),
    )
    packet.packet_id = 3
    (message,) = pair.messages(packet)
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


def test_packets_before_malformed_bytes_are_processed() -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(1)
    pair.sent_packets()
    pair.server_sends(Ack(PUBACK, 1))
    (event,) = pair.protocol.receive(b"\x00\x00")
    assert isinstance(event, ConnectionEnded)
    assert isinstance(event.error, ConnectionLost)
    assert outgoing.done
    assert pair.sent_packet(Disconnect).reason == 0x81


def test_oversized_packet_is_refused_by_its_header() -> None:
    pair = ProtocolPair(maximum_packet_size=1_000)
    pair.connect()
    assert pair.connect_packet.properties.maximum_packet_size == 1_000  # type: ignore[attr-defined]
    (event,) = pair.protocol.receive(b"\x30\xff\xff\x03")
    assert isinstance(event, ConnectionEnded)
    assert pair.sent_packet(Disconnect).reason == 0x95

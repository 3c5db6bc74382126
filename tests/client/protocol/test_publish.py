"""Publishing without a network: the flows of QoS 0, 1 and 2, the server's limits, and resending."""

from __future__ import annotations

import pytest

from sluice.client.errors import PublishRefused, Unsupported
from sluice.client.protocol.client_protocol import ConnectionEnded
from sluice.client.protocol.publish_packet import make_publish
from sluice.client.protocol.write_buffer import MAX_TURN_BYTES
from sluice.wire.packets import V5, V311, Ack, Packet, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.client.protocol_kit import ProtocolPair, make_outgoing, make_properties


def published(packets: list[Packet]) -> list[bytes]:
    return [packet.payload for packet in packets if isinstance(packet, Publish)]


def test_qos_0_publish_is_done_when_written() -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(0)
    assert outgoing.done
    assert pair.sent_packet(Publish).packet_id == 0
    assert pair.protocol.outbound.unconfirmed_bytes == 0


@pytest.mark.parametrize("version", [V311, V5])
def test_qos_1_publish_is_done_when_the_puback_arrives(version: int) -> None:
    pair = ProtocolPair(version=version)
    pair.connect()
    outgoing = pair.publish(1)
    sent = pair.sent_packet(Publish)
    assert not outgoing.done
    pair.server_sends(Ack(PUBACK, sent.packet_id))
    assert outgoing.done
    assert outgoing.result().reason == 0
    assert pair.protocol.outbound.unconfirmed == 0
    assert pair.protocol.outbound.unconfirmed_bytes == 0


@pytest.mark.parametrize("version", [V311, V5])
def test_qos_2_publish_is_done_when_the_pubcomp_arrives(version: int) -> None:
    pair = ProtocolPair(version=version)
    pair.connect()
    outgoing = pair.publish(2)
    sent = pair.sent_packet(Publish)
    pair.server_sends(Ack(PUBREC, sent.packet_id))
    assert not outgoing.done
    released = pair.sent_packet(Ack)
    assert (released.kind, released.packet_id) == (PUBREL, sent.packet_id)
    pair.server_sends(Ack(PUBCOMP, sent.packet_id))
    assert outgoing.done
    assert pair.protocol.outbound.unconfirmed == 0


def test_non_error_reason_is_part_of_the_result() -> None:
    pair = ProtocolPair()
    pair.connect()
    once, twice = pair.publish(1), pair.publish(2)
    first, second = pair.sent_packets()
    assert isinstance(first, Publish)
    assert isinstance(second, Publish)
    pair.server_sends(Ack(PUBACK, first.packet_id, 0x10), Ack(PUBREC, second.packet_id, 0x10))
    pair.server_sends(Ack(PUBCOMP, second.packet_id))
    assert once.result().reason == 0x10
    assert twice.result().reason == 0x10


@pytest.mark.parametrize(("qos", "answer"), [(1, PUBACK), (2, PUBREC)])
def test_refused_publish_raises_the_servers_reason(qos: int, answer: int) -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(qos)
    sent = pair.sent_packet(Publish)
    pair.server_sends(
        Ack(answer, sent.packet_id, 0x97, make_properties(reason_string="the queue is full"))
    )
    with pytest.raises(PublishRefused, match="the queue is full") as caught:
        outgoing.result()
    assert caught.value.reason == 0x97
    assert caught.value.reason_string == "the queue is full"
    assert pair.sent_packets() == []  # a refused QoS 2 message is not released
    assert pair.protocol.outbound.unconfirmed == 0


def test_pubcomp_for_unknown_packet_id_completes_a_received_message() -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(2)
    sent = pair.sent_packet(Publish)
    pair.server_sends(Ack(PUBREC, sent.packet_id), Ack(PUBCOMP, sent.packet_id, 0x92))
    assert outgoing.result().reason == 0x92


def test_messages_in_flight_are_limited_by_the_servers_receive_maximum() -> None:
    pair = ProtocolPair()
    pair.connect(receive_maximum=2)
    messages = [pair.publish(1 + nth % 2, b"%d" % nth) for nth in range(5)]
    sent = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"0", b"1"]
    # Received and not completed: the message still counts as in flight.
    pair.server_sends(Ack(PUBREC, sent[1].packet_id))
    assert published(pair.sent_packets()) == []
    pair.server_sends(Ack(PUBACK, sent[0].packet_id), Ack(PUBCOMP, sent[1].packet_id))
    assert published(pair.sent_packets()) == [b"2", b"3"]
    assert [outgoing.done for outgoing in messages] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("options", "limit"), [({"version": V311}, 20), ({"version": V5, "max_inflight": 3}, 3)]
)
def test_client_has_its_own_limit_where_the_server_gives_none(
    options: dict[str, object], limit: int
) -> None:
    pair = ProtocolPair(**options)
    pair.connect()
    for _ in range(50):
        pair.publish(1)
    assert len(pair.sent_packets()) == limit


def test_packets_are_sent_in_publish_order_whatever_their_qos() -> None:
    pair = ProtocolPair()
    pair.connect(receive_maximum=1)
    for nth, qos in enumerate([1, 0, 1, 0]):
        pair.publish(qos, b"%d" % nth)
    # The QoS 0 message after the waiting one waits with it.
    assert published(pair.sent_packets()) == [b"0", b"1"]
    pair.server_sends(Ack(PUBACK, 1))
    assert published(pair.sent_packets()) == [b"2", b"3"]


def test_nothing_is_sent_while_the_transport_is_full() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.outbound.is_paused = True
    outgoing = pair.publish(0)
    assert pair.sent_packets() == []
    assert not outgoing.done
    pair.protocol.outbound.is_paused = False
    pair.protocol.outbound.send_waiting()
    assert published(pair.sent_packets()) == [b"x"]
    assert outgoing.done


def test_one_turn_writes_a_bounded_amount() -> None:
    pair = ProtocolPair()
    pair.connect()
    payload = b"x" * 60_000
    for _ in range(20):
        pair.publish(0, payload)
    assert MAX_TURN_BYTES <= len(pair.protocol.write_buffer.writer) <= MAX_TURN_BYTES + 61_000
    turns = 0
    arrived = 0
    while pair.protocol.outbound.waiting or len(pair.protocol.write_buffer.writer):
        arrived += len(pair.sent_packets())
        pair.protocol.outbound.send_waiting()
        turns += 1
    assert arrived == 20
    assert turns > 2


def test_unsent_message_can_be_withdrawn() -> None:
    pair = ProtocolPair()
    pair.connect(receive_maximum=1)
    sent, waiting = pair.publish(1), pair.publish(1)
    assert not pair.protocol.outbound.withdraw(sent)
    assert pair.protocol.outbound.withdraw(waiting)
    assert not pair.protocol.outbound.withdraw(waiting)
    assert pair.protocol.outbound.unconfirmed == 1


@pytest.mark.parametrize(
    ("limit", "qos", "retain", "payload", "advice"),
    [
        ({"maximum_qos": 1}, 2, False, b"x", "Publish with qos=1"),
        ({"retain_available": 0}, 1, True, b"x", "Publish with retain=False"),
        ({"maximum_packet_size": 20}, 1, False, b"x" * 20, "Send a smaller payload"),
    ],
)
def test_unsupported_message_is_refused_with_a_remedy_before_sending(
    limit: dict[str, object], qos: int, retain: bool, payload: bytes, advice: str
) -> None:
    pair = ProtocolPair()
    pair.connect(False, **limit)
    with pytest.raises(Unsupported, match=advice):
        pair.protocol.publish(make_outgoing(qos, payload, retain=retain))
    assert pair.sent_packets() == []
    assert pair.protocol.outbound.unconfirmed == 0
    assert pair.protocol.outbound.unconfirmed_bytes == 0


@pytest.mark.parametrize("topic", ["a/+", "#", "a\0b", "x" * 65_536])
def test_response_topic_that_is_no_topic_is_refused_before_sending(topic: str) -> None:
    with pytest.raises(Unsupported):
        make_publish(V5, "t", b"x", 1, False, {"response_topic": topic})


def test_empty_response_topic_means_none() -> None:
    """Servers end the connection of a client that sends one."""
    for given in ("", None):
        packet = make_publish(V5, "t", b"x", 1, False, {"response_topic": given})
        assert packet.raw_properties == b""


def test_waiting_message_that_the_next_server_cannot_accept_fails_alone() -> None:
    pair = ProtocolPair()
    too_much, fine = pair.publish(2), pair.publish(1)
    pair.connect(maximum_qos=1)
    assert isinstance(too_much.error, Unsupported)
    assert not fine.done
    assert len(pair.sent_packets()) == 1


def test_resumed_session_resends_unacknowledged_messages_as_duplicates_in_order() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    for nth in range(3):
        pair.publish(1 + nth % 2, b"%d" % nth)
    before = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    pair.disconnect()
    pair.publish(1, b"later")
    pair.connect(session_present=True)
    after = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert published(list(after)) == [b"0", b"1", b"2", b"later"]
    assert [packet.dup for packet in after] == [True, True, True, False]
    assert [packet.packet_id for packet in after[:3]] == [packet.packet_id for packet in before]


def test_resumed_session_resends_the_pubrel_and_not_the_message() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    outgoing = pair.publish(2)
    sent = pair.sent_packet(Publish)
    pair.server_sends(Ack(PUBREC, sent.packet_id))
    pair.disconnect()
    pair.connect(session_present=True)
    again = pair.sent_packet(Ack)
    assert (again.kind, again.packet_id) == (PUBREL, sent.packet_id)
    pair.server_sends(Ack(PUBCOMP, sent.packet_id))
    assert outgoing.done


def test_lost_session_resends_unacknowledged_messages_as_new_ones() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.publish(1)
    pair.sent_packets()
    pair.disconnect()
    pair.connect(session_present=False)
    assert pair.sent_packet(Publish).dup is False


def test_lost_session_resends_received_but_unreleased_messages_as_new_ones() -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(2, b"received")
    pair.publish(2, b"not yet")
    pair.sent_packets()
    pair.server_sends(Ack(PUBREC, outgoing.packet.packet_id))
    pair.disconnect()
    pair.connect(session_present=False)
    sent = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"received", b"not yet"]
    assert not any(packet.dup for packet in sent)


def test_resending_respects_a_reduced_receive_maximum() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect(receive_maximum=10)
    for nth in range(4):
        pair.publish(1, b"%d" % nth)
    pair.sent_packets()
    pair.disconnect()
    pair.connect(session_present=True, receive_maximum=2)
    sent = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"0", b"1"]
    pair.server_sends(Ack(PUBACK, sent[0].packet_id))
    assert published(pair.sent_packets()) == [b"2"]


def test_packet_ids_wrap_around_and_skip_those_in_use() -> None:
    pair = ProtocolPair()
    pair.connect()
    stored = pair.publish(1)
    pair.sent_packets()
    for _ in range(0xFFFF):
        pair.publish(1)
        sent = pair.sent_packet(Publish)
        assert sent.packet_id != stored.packet.packet_id
        pair.server_sends(Ack(PUBACK, sent.packet_id))
    assert not stored.done


def test_topic_aliases_shorten_repeated_topics_and_restart_on_each_connection() -> None:
    pair = ProtocolPair(topic_aliases=True, session_expiry=60)
    pair.connect(topic_alias_maximum=1)
    for topic in (b"long/topic", b"long/topic", b"other"):
        pair.protocol.publish(make_outgoing(1, topic=topic))
    sent = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert [(packet.topic, packet.topic_alias) for packet in sent] == [
        (b"long/topic", 1),
        (b"", 1),
        (b"other", 0),
    ]
    pair.disconnect()
    pair.connect(session_present=True, topic_alias_maximum=0)
    again = [packet for packet in pair.sent_packets() if isinstance(packet, Publish)]
    assert [(packet.topic, packet.topic_alias) for packet in again] == [
        (b"long/topic", 0),
        (b"long/topic", 0),
        (b"other", 0),
    ]


def test_acknowledgement_of_an_unknown_message_is_ignored() -> None:
    pair = ProtocolPair()
    pair.connect()
    assert pair.server_sends(Ack(PUBACK, 7), Ack(PUBCOMP, 7)) == []
    assert pair.sent_packets() == []


def test_pubrec_of_an_unknown_message_is_released_as_unknown() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.server_sends(Ack(PUBREC, 7))
    answer = pair.sent_packet(Ack)
    assert (answer.kind, answer.reason) == (PUBREL, 0x92)


@pytest.mark.parametrize(("qos", "answer"), [(1, PUBREC), (2, PUBACK)])
def test_acknowledgement_of_the_wrong_type_ends_the_connection_and_not_the_message(
    qos: int, answer: int
) -> None:
    pair = ProtocolPair()
    pair.connect()
    outgoing = pair.publish(qos)
    sent = pair.sent_packet(Publish)
    (event,) = pair.server_sends(Ack(answer, sent.packet_id))
    assert isinstance(event, ConnectionEnded)
    assert not outgoing.done
    assert pair.protocol.outbound.unconfirmed == 1


def test_failing_callback_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    pair = ProtocolPair()
    pair.connect()
    first, second = pair.publish(1), pair.publish(1)
    received = []

    def fail(_: object) -> None:
        raise RuntimeError("the application's fault")

    first.add_done_callback(fail)
    first.add_done_callback(lambda _: received.append("first"))
    second.add_done_callback(lambda _: received.append("second"))
    pair.server_sends(Ack(PUBACK, 1), Ack(PUBACK, 2))
    assert received == ["first", "second"]
    assert "the application's fault" in caplog.text

"""Publishing, without a network: the flows of QoS 0, 1 and 2, the server's limits, and what a reconnect repeats."""

from __future__ import annotations

import pytest

from sluice.client.errors import PublishRefused, Unsupported
from sluice.client.protocol.write_buffer import FULL
from sluice.client.protocol.client_protocol import Ended
from sluice.wire.packets import V5, V311, Ack, Packet, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.client.protocol_kit import Line, make_outgoing, make_properties


def published(packets: list[Packet]) -> list[bytes]:
    return [packet.payload for packet in packets if isinstance(packet, Publish)]


def test_a_qos_0_publish_is_done_when_it_is_written() -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(0)
    assert outgoing.done
    assert line.heard_one(Publish).packet_id == 0
    assert line.protocol.outbox.held_bytes == 0


@pytest.mark.parametrize("version", [V311, V5])
def test_a_qos_1_publish_is_done_when_the_puback_comes(version: int) -> None:
    line = Line(version=version)
    line.connect()
    outgoing = line.publish(1)
    sent = line.heard_one(Publish)
    assert not outgoing.done
    line.say(Ack(PUBACK, sent.packet_id))
    assert outgoing.done
    assert outgoing.result().reason == 0
    assert line.protocol.outbox.unconfirmed == 0
    assert line.protocol.outbox.held_bytes == 0


@pytest.mark.parametrize("version", [V311, V5])
def test_a_qos_2_publish_is_done_when_the_pubcomp_comes(version: int) -> None:
    line = Line(version=version)
    line.connect()
    outgoing = line.publish(2)
    sent = line.heard_one(Publish)
    line.say(Ack(PUBREC, sent.packet_id))
    assert not outgoing.done
    released = line.heard_one(Ack)
    assert (released.kind, released.packet_id) == (PUBREL, sent.packet_id)
    line.say(Ack(PUBCOMP, sent.packet_id))
    assert outgoing.done
    assert line.protocol.outbox.unconfirmed == 0


def test_a_reason_that_is_no_failure_is_part_of_the_result() -> None:
    line = Line()
    line.connect()
    once, twice = line.publish(1), line.publish(2)
    first, second = line.heard()
    assert isinstance(first, Publish)
    assert isinstance(second, Publish)
    line.say(Ack(PUBACK, first.packet_id, 0x10), Ack(PUBREC, second.packet_id, 0x10))
    line.say(Ack(PUBCOMP, second.packet_id))
    assert once.result().reason == 0x10
    assert twice.result().reason == 0x10


@pytest.mark.parametrize(("qos", "answer"), [(1, PUBACK), (2, PUBREC)])
def test_a_refused_publish_raises_the_servers_words(qos: int, answer: int) -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(qos)
    sent = line.heard_one(Publish)
    line.say(Ack(answer, sent.packet_id, 0x97, make_properties(reason_string="the queue is full")))
    with pytest.raises(PublishRefused, match="the queue is full") as caught:
        outgoing.result()
    assert caught.value.reason == 0x97
    assert caught.value.reason_string == "the queue is full"
    assert line.heard() == []  # a refused QoS 2 message is not released
    assert line.protocol.outbox.unconfirmed == 0


def test_a_pubcomp_for_a_forgotten_identifier_ends_a_message_that_was_taken() -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(2)
    sent = line.heard_one(Publish)
    line.say(Ack(PUBREC, sent.packet_id), Ack(PUBCOMP, sent.packet_id, 0x92))
    assert outgoing.result().reason == 0x92


def test_no_more_is_in_flight_than_the_server_can_receive() -> None:
    line = Line()
    line.connect(receive_maximum=2)
    all_of_them = [line.publish(1 + nth % 2, b"%d" % nth) for nth in range(5)]
    sent = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"0", b"1"]
    line.say(Ack(PUBREC, sent[1].packet_id))  # received is not completed: the place stays taken
    assert published(line.heard()) == []
    line.say(Ack(PUBACK, sent[0].packet_id), Ack(PUBCOMP, sent[1].packet_id))
    assert published(line.heard()) == [b"2", b"3"]
    assert [outgoing.done for outgoing in all_of_them] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("options", "limit"), [({"version": V311}, 20), ({"version": V5, "max_inflight": 3}, 3)]
)
def test_the_client_has_a_limit_of_its_own_where_the_server_says_none(
    options: dict[str, object], limit: int
) -> None:
    line = Line(**options)
    line.connect()
    for _ in range(50):
        line.publish(1)
    assert len(line.heard()) == limit


def test_the_order_of_publishing_is_the_order_on_the_line_whatever_the_qos() -> None:
    line = Line()
    line.connect(receive_maximum=1)
    for nth, qos in enumerate([1, 0, 1, 0]):
        line.publish(qos, b"%d" % nth)
    assert published(line.heard()) == [b"0", b"1"]  # the QoS 0 message behind the waiting one waits with it
    line.say(Ack(PUBACK, 1))
    assert published(line.heard()) == [b"2", b"3"]


def test_nothing_is_sent_while_the_transport_is_full() -> None:
    line = Line()
    line.connect()
    line.protocol.outbox.paused = True
    outgoing = line.publish(0)
    assert line.heard() == []
    assert not outgoing.done
    line.protocol.outbox.paused = False
    line.protocol.outbox.pump()
    assert published(line.heard()) == [b"x"]
    assert outgoing.done


def test_one_turn_writes_a_bounded_amount() -> None:
    line = Line()
    line.connect()
    payload = b"x" * 60_000
    for _ in range(20):
        line.publish(0, payload)
    assert FULL <= len(line.protocol.output.writer) <= FULL + 61_000
    turns = 0
    arrived = 0
    while line.protocol.outbox.waiting or len(line.protocol.output.writer):
        arrived += len(line.heard())
        line.protocol.outbox.pump()
        turns += 1
    assert arrived == 20
    assert turns > 2


def test_a_message_that_was_not_sent_can_be_taken_back() -> None:
    line = Line()
    line.connect(receive_maximum=1)
    sent, waiting = line.publish(1), line.publish(1)
    assert not line.protocol.outbox.withdraw(sent)
    assert line.protocol.outbox.withdraw(waiting)
    assert not line.protocol.outbox.withdraw(waiting)
    assert line.protocol.outbox.unconfirmed == 1


@pytest.mark.parametrize(
    ("limit", "qos", "retain", "payload", "advice"),
    [
        ({"maximum_qos": 1}, 2, False, b"x", "Publish with qos=1"),
        ({"retain_available": 0}, 1, True, b"x", "Publish with retain=False"),
        ({"maximum_packet_size": 20}, 1, False, b"x" * 20, "Send a smaller payload"),
    ],
)
def test_what_the_server_cannot_take_is_refused_with_advice_before_it_is_sent(
    limit: dict[str, object], qos: int, retain: bool, payload: bytes, advice: str
) -> None:
    line = Line()
    line.connect(False, **limit)
    with pytest.raises(Unsupported, match=advice):
        line.protocol.publish(make_outgoing(qos, payload, retain=retain))
    assert line.heard() == []
    assert line.protocol.outbox.unconfirmed == 0
    assert line.protocol.outbox.held_bytes == 0


def test_a_waiting_message_that_the_next_server_cannot_take_fails_alone() -> None:
    line = Line()
    too_much, fine = line.publish(2), line.publish(1)
    line.connect(maximum_qos=1)
    assert isinstance(too_much.error, Unsupported)
    assert not fine.done
    assert len(line.heard()) == 1


def test_a_kept_session_gets_unanswered_messages_again_as_duplicates_in_order() -> None:
    line = Line(session_expiry=60)
    line.connect()
    for nth in range(3):
        line.publish(1 + nth % 2, b"%d" % nth)
    before = [packet for packet in line.heard() if isinstance(packet, Publish)]
    line.cut()
    line.publish(1, b"later")
    line.connect(session_present=True)
    after = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert published(list(after)) == [b"0", b"1", b"2", b"later"]
    assert [packet.dup for packet in after] == [True, True, True, False]
    assert [packet.packet_id for packet in after[:3]] == [packet.packet_id for packet in before]


def test_a_kept_session_gets_the_pubrel_again_and_not_the_message() -> None:
    line = Line(session_expiry=60)
    line.connect()
    outgoing = line.publish(2)
    sent = line.heard_one(Publish)
    line.say(Ack(PUBREC, sent.packet_id))
    line.cut()
    line.connect(session_present=True)
    again = line.heard_one(Ack)
    assert (again.kind, again.packet_id) == (PUBREL, sent.packet_id)
    line.say(Ack(PUBCOMP, sent.packet_id))
    assert outgoing.done


def test_a_lost_session_gets_unanswered_messages_as_new_ones() -> None:
    line = Line()
    line.connect()
    line.publish(1)
    line.heard()
    line.cut()
    line.connect(session_present=False)
    assert line.heard_one(Publish).dup is False


def test_a_lost_session_gets_received_but_unreleased_messages_as_new_ones_too() -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(2, b"received")
    line.publish(2, b"not yet")
    line.heard()
    line.say(Ack(PUBREC, outgoing.packet.packet_id))
    line.cut()
    line.connect(session_present=False)
    sent = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"received", b"not yet"]
    assert not any(packet.dup for packet in sent)


def test_resending_respects_a_receive_maximum_that_shrank() -> None:
    line = Line(session_expiry=60)
    line.connect(receive_maximum=10)
    for nth in range(4):
        line.publish(1, b"%d" % nth)
    line.heard()
    line.cut()
    line.connect(session_present=True, receive_maximum=2)
    sent = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert published(list(sent)) == [b"0", b"1"]
    line.say(Ack(PUBACK, sent[0].packet_id))
    assert published(line.heard()) == [b"2"]


def test_packet_identifiers_wrap_round_and_skip_those_in_use() -> None:
    line = Line()
    line.connect()
    kept = line.publish(1)
    line.heard()
    for _ in range(0xFFFF):
        line.publish(1)
        sent = line.heard_one(Publish)
        assert sent.packet_id != kept.packet.packet_id
        line.say(Ack(PUBACK, sent.packet_id))
    assert not kept.done


def test_topic_aliases_shorten_repeated_topics_and_begin_anew_on_each_connection() -> None:
    line = Line(topic_aliases=True, session_expiry=60)
    line.connect(topic_alias_maximum=1)
    for topic in (b"long/topic", b"long/topic", b"other"):
        line.protocol.publish(make_outgoing(1, topic=topic))
    sent = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert [(packet.topic, packet.alias) for packet in sent] == [(b"long/topic", 1), (b"", 1), (b"other", 0)]
    line.cut()
    line.connect(session_present=True, topic_alias_maximum=0)
    again = [packet for packet in line.heard() if isinstance(packet, Publish)]
    assert [(packet.topic, packet.alias) for packet in again] == [
        (b"long/topic", 0),
        (b"long/topic", 0),
        (b"other", 0),
    ]


def test_an_answer_to_a_message_nobody_sent_is_ignored() -> None:
    line = Line()
    line.connect()
    assert line.say(Ack(PUBACK, 7), Ack(PUBCOMP, 7)) == []
    assert line.heard() == []


def test_a_pubrec_for_a_message_nobody_sent_is_released_as_unknown() -> None:
    line = Line()
    line.connect()
    line.say(Ack(PUBREC, 7))
    answer = line.heard_one(Ack)
    assert (answer.kind, answer.reason) == (PUBREL, 0x92)


@pytest.mark.parametrize(("qos", "answer"), [(1, PUBREC), (2, PUBACK)])
def test_an_answer_of_the_wrong_kind_ends_the_connection_and_not_the_message(qos: int, answer: int) -> None:
    line = Line()
    line.connect()
    outgoing = line.publish(qos)
    sent = line.heard_one(Publish)
    (event,) = line.say(Ack(answer, sent.packet_id))
    assert isinstance(event, Ended)
    assert not outgoing.done
    assert line.protocol.outbox.unconfirmed == 1


def test_a_callback_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    line = Line()
    line.connect()
    first, second = line.publish(1), line.publish(1)
    heard = []

    def fail(_: object) -> None:
        raise RuntimeError("the application's fault")

    first.add_done_callback(fail)
    first.add_done_callback(lambda _: heard.append("first"))
    second.add_done_callback(lambda _: heard.append("second"))
    line.say(Ack(PUBACK, 1), Ack(PUBACK, 2))
    assert heard == ["first", "second"]
    assert "the application's fault" in caplog.text

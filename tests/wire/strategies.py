"""Every packet of both versions with all its legal properties, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from sluice.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
    build_publish,
)
from sluice.wire.properties import Properties

WILL, CONNECT, CONNACK, PUBLISH, SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK = 0, 1, 2, 3, 8, 9, 10, 11
DISCONNECT, AUTH = 14, 15

# Sometimes as long as a string may be: 65,535 bytes.
_CHARACTERS = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
texts = st.text(_CHARACTERS, max_size=12) | st.just("x" * 65_535)
topics = st.text(
    st.characters(exclude_characters="\x00+#", exclude_categories=["Cs"]), min_size=1, max_size=12
)
binaries = st.binary(max_size=12) | st.just(b"\x00" * 65_535)
u16s = st.integers(0, 0xFFFF)
u32s = st.integers(0, 0xFFFF_FFFF)
bits = st.integers(0, 1)
packet_ids = st.integers(1, 0xFFFF)
subscription_ids = st.integers(1, 268_435_455)
payloads = st.binary(max_size=64) | st.integers(120, 140).map(bytes) | st.just(bytes(17_000))
filters = (
    st.lists(st.sampled_from(["a", "+", "ü", "", "$x"]), min_size=1, max_size=5)
    .map(lambda levels: "/".join(levels).encode())
    .filter(bool)
)

# The table of section 2.2.2.2 again, by packet and without the user properties that all have.
LEGAL: dict[int, dict[str, st.SearchStrategy[object]]] = {
    WILL: {
        "payload_format": bits,
        "message_expiry": u32s,
        "content_type": texts,
        "response_topic": topics,
        "correlation_data": binaries,
    },
    CONNECT: {
        "session_expiry": u32s,
        "auth_method": texts,
        "request_problem": bits,
        "request_response": bits,
        "receive_maximum": st.integers(1, 0xFFFF),
        "topic_alias_maximum": u16s,
        "maximum_packet_size": st.integers(1, 0xFFFF_FFFF),
    },
    CONNACK: {
        "session_expiry": u32s,
        "assigned_client_id": texts,
        "server_keep_alive": u16s,
        "auth_method": texts,
        "response_information": texts,
        "server_reference": texts,
        "reason_string": texts,
        "receive_maximum": st.integers(1, 0xFFFF),
        "topic_alias_maximum": u16s,
        "maximum_qos": bits,
        "retain_available": bits,
        "maximum_packet_size": st.integers(1, 0xFFFF_FFFF),
        "wildcard_available": bits,
        "subscription_ids_available": bits,
        "shared_available": bits,
    },
    SUBSCRIBE: {"subscription_ids": st.lists(subscription_ids, min_size=1, max_size=1)},
    UNSUBSCRIBE: {},
    SUBACK: {"reason_string": texts},
    UNSUBACK: {"reason_string": texts},
    DISCONNECT: {"session_expiry": u32s, "reason_string": texts, "server_reference": texts},
    AUTH: {"auth_method": texts, "reason_string": texts},
    4: {"reason_string": texts},
    5: {"reason_string": texts},
    6: {"reason_string": texts},
    7: {"reason_string": texts},
}
LEGAL[PUBLISH] = {
    **LEGAL[WILL],
    "topic_alias": st.integers(1, 0xFFFF),
    "subscription_ids": st.lists(subscription_ids, min_size=1, max_size=4),
}

ACK_REASONS = {
    4: [0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99],
    5: [0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99],
    6: [0x00, 0x92],
    7: [0x00, 0x92],
}
REFUSALS = [0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2]


@st.composite
def properties(draw: st.DrawFn, kind: int) -> Properties:
    found = Properties()
    legal = LEGAL[kind]
    if legal:
        for name in draw(st.sets(st.sampled_from(sorted(legal)), max_size=6)):
            setattr(found, name, draw(legal[name]))
    if found.auth_method is not None and draw(st.booleans()):
        found.auth_data = draw(binaries)
    found.user = draw(st.lists(st.tuples(texts, texts), max_size=3))
    return found


def perhaps(kind: int, version: int) -> st.SearchStrategy[Properties | None]:
    return st.none() | properties(kind) if version == 5 else st.none()


@st.composite
def publishes(draw: st.DrawFn, version: int) -> Publish:
    qos = draw(st.integers(0, 2))
    found = build_publish(
        draw(topics).encode(),
        draw(payloads),
        qos,
        draw(st.booleans()),
        draw(perhaps(PUBLISH, version)),
    )
    if qos:
        found.packet_id = draw(packet_ids)
        found.dup = draw(st.booleans())
    if found.topic_alias and draw(st.booleans()):
        found.topic = b""
    return found


@st.composite
def connects(draw: st.DrawFn, version: int) -> Connect:
    found = Connect(draw(texts), version, draw(st.booleans()), draw(u16s))
    if version == 5:
        found.properties = draw(properties(CONNECT))
    if draw(st.booleans()):
        found.will = build_publish(
            draw(topics).encode(),
            draw(binaries),
            draw(st.integers(0, 2)),
            draw(st.booleans()),
            draw(perhaps(WILL, version)),
        )
        if version == 5:
            found.will_delay = draw(u32s)
    found.username = draw(st.none() | texts)
    if version == 5 or found.username is not None:
        found.password = draw(st.none() | binaries)
    return found


@st.composite
def requests(draw: st.DrawFn, version: int) -> SubscriptionRequest:
    found = SubscriptionRequest(draw(filters), draw(st.integers(0, 2)))
    if version == 5:
        found.no_local = draw(st.booleans())
        found.retain_as_published = draw(st.booleans())
        found.retain_handling = draw(st.integers(0, 2))
    return found


@st.composite
def acks(draw: st.DrawFn, version: int) -> Ack:
    kind = draw(st.integers(4, 7))
    if version != 5:
        return Ack(kind, draw(packet_ids))
    return Ack(
        kind,
        draw(packet_ids),
        draw(st.sampled_from(ACK_REASONS[kind])),
        draw(perhaps(kind, version)),
    )


def packets(version: int) -> st.SearchStrategy[Packet]:
    """Any packet that `version` has and that means the same to its writer and its reader.

    A refusal in 3.1.1 is excluded: the broker uses a 5.0 reason, the packet has fewer codes.
    """
    granted = st.integers(0, 2)
    disconnects = st.builds(
        Disconnect, st.sampled_from([0x00, 0x04, 0x81, 0x8E]), perhaps(DISCONNECT, version)
    )
    kinds: list[st.SearchStrategy[Packet]] = [
        connects(version),
        st.builds(
            Connack,
            st.booleans(),
            st.sampled_from([0x00, 0x80, 0x87]) if version == 5 else st.just(0),
            perhaps(CONNACK, version),
        ),
        publishes(version),
        acks(version),
        st.builds(
            Subscribe,
            packet_ids,
            st.lists(requests(version), min_size=1, max_size=4),
            perhaps(SUBSCRIBE, version),
        ),
        st.builds(
            Suback,
            packet_ids,
            st.lists(
                granted | st.sampled_from(REFUSALS if version == 5 else [0x80]),
                min_size=1,
                max_size=4,
            ),
            perhaps(SUBACK, version),
        ),
        st.builds(
            Unsubscribe,
            packet_ids,
            st.lists(filters, min_size=1, max_size=4),
            perhaps(UNSUBSCRIBE, version),
        ),
        st.builds(
            Unsuback,
            packet_ids,
            st.lists(st.sampled_from([0x00, 0x11, 0x80]), min_size=1, max_size=4)
            if version == 5
            else st.just([]),
            perhaps(UNSUBACK, version),
        ),
        st.builds(Pingreq),
        st.builds(Pingresp),
        disconnects if version == 5 else st.builds(Disconnect),
    ]
    if version == 5:
        kinds.append(st.builds(Auth, st.sampled_from([0x00, 0x18, 0x19]), perhaps(AUTH, version)))
    return st.one_of(kinds)

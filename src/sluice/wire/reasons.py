"""The reason codes of MQTT 5.0 section 2.4, the packets that may carry each of them, and their
mapping to MQTT 3.1.1.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import ProtocolViolation

SUCCESS: Final = 0x00
GRANTED_QOS_1: Final = 0x01
GRANTED_QOS_2: Final = 0x02
DISCONNECT_WITH_WILL: Final = 0x04
NO_MATCHING_SUBSCRIBERS: Final = 0x10
NO_SUBSCRIPTION_EXISTED: Final = 0x11
CONTINUE_AUTHENTICATION: Final = 0x18
REAUTHENTICATE: Final = 0x19
UNSPECIFIED_ERROR: Final = 0x80
MALFORMED_PACKET: Final = 0x81
PROTOCOL_ERROR: Final = 0x82
IMPLEMENTATION_SPECIFIC_ERROR: Final = 0x83
UNSUPPORTED_PROTOCOL_VERSION: Final = 0x84
CLIENT_IDENTIFIER_NOT_VALID: Final = 0x85
BAD_USER_NAME_OR_PASSWORD: Final = 0x86
NOT_AUTHORIZED: Final = 0x87
SERVER_UNAVAILABLE: Final = 0x88
SERVER_BUSY: Final = 0x89
BANNED: Final = 0x8A
SERVER_SHUTTING_DOWN: Final = 0x8B
BAD_AUTHENTICATION_METHOD: Final = 0x8C
KEEP_ALIVE_TIMEOUT: Final = 0x8D
SESSION_TAKEN_OVER: Final = 0x8E
TOPIC_FILTER_INVALID: Final = 0x8F
TOPIC_NAME_INVALID: Final = 0x90
PACKET_IDENTIFIER_IN_USE: Final = 0x91
PACKET_IDENTIFIER_NOT_FOUND: Final = 0x92
RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
TOPIC_ALIAS_INVALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
MESSAGE_RATE_TOO_HIGH: Final = 0x96
QUOTA_EXCEEDED: Final = 0x97
ADMINISTRATIVE_ACTION: Final = 0x98
PAYLOAD_FORMAT_INVALID: Final = 0x99
RETAIN_NOT_SUPPORTED: Final = 0x9A
QOS_NOT_SUPPORTED: Final = 0x9B
USE_ANOTHER_SERVER: Final = 0x9C
SERVER_MOVED: Final = 0x9D
SHARED_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0x9E
CONNECTION_RATE_EXCEEDED: Final = 0x9F
MAXIMUM_CONNECT_TIME: Final = 0xA0
SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED: Final = 0xA1
WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0xA2

REASON_NAMES: Final[dict[int, str]] = {
    0x00: "success",
    0x01: "granted QoS 1",
    0x02: "granted QoS 2",
    0x04: "disconnect with will message",
    0x10: "no matching subscribers",
    0x11: "no subscription existed",
    0x18: "continue authentication",
    0x19: "re-authenticate",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x84: "unsupported protocol version",
    0x85: "client identifier not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "session taken over",
    0x8F: "topic filter invalid",
    0x90: "topic name invalid",
    0x91: "packet identifier in use",
    0x92: "packet identifier not found",
    0x93: "receive maximum exceeded",
    0x94: "topic alias invalid",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format invalid",
    0x9A: "retain not supported",
    0x9B: "QoS not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9E: "shared subscriptions not supported",
    0x9F: "connection rate exceeded",
    0xA0: "maximum connect time",
    0xA1: "subscription identifiers not supported",
    0xA2: "wildcard subscriptions not supported",
}

# What chapter 3 of MQTT 5.0 allows in each packet. Client and server may send different codes.
_PUBLISH_RESULTS: Final = frozenset(
    {
        SUCCESS,
        NO_MATCHING_SUBSCRIBERS,
        UNSPECIFIED_ERROR,
        IMPLEMENTATION_SPECIFIC_ERROR,
        NOT_AUTHORIZED,
        TOPIC_NAME_INVALID,
        PACKET_IDENTIFIER_IN_USE,
        QUOTA_EXCEEDED,
        PAYLOAD_FORMAT_INVALID,
    }
)
_RELEASE_RESULTS: Final = frozenset({SUCCESS, PACKET_IDENTIFIER_NOT_FOUND})
_FROM_BOTH_ON_DISCONNECT: Final = frozenset(
    {
        UNSPECIFIED_ERROR,
        MALFORMED_PACKET,
        PROTOCOL_ERROR,
        IMPLEMENTATION_SPECIFIC_ERROR,
        TOPIC_NAME_INVALID,
        RECEIVE_MAXIMUM_EXCEEDED,
        TOPIC_ALIAS_INVALID,
        PACKET_TOO_LARGE,
        MESSAGE_RATE_TOO_HIGH,
        QUOTA_EXCEEDED,
        ADMINISTRATIVE_ACTION,
        PAYLOAD_FORMAT_INVALID,
    }
)

# Packet types are those of section 2.1.2, as in `properties.py`.
SERVER_REASONS: Final[dict[int, frozenset[int]]] = {
    2: frozenset(  # CONNACK
        {
            SUCCESS,
            UNSPECIFIED_ERROR,
            MALFORMED_PACKET,
            PROTOCOL_ERROR,
            IMPLEMENTATION_SPECIFIC_ERROR,
            UNSUPPORTED_PROTOCOL_VERSION,
            CLIENT_IDENTIFIER_NOT_VALID,
            BAD_USER_NAME_OR_PASSWORD,
            NOT_AUTHORIZED,
            SERVER_UNAVAILABLE,
            SERVER_BUSY,
            BANNED,
            BAD_AUTHENTICATION_METHOD,
            TOPIC_NAME_INVALID,
            PACKET_TOO_LARGE,
            QUOTA_EXCEEDED,
            PAYLOAD_FORMAT_INVALID,
            RETAIN_NOT_SUPPORTED,
            QOS_NOT_SUPPORTED,
            USE_ANOTHER_SERVER,
            SERVER_MOVED,
            CONNECTION_RATE_EXCEEDED,
        }
    ),
    4: _PUBLISH_RESULTS,  # PUBACK
    5: _PUBLISH_RESULTS,  # PUBREC
    6: _RELEASE_RESULTS,  # PUBREL
    7: _RELEASE_RESULTS,  # PUBCOMP
    9: frozenset(  # SUBACK
        {
            SUCCESS,
            GRANTED_QOS_1,
            GRANTED_QOS_2,
            UNSPECIFIED_ERROR,
            IMPLEMENTATION_SPECIFIC_ERROR,
            NOT_AUTHORIZED,
            TOPIC_FILTER_INVALID,
            PACKET_IDENTIFIER_IN_USE,
            QUOTA_EXCEEDED,
            SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
            SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
            WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
        }
    ),
    11: frozenset(  # UNSUBACK
        {
            SUCCESS,
            NO_SUBSCRIPTION_EXISTED,
            UNSPECIFIED_ERROR,
            IMPLEMENTATION_SPECIFIC_ERROR,
            NOT_AUTHORIZED,
            TOPIC_FILTER_INVALID,
            PACKET_IDENTIFIER_IN_USE,
        }
    ),
    14: _FROM_BOTH_ON_DISCONNECT  # DISCONNECT
    | {
        NOT_AUTHORIZED,
        SERVER_BUSY,
        SERVER_SHUTTING_DOWN,
        KEEP_ALIVE_TIMEOUT,
        SESSION_TAKEN_OVER,
        TOPIC_FILTER_INVALID,
        RETAIN_NOT_SUPPORTED,
        QOS_NOT_SUPPORTED,
        USE_ANOTHER_SERVER,
        SERVER_MOVED,
        SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
        CONNECTION_RATE_EXCEEDED,
        MAXIMUM_CONNECT_TIME,
        SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
        WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
    },
    15: frozenset({SUCCESS, CONTINUE_AUTHENTICATION}),  # AUTH
}
CLIENT_REASONS: Final[dict[int, frozenset[int]]] = {
    4: _PUBLISH_RESULTS,
    5: _PUBLISH_RESULTS,
    6: _RELEASE_RESULTS,
    7: _RELEASE_RESULTS,
    14: _FROM_BOTH_ON_DISCONNECT | {SUCCESS, DISCONNECT_WITH_WILL},
    15: frozenset({CONTINUE_AUTHENTICATION, REAUTHENTICATE}),
}

# MQTT 3.1.1 section 3.2.2.3 has five refusals; every other reason becomes "server unavailable".
_CONNACK_311: Final[dict[int, int]] = {
    UNSUPPORTED_PROTOCOL_VERSION: 1,
    CLIENT_IDENTIFIER_NOT_VALID: 2,
    SERVER_UNAVAILABLE: 3,
    BAD_USER_NAME_OR_PASSWORD: 4,
    NOT_AUTHORIZED: 5,
    BANNED: 5,
    BAD_AUTHENTICATION_METHOD: 5,
}


def get_reason_name(reason: int) -> str:
    return REASON_NAMES.get(reason, f"reason 0x{reason:02x}")


def map_connack_311(reason: int) -> int:
    """Return the return code of a 3.1.1 CONNACK that is closest to `reason`."""
    return 0 if reason == SUCCESS else _CONNACK_311.get(reason, 3)


def check_client_reason(packet_type: i64, reason: i64) -> None:
    """Check that a client may send `reason` in this packet [MQTT-3.4.2-1, 3.14.2-1 and others]."""
    if reason not in CLIENT_REASONS[packet_type]:
        raise ProtocolViolation(
            f"{get_reason_name(int(reason))} (0x{reason:02x}) is not a reason code of packet type "
            f"{packet_type} from a client"
        )

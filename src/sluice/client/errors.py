"""Errors of the client library. Each states what happened and a remedy.

A refusal says what was refused and why, in the words of the server's reason string if it sent one;
the reason code of MQTT 5.0 (3.1.1 return codes are translated) follows in parentheses.
"""

from __future__ import annotations

from typing import Final

from sluice.errors import SluiceError
from sluice.wire import reasons
from sluice.wire.properties import Properties

# After these, the server would refuse the same client again for the same reason, or the client
# would compete with another client for the session. The client stops instead of reconnecting.
FINAL_REASONS: Final = frozenset(
    {
        reasons.MALFORMED_PACKET,
        reasons.PROTOCOL_ERROR,
        reasons.UNSUPPORTED_PROTOCOL_VERSION,
        reasons.CLIENT_IDENTIFIER_NOT_VALID,
        reasons.BAD_USER_NAME_OR_PASSWORD,
        reasons.NOT_AUTHORIZED,
        reasons.BANNED,
        reasons.BAD_AUTHENTICATION_METHOD,
        reasons.SESSION_TAKEN_OVER,
        reasons.TOPIC_FILTER_INVALID,
        reasons.TOPIC_NAME_INVALID,
        reasons.RECEIVE_MAXIMUM_EXCEEDED,
        reasons.TOPIC_ALIAS_INVALID,
        reasons.PACKET_TOO_LARGE,
        reasons.PAYLOAD_FORMAT_INVALID,
        reasons.RETAIN_NOT_SUPPORTED,
        reasons.QOS_NOT_SUPPORTED,
        reasons.USE_ANOTHER_SERVER,
        reasons.SERVER_MOVED,
        reasons.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
        reasons.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
        reasons.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
    }
)

_ADVICE: Final[dict[int, str]] = {
    reasons.UNSUPPORTED_PROTOCOL_VERSION: "Connect with version=4 (MQTT 3.1.1)",
    reasons.CLIENT_IDENTIFIER_NOT_VALID: "Choose another client_id",
    reasons.BAD_USER_NAME_OR_PASSWORD: "Check username and password",
    reasons.NOT_AUTHORIZED: "Ask for access, or use other credentials",
    reasons.SESSION_TAKEN_OVER: (
        "Another client connected with this client_id: give each client its own"
    ),
    reasons.PACKET_TOO_LARGE: "Send smaller messages, or raise the server's limit",
    reasons.QUOTA_EXCEEDED: "Send less or more slowly, or raise the server's limit",
    reasons.SERVER_BUSY: "Try again later",
    reasons.SERVER_UNAVAILABLE: "Try again later",
}


def _split_reason(reason: int, reason_string: str | None) -> tuple[str, str]:
    """Return why the server refused, and its remedy or ours.

    Sluice writes reason strings as "cause. Remedy"; the text of other servers is one sentence.
    """
    name = reasons.get_reason_name(reason)
    if not reason_string:
        return f"{name} (0x{reason:02x})", _ADVICE.get(reason, "")
    cause, _, remedy = reason_string.partition(". ")
    return f"{cause.removesuffix('.')} ({name}, 0x{reason:02x})", remedy or _ADVICE.get(reason, "")


class ClientError(SluiceError):
    """The base class of all errors that the client library raises."""


class Unsupported(ClientError):
    """The protocol version or the server does not support the request. Nothing was sent."""


class TooManyUnconfirmed(ClientError):
    """`publish_nowait` reached the client's limit of unconfirmed publishes. Nothing was sent."""

    def __init__(self, messages: int, size: int) -> None:
        super().__init__(
            f"{messages} {'publish waits' if messages == 1 else 'publishes wait'} "
            f"for the server, {size} B in all",
            "Await client.wait_for_capacity() first, use `await client.publish`, "
            "or raise max_unconfirmed and max_unconfirmed_bytes",
        )


class PublishesFailed(ClientError):
    """Publishes without waiting failed whose confirms were not awaited. `drain` raises it."""

    def __init__(self, count: int, first: Exception) -> None:
        super().__init__(
            f"{count} {'publish' if count == 1 else 'publishes'} failed,"
            f" the first because: {first}",
            "Await the Confirm of each publish to learn which ones",
        )
        self.count = count


class ConnectFailed(ClientError):
    """The connection failed: no route, no listener, no TLS, or no answer in time.

    The cause is chained.
    """


class Refusal(ClientError):
    """The server refused the request."""

    refused = "the request"

    def __init__(
        self,
        reason: int,
        reason_string: str | None = None,
        properties: Properties | None = None,
        about: str = "",
    ) -> None:
        target = f"{self.refused} {about}" if about else self.refused
        cause, remedy = _split_reason(reason, reason_string)
        super().__init__(f"the server refused {target}: {cause}", remedy)
        self.reason = reason
        self.reason_string = reason_string
        self.properties = properties


class ConnectRefused(Refusal):
    """A CONNACK with a failure code. `properties.server_reference` may name another server."""

    refused = "the connection"


class PublishRefused(Refusal):
    """A PUBACK or PUBREC with a failure code: the server did not accept the message."""

    refused = "the message"


class QueueConfigRefused(PublishRefused):
    """The server did not accept the configuration of `declare_queue`."""

    refused = "the configuration of queue"


class SubscribeRefused(Refusal):
    """A SUBACK with a failure code. `reasons` has one entry per filter, in the requested order."""

    refused = "the subscription"

    def __init__(
        self,
        granted: list[int],
        reason: int,
        reason_string: str | None,
        properties: Properties | None,
        about: str,
    ) -> None:
        super().__init__(reason, reason_string, properties, about)
        self.reasons = granted


class UnsubscribeRefused(SubscribeRefused):
    """An UNSUBACK with a failure code."""

    refused = "to unsubscribe"


class ConnectionLost(ClientError):
    """The connection was lost. `reason` is the server's reason code, if it sent one."""

    def __init__(self, what: str, remedy: str = "", reason: int | None = None) -> None:
        super().__init__(what, remedy)
        self.reason = reason
        self.reason_string: str | None = None
        self.properties: Properties | None = None

    @property
    def final(self) -> bool:
        """Return whether reconnecting is pointless."""
        return self.reason in FINAL_REASONS


class ServerDisconnected(ConnectionLost):
    """The server sent DISCONNECT with `reason`."""

    def __init__(self, reason: int, properties: Properties | None) -> None:
        reason_string = properties.reason_string if properties is not None else None
        cause, remedy = _split_reason(reason, reason_string)
        super().__init__(f"the server ended the connection: {cause}", remedy, reason)
        self.reason_string = reason_string
        self.properties = properties


class ClientClosed(ClientError):
    """The client is closed or was never connected."""

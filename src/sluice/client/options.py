"""Options of a client. Plain values: this module does not know sockets or packet encoding."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sluice.backoff import Backoff
from sluice.client.errors import Unsupported
from sluice.wire.packets import V5, V311, Connect, build_publish
from sluice.wire.properties import Properties

UserProperties = Mapping[str, str] | Iterable[tuple[str, str]]

# Connects a protocol to a server without a socket: the test kit's broker is in the same process.
Dial = Callable[[asyncio.Protocol], Awaitable[None]]

# The limit of messages in flight to a 3.1.1 server, which cannot announce its receive maximum: the
# default of common servers. Some close the connection beyond it.
DEFAULT_V311_INFLIGHT = 20

# The largest MQTT packet: the first byte, four bytes of length and the body.
MAX_PACKET_BYTES = 268_435_455 + 5


def user_pairs(user: UserProperties) -> list[tuple[str, str]]:
    pairs = list(user.items()) if isinstance(user, Mapping) else list(user)
    for name, value in pairs:
        check_text(name)
        check_text(value)
    return pairs


def check_text(text: str) -> None:
    """Raise Unsupported for a text that no packet can carry.

    Otherwise the server would close the connection.
    """
    if len(text) > 0x3FFF or not text.isascii() or "\0" in text:
        try:
            fits = len(text.encode()) <= 0xFFFF and "\0" not in text
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise Unsupported(
                f"a property of {len(text):,} characters that begins {text[:40]!r} fits no packet",
                "Give at most 65,535 bytes of UTF-8 without the character U+0000",
            )


@dataclass(slots=True)
class Will:
    """The message that the server publishes when the connection of this client ends badly."""

    topic: str
    payload: bytes | str = b""
    qos: int = 0
    retain: bool = False
    delay_seconds: int = 0
    properties: Properties | None = None


@dataclass(slots=True)
class Options:
    """All options of one client. `Client` takes the same names as keywords."""

    host: str = "127.0.0.1"
    port: int = 1883
    client_id: str = ""
    version: int = V5
    clean_start: bool = True
    session_expiry: int = 0
    keep_alive: int = 60
    username: str | None = None
    password: bytes | str | None = None
    will: Will | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int = 0
    maximum_packet_size: int | None = None
    user_properties: UserProperties = ()
    tls: ssl.SSLContext | bool = False
    server_hostname: str | None = None
    connect_timeout: float = 10.0
    reconnect: bool = True
    backoff: Backoff = field(default_factory=Backoff)
    manual_ack: bool = False
    topic_aliases: bool = False
    max_inflight: int | None = None
    max_buffered: int = 1_000
    max_unconfirmed: int = 65_536
    max_unconfirmed_bytes: int = 64 * 1024 * 1024
    dial: Dial | None = None

    def __post_init__(self) -> None:
        if self.version not in (V311, V5):
            raise Unsupported(
                f"MQTT version {self.version} is not supported", "Use 5, or 4 for MQTT 3.1.1"
            )
        if not 0 <= self.keep_alive <= 0xFFFF:
            raise Unsupported(f"keep_alive is {self.keep_alive}", "Use 0 (off) to 65535 seconds")
        if self.receive_maximum is not None and not 1 <= self.receive_maximum <= 0xFFFF:
            raise Unsupported(
                f"receive_maximum is {self.receive_maximum}", "Use 1 to 65535, or None"
            )
        if self.max_buffered < 1 or self.max_unconfirmed < 1 or self.inflight_limit < 1:
            raise Unsupported("max_buffered, max_unconfirmed and max_inflight are at least 1")
        if self.version == V311:
            if not self.clean_start and not self.client_id:
                raise Unsupported(
                    "a session of MQTT 3.1.1 needs a client_id",
                    "Choose a client_id, or set clean_start=True",
                )
            if self.password is not None and self.username is None:
                raise Unsupported(
                    "MQTT 3.1.1 has no password without a user name", "Set username as well"
                )

    def connect_packet(self, client_id: str, is_reconnect: bool) -> Connect:
        """Return the CONNECT packet. A reconnect of MQTT 5.0 resumes the session.

        In 3.1.1 a clean session stays clean, because the server would otherwise store a session
        that the application did not request.
        """
        clean = self.clean_start and not (is_reconnect and self.version == V5)
        packet = Connect(client_id, self.version, clean, self.keep_alive)
        packet.username = self.username
        packet.password = (
            self.password.encode() if isinstance(self.password, str) else self.password
        )
        if self.will is not None:
            will = self.will
            payload = will.payload.encode() if isinstance(will.payload, str) else will.payload
            packet.will = build_publish(
                will.topic.encode(), payload, will.qos, will.retain, will.properties
            )
            packet.will_delay = will.delay_seconds
        if self.version == V5:
            properties = packet.properties
            properties.session_expiry = self.session_expiry or None
            properties.receive_maximum = self.window
            properties.topic_alias_maximum = self.topic_alias_maximum or None
            properties.maximum_packet_size = self.maximum_packet_size
            properties.user = user_pairs(self.user_properties)
        return packet

    @property
    def inflight_limit(self) -> int:
        """Return our own limit of QoS 1 and 2 messages in flight to the server."""
        if self.max_inflight is not None:
            return self.max_inflight
        return 0xFFFF if self.version == V5 else DEFAULT_V311_INFLIGHT

    @property
    def window(self) -> int:
        """Return the limit of unacknowledged messages to us: as many as we are ready to buffer."""
        return self.receive_maximum or min(self.max_buffered, 0xFFFF)

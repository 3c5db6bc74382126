"""Interfaces between the parts of the broker, so that their modules do not import each other.

A session uses its connection, and notifies what waits for its capacity, through these classes. They
are base classes and not protocols: calling a native method is a jump, calling through a protocol is
a lookup. The classes themselves are null objects: they do nothing.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64, mypyc_attr

from sluice.clock import Deadline
from sluice.wire.packets import Publish

NO_PACKET_LIMIT: Final = 268_435_460  # bytes: the largest packet that MQTT can express


class ConnectionPort(Deadline):
    """What sessions, handlers and the turn may do with a connection.

    It is a deadline of the scheduler, for the keep-alive.
    """

    def __init__(self) -> None:
        self.version: i64 = 0  # 0 until CONNECT
        self.is_write_paused: bool = False  # the peer reads more slowly than we write
        self.closing: bool = False
        self.lost: bool = False
        self.opened_at: float = 0.0
        self.last_read_at: float = 0.0
        self.max_outgoing_packet: i64 = NO_PACKET_LIMIT  # the client's maximum packet size
        self.is_from_cluster: bool = False  # from another cell, which has authenticated it
        self.claim_token: str = ""  # of the session elsewhere that claims this client id
        self.has_fast_path: bool = False  # MQTT 5.0, no packet size limit, no aliases
        # A packet that takes more than one turn.
        self.input_task: InputTask | None = None

    def get_output(self) -> BytesWriter:
        """Return the output buffer of this turn and register the connection to be flushed."""
        raise NotImplementedError

    def flush(self) -> BytesWriter | None:
        """Write the turn's output to the transport in one piece; return the buffer that it used."""
        raise NotImplementedError

    def send_ack(self, kind: i64, packet_id: i64, reason: i64, reason_string: str) -> None: ...

    def send_puback(self, packet_id: i64) -> None:
        """Send a PUBACK without reason; its bytes are the same in 3.1.1 and 5.0."""

    def send_suback(
        self, head: int, packet_id: int, reasons: list[int], reason_string: str
    ) -> None:
        """Send a SUBACK or an UNSUBACK."""

    def send_publish(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        dup: bool,
        packet_id: i64,
        extra_properties: bytes,
    ) -> bool:
        """Write a PUBLISH; return False if it exceeds the client's packet size [MQTT-3.1.2-24]."""
        return False

    def on_publish_written(self, payload_bytes: i64, out: BytesWriter) -> None:
        """Count a PUBLISH with a payload of `payload_bytes` that was written to `out`."""

    def resolve_alias(self, packet: Publish) -> None:
        """Replace an incoming alias with its topic, or store the topic of a new alias."""

    def throttle(self) -> bool:
        """Pause reading, and return whether it was not paused before."""
        return False

    def unthrottle(self) -> None:
        """Resume reading, unless something else has paused it."""

    def is_over_time_slice(self) -> bool:
        """Return whether the input of this connection has used up its time slice."""
        return False

    def has_eof(self) -> bool:
        """Return whether the client has closed its side: its input is processed without slices."""
        return False

    def end(self, reason: int, reason_string: str, was_answered: bool = False) -> None:
        """Close the connection and send the reason if the protocol has a packet for it.

        `was_answered`: the caller has already sent the reason.
        """

    def abort(self) -> None:
        """Close the connection at once, without a DISCONNECT, and discard unsent output."""

    def peer(self) -> str:
        """Return the peer's address and port, for logs and access rules."""
        return ""

    def log(self, event: str, facts: dict[str, object]) -> None:
        """Log an event that concerns this connection."""


class InputTask:
    """A packet that takes more than one turn. The connection processes no other one meanwhile."""

    def advance(self) -> None:
        """Continue; sets `ConnectionPort.input_task` again if more work is left."""


class CapacityListener:
    """Waits until a session has capacity for deliveries again."""

    def on_capacity(self) -> None:
        """Called when a delivery has ended, or the connection is writable again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionListener:
    """Follows the connections of one session."""

    def on_attached(self) -> None:
        """Resume: the session has a connection."""

    def on_detached(self) -> None:
        """Pause: the session has no connection."""

    def on_session_ended(self) -> None: ...

    def on_writable(self) -> None:
        """Resume deliveries: the connection is writable again."""


class RetainedLookup:
    """Looks up retained messages for the new subscriptions of one session."""

    def __init__(self) -> None:
        self.is_in_session_record: bool = False  # the session record names pending filters

    def is_running(self) -> bool:
        return False

    def pending_filters(self) -> list[bytes]:
        """Return the filters that the store must remember. QoS 0 may be lost with the broker."""
        return []

    def add(self, topic_filter: bytes) -> None:
        """Look up a filter, from the beginning if its lookup is already running."""

    def cancel(self, topic_filter: bytes) -> None:
        """Stop looking up a filter."""

    def start(self) -> None:
        """Do the first slice of the added work, unless earlier work is running."""

    def resume(self) -> None:
        """Continue in a later turn if the lookup was waiting for the client."""


NO_CAPACITY_LISTENER: Final = CapacityListener()
NO_SESSION_LISTENER: Final = SessionListener()
NO_RETAINED_LOOKUP: Final = RetainedLookup()

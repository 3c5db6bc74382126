"""Incoming QoS 1 and 2 of one session: receipts, and acknowledgements after the commit.

An acknowledgement leaves after the store has what its publish promises. In a persistent session
each step of QoS 2 is stored before the packet leaves that reports it: the message with its packet
id before PUBREC, and the receipt of PUBREL before PUBCOMP. So after a crash both sides continue
from the same step. A session that ends with its connection cannot continue after a crash, and
nothing of this is stored for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.vecs import vec
from mypy_extensions import i64

from sluice.broker.ports import ConnectionPort
from sluice.broker.sessions.services import SessionServices
from sluice.errors import ProtocolViolation
from sluice.queues.ports import Publisher
from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC
from sluice.wire.reasons import PACKET_IDENTIFIER_NOT_FOUND, RECEIVE_MAXIMUM_EXCEEDED

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session

# In a tag, in place of the QoS of a publish: the packet to send after the note is committed.
TAG_SUBACK: Final = 3  # SUBACK or UNSUBACK
TAG_PUBCOMP: Final = 4
TAG_PUBCOMP_UNKNOWN: Final = 5  # PUBCOMP for an unknown packet id
TAG_REFUSAL: Final = 6  # PUBACK or PUBREC of a packet that could be carried out only in part


class InboundQos(Publisher):
    def __init__(self, session: Session, services: SessionServices) -> None:
        self._session: Session = session
        self._services: SessionServices = services
        self._unreleased: set[int] | None = None  # incoming QoS 2 between PUBREC and PUBREL
        self._restored_ids: set[int] | None = None  # the subset from before a restart
        # QoS 2 messages on their way to other cells: dedup ids by packet id, lowest first
        self.outbox: dict[int, int] | None = None
        # The subset of `_unreleased` that is not committed yet.
        self._uncommitted: set[int] | None = None
        # Incoming QoS 1 and 2 publishes of this connection that wait for a commit.
        self._unacked_publishes: i64 = 0
        self._epoch: i64 = 0  # counts connections; see `make_tag`
        # SUBACKs that wait for a commit
        self._pending_subacks: dict[int, tuple[int, list[int], str]] = {}
        # Refusals that wait for a commit, by tag
        self._pending_refusals: dict[int, tuple[Publish, int, str]] | None = None

    def begin_connection(self) -> None:
        """Forget what was to be acknowledged on the previous connection."""
        self._epoch += 1
        self._unacked_publishes = 0
        self._pending_subacks.clear()

    def make_tag(self, packet: Publish) -> i64:
        """Return the tag that the engine passes to `on_committed`: packet id, QoS and connection.

        A QoS 1 publish is acknowledged on its own connection only. A client that reconnects resends
        it, and by then the packet id may belong to another message.
        """
        return packet.packet_id | (packet.qos << 16) | (self._epoch << 20)

    def make_refusal_tag(self, packet: Publish, reason: i64, reason_string: str) -> i64:
        """Return the tag of a packet of which a part was refused and the rest is to be committed.

        A QoS 2 packet is not received: after a crash, the client resends it and gets the refusal.
        """
        self.defer_receipt(packet)
        tag: i64 = packet.packet_id | (TAG_REFUSAL << 16) | (self._epoch << 20)
        if self._pending_refusals is None:
            self._pending_refusals = {}
        self._pending_refusals[int(tag)] = (packet, int(reason), reason_string)
        return tag

    def expect_commit(self, packet: Publish) -> None:
        """Count a publish whose acknowledgement waits for the commit; see `on_committed`."""
        self._unacked_publishes += 1
        if packet.qos == 2:
            if self._uncommitted is None:
                self._uncommitted = set()
            self._uncommitted.add(int(packet.packet_id))
        receive_maximum = self._services.limits.receive_maximum
        if self._unacked_publishes > receive_maximum and self._session.version == V5:
            raise ProtocolViolation(
                "more messages are unacknowledged than the server's receive maximum",
                "Wait for PUBACK or PUBREC before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )

    def on_written(self, tag: i64) -> None:
        """Record the receipt of a QoS 2 packet that `defer_receipt` has undone."""
        packet_id = int(tag & 0xFFFF)
        if (
            (tag >> 16) & 15 == 2
            and self._session.persistent_id
            and self._unreleased is not None
            and packet_id in self._unreleased
        ):
            self._record_received(packet_id, False)

    def on_committed(self, tag: i64) -> None:
        """Acknowledge a packet of this client after the store has committed it."""
        packet_id: i64 = tag & 0xFFFF
        kind: i64 = (tag >> 16) & 15
        is_current_connection = (tag >> 20) == self._epoch
        if kind >= TAG_SUBACK:
            self._on_note_committed(tag, kind, packet_id, is_current_connection)
            return
        if is_current_connection:
            self._unacked_publishes -= 1
        is_qos2 = kind == 2
        if is_qos2 and self._uncommitted is not None:
            self._uncommitted.discard(int(packet_id))
        connection = self._session.connection
        if connection is not None and (is_current_connection or is_qos2):
            connection.send_ack(PUBREC if is_qos2 else PUBACK, packet_id, 0, "")

    def _on_note_committed(
        self, tag: i64, kind: i64, packet_id: i64, is_current_connection: bool
    ) -> None:
        """Send the packet that waited for the commit of a note: SUBACK, PUBCOMP or a refusal."""
        connection = self._session.connection
        if kind == TAG_REFUSAL:
            refusals = self._pending_refusals
            refusal = refusals.pop(int(tag), None) if refusals is not None else None
            if refusal is not None:
                packet, reason, reason_string = refusal
                self.ack_deferred(packet, True, tag >> 20, reason, reason_string)
        elif kind == TAG_SUBACK:
            if is_current_connection:
                self._send_committed_suback(int(packet_id))
        elif is_current_connection and connection is not None:  # else the client resends PUBREL
            connection.send_ack(
                PUBCOMP, packet_id, 0 if kind == TAG_PUBCOMP else PACKET_IDENTIFIER_NOT_FOUND, ""
            )

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """Acknowledge many packets.

        Nearly all are QoS 1 on the current connection: four bytes each.
        """
        connection = self._session.connection
        while start < end:
            tag = tags[start]
            start += 1
            if connection is not None and tag >> 16 == (self._epoch << 4 | 1):
                self._unacked_publishes -= 1
                connection.send_puback(tag & 0xFFFF)
            else:
                self.on_committed(tag)

    def begin_receipt(self, packet: Publish, connection: ConnectionPort) -> bool:
        """Register an incoming QoS 2 message, or acknowledge a duplicate again and return False."""
        unreleased = self._unreleased
        if unreleased is None:
            unreleased = self._unreleased = set()
        packet_id = int(packet.packet_id)
        if self._restored_ids and packet_id in self._restored_ids:
            self._restored_ids.discard(packet_id)
            if not packet.dup:
                # The release was lost in the crash: this is another message.
                unreleased.discard(packet_id)
        if packet_id in unreleased:
            if self._uncommitted is None or packet_id not in self._uncommitted:
                connection.send_ack(PUBREC, packet.packet_id, 0, "")
            return False
        if self._session.version == V5 and len(unreleased) >= self._services.limits.receive_maximum:
            raise ProtocolViolation(
                "more QoS 2 messages are unreleased than the server's receive maximum",
                "Wait for PUBCOMP before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )
        unreleased.add(packet_id)
        if self._session.persistent_id:
            self._record_received(packet_id, False)
        return True

    def _record_received(self, packet_id: int, released: bool) -> None:
        self._services.delivery_records.record_received(
            self._session.persistent_id, packet_id, released
        )

    def refuse(
        self, packet: Publish, connection: ConnectionPort, reason: i64, reason_string: str
    ) -> None:
        """Refuse a publish. MQTT 3.1.1 has no error acknowledgement, so the connection ends."""
        if packet.qos == 2 and reason >= 0x80 and self._unreleased is not None:
            self._unreleased.discard(int(packet.packet_id))
            self.remove_from_outbox(int(packet.packet_id))
            if self._session.persistent_id:
                self._record_received(int(packet.packet_id), True)
        if self._session.version != V5:
            connection.end(int(reason), reason_string)
        elif packet.qos > 0:
            connection.send_ack(
                PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, reason_string
            )

    def defer_receipt(self, packet: Publish) -> None:
        """Undo the receipt of a QoS 2 packet that is stored later, or by other cells.

        The receipt is recorded when the packet is stored. After a crash in between, the broker must
        not claim to the client that it has the message.
        """
        if packet.qos == 2 and self._session.persistent_id:
            self._record_received(int(packet.packet_id), True)

    def find_dedup_id(self, packet: Publish) -> int:
        """Return the dedup id under which a resent QoS 2 message was already forwarded, or 0."""
        return (
            self.outbox.get(int(packet.packet_id), 0)
            if self.outbox is not None and packet.dup
            else 0
        )

    def add_to_outbox(self, packet: Publish, dedup_id: int) -> int:
        """Add `packet` to the outbox under `dedup_id`; return the lowest open dedup id."""
        if self.outbox is None:
            self.outbox = {}
        packet_id = int(packet.packet_id)
        if self.outbox.get(packet_id, 0) != dedup_id:
            self.outbox.pop(packet_id, None)
            self.outbox[packet_id] = dedup_id
        return next(iter(self.outbox.values()))

    def remove_from_outbox(self, packet_id: int) -> bool:
        """Remove an acknowledged or abandoned message; return whether it was in the outbox."""
        return self.outbox is not None and self.outbox.pop(packet_id, 0) != 0

    def ack_deferred(
        self,
        packet: Publish,
        is_command: bool,
        connection_epoch: i64,
        reason: i64,
        reason_string: str,
    ) -> None:
        """Acknowledge a publish whose result came later: from another cell or a collected write."""
        if reason == 0 or (self._session.version != V5 and (is_command or reason < 0x80)):
            if packet.qos == 2 and self._session.persistent_id and self._unreleased is not None:
                self._record_received(int(packet.packet_id), False)
                self.remove_from_outbox(int(packet.packet_id))
            self.on_committed(packet.packet_id | (packet.qos << 16) | (connection_epoch << 20))
            return
        is_current_connection = connection_epoch == self._epoch
        if is_current_connection:
            self._unacked_publishes -= 1
        if packet.qos == 2 and self._uncommitted is not None:
            self._uncommitted.discard(int(packet.packet_id))
        connection = self._session.connection
        if connection is not None and (is_current_connection or packet.qos == 2):
            self.refuse(packet, connection, reason, reason_string)

    def get_epoch(self) -> int:
        """Return the number of the current connection.

        Acknowledgements for another one are useless.
        """
        return int(self._epoch)

    def on_pubrel(self, packet: Ack, connection: ConnectionPort) -> None:
        packet_id = int(packet.packet_id)
        persistent_id = self._session.persistent_id
        is_known = self._unreleased is not None and packet_id in self._unreleased
        # The recipients have the message, but a node died before that was recorded.
        is_known = self.remove_from_outbox(packet_id) or is_known
        if is_known:
            if self._unreleased is not None:
                self._unreleased.discard(packet_id)
            if persistent_id:
                self._record_received(packet_id, True)
        if persistent_id:
            # After PUBCOMP the client may reuse the id for another message. This also holds for
            # an unknown id: the record of its release may be on its way to the store.
            self._notify_after_commit(
                TAG_PUBCOMP if is_known else TAG_PUBCOMP_UNKNOWN, packet.packet_id
            )
        else:
            reason: i64 = 0 if is_known else PACKET_IDENTIFIER_NOT_FOUND
            connection.send_ack(PUBCOMP, packet.packet_id, reason, "")

    def _notify_after_commit(self, kind: i64, packet_id: i64) -> None:
        self._services.delivery_records.notify_after_commit(
            self, packet_id | (kind << 16) | (self._epoch << 20)
        )

    def send_suback_after_commit(
        self, head: int, packet_id: int, reasons: list[int], reason_string: str
    ) -> None:
        """Send a SUBACK or UNSUBACK after everything recorded so far is committed."""
        self._pending_subacks[packet_id] = (head, reasons, reason_string)
        self._notify_after_commit(TAG_SUBACK, packet_id)

    def _send_committed_suback(self, packet_id: int) -> None:
        connection = self._session.connection
        head, reasons, reason_string = self._pending_subacks.pop(packet_id, (0, [], ""))
        if head and connection is not None:
            connection.send_suback(head, packet_id, reasons, reason_string)

    # ---- recovery and end

    def restore_received(self, packet_ids: set[int]) -> None:
        """Restore the ids of incoming QoS 2 messages that are not released."""
        self._unreleased = set(packet_ids)
        self._restored_ids = set(packet_ids)

    def end(self) -> None:
        self._unreleased = None
        self.outbox = None

"""Settles deliveries: publishes to `$queue/<name>/$ack` and to the other verbs.

This module decides which group a client settles for, and as what: a member, an operator or the
holder of a token. `lease_lookup` compares token and holder with the lease; `settlement` ends the
delivery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.acl import QUEUE_ADMIN
from sluice.broker.namespaces.queues.memberships import find_memberships
from sluice.broker.namespaces.queues.queue_options import (
    default_group,
    read_delay,
    read_message_ids,
    read_token,
)
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.queue_topics import (
    ACK,
    EXTEND,
    MAX_IDS,
    NACK,
    REJECT,
    PublishOptions,
    QueueTopic,
    read_publish_options,
)
from sluice.errors import (
    InvalidQueueConfig,
    NotHolder,
    QueueError,
    StaleDelivery,
    TokenNeeded,
    TooManyIds,
    UnknownDelivery,
    UnknownGroup,
    WrongToken,
)
from sluice.metrics import Counters
from sluice.queues.engine import Engine
from sluice.queues.flow import DeliveryToken, LeaseLookup, Settlement
from sluice.queues.model import DEAD_LETTERING, Group, Lease, Queue
from sluice.wire.packets import V5, Publish

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.message_builder import ThenStep
    from sluice.broker.sessions import Session

WARNING_INTERVAL_SECONDS: Final = 1.0


class Settler:
    """A client that settles deliveries of `group`, and its right to do so.

    A member consumes as that group. An operator is no member, and has a rule `queue-admin` for the
    queue. Any other client must be the last holder of the delivery, by client id and user, or give
    the delivery token.
    """

    def __init__(self, group: Group, session: Session, is_member: bool, is_operator: bool) -> None:
        self.group: Group = group
        self.session: Session = session
        self.identity: str = session.identity
        self.is_member: bool = is_member
        self.is_operator: bool = is_operator


class SettlementTopics:
    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._counters: Counters = counters
        self._engine: Engine = engine
        self._lease_lookup: LeaseLookup = engine.lease_lookup
        self._settlement: Settlement = engine.settlement
        self._options = PublishOptions()  # reused: of the current packet
        self._token = DeliveryToken()  # reused: the token of the current settlement
        # Deliveries of the current packet whose bodies are read for their dead letters.
        self._dead_lettering: list[Lease] = []
        self._next_warning_at: float = 0.0  # when a wrong token may be logged again

    def settle(
        self,
        packet: Publish,
        parsed: QueueTopic,
        queue: Queue | None,
        session: Session,
        then: ThenStep | None = None,
    ) -> None:
        """Settle the deliveries that a packet names; acknowledge it after the commit.

        With `then`, all are acknowledged and its messages published, or nothing happens.
        """
        if self._dead_lettering:
            self._dead_lettering = []  # of a packet that was refused
        options = self._options
        read_publish_options(packet.raw_properties, options)
        message_id = options.id
        message_ids = options.all_ids
        if message_ids is not None and len(message_ids) > MAX_IDS:
            raise TooManyIds(MAX_IDS)
        if not message_id:
            message_id = parsed.argument
            if not message_id:
                message_ids = read_message_ids(packet.payload)
                message_id = message_ids[0]
        if queue is None:
            raise UnknownDelivery(message_id.decode("utf-8", "replace"))
        settler = self._find_settler(queue, options.group, session)
        token = self._token
        token.counter = 0
        location = b""
        if options.token:
            read_token(options.token, token)
            location = options.token.partition(b".")[2]
        if then is not None:
            self._ack_then(settler, message_ids or [message_id], token, location, then)
        elif message_ids is None or len(message_ids) == 1:
            try:
                self._settle_one(parsed.verb, settler, message_id, token, location)
            except WrongToken:
                self._count_wrong_token(settler)
                raise
        else:
            error = self._settle_many(parsed.verb, settler, message_ids, token)
            if error is not None and packet.qos > 0 and session.version == V5:
                tag = session.inbound.make_refusal_tag(packet, get_reason_code(error), str(error))
                self._notify_after_commit(packet, session, tag)
                return
        if packet.qos > 0:
            self.ack_after_commit(packet, session)

    def ack_after_commit(self, packet: Publish, session: Session) -> None:
        """Acknowledge a settling packet after the commit of its settlements and dead letters."""
        self._notify_after_commit(packet, session, session.inbound.make_tag(packet))

    def _notify_after_commit(self, packet: Publish, session: Session, tag: i64) -> None:
        inbound = session.inbound
        if self._dead_lettering:
            inbound.defer_receipt(packet)
            self._engine.pending_dead_letters.add_waiter(inbound, tag, self._dead_lettering)
            self._dead_lettering = []
        else:
            self._engine.frame_builder.add_commit_waiter(inbound, tag)
        inbound.expect_commit(packet)

    def _find_settler(self, queue: Queue, group_name: str, session: Session) -> Settler:
        """Return the group that a client settles for, and its right to do so."""
        memberships = find_memberships(session)
        consumer = memberships.consumers.get(queue.name) if memberships is not None else None
        if (
            consumer is not None
            and consumer.group is not None
            and (not group_name or group_name == consumer.group_name)
        ):
            return Settler(consumer.group, session, True, False)
        group_name = group_name or default_group(session.client_id)
        group = queue.groups.get(group_name)
        if group is None:
            raise UnknownGroup(queue.name, group_name)
        grant = session.grant
        is_operator = grant is not None and grant.allows(QUEUE_ADMIN, queue.name.encode())
        return Settler(group, session, False, is_operator)

    def _ack_then(
        self,
        settler: Settler,
        message_ids: list[bytes],
        token: DeliveryToken,
        location: bytes,
        then: ThenStep,
    ) -> None:
        """Acknowledge all deliveries and publish: find the leases and check everything first."""
        leases: list[Lease] = []
        for message_id in message_ids:
            # Not ACK: a late ack would be applied at once, before the other leases are checked.
            lease = self._find_lease(settler, EXTEND, message_id, token, location)
            if lease is None or lease.state == DEAD_LETTERING:
                raise StaleDelivery(message_id.decode("utf-8", "replace"))
            if lease not in leases:
                leases.append(lease)
        then.prepare()
        for lease in leases:
            self._engine.settlement.ack(lease)
        then.publish()

    def _settle_one(
        self, verb: i64, settler: Settler, message_id: bytes, token: DeliveryToken, location: bytes
    ) -> None:
        """Settle one delivery; `location`: its partition and sequence, if the token has them."""
        delay = -1.0
        reason = ""
        if verb == NACK and self._options.delay:
            delay = read_delay("delay", self._options.delay)
        elif verb == REJECT:
            reason = self._read_reason()
        lease = self._find_lease(settler, verb, message_id, token, location)
        if lease is None:
            return
        if verb == ACK:
            self._settlement.ack(lease)
            return
        try:
            if verb == NACK:
                self._settlement.nack(lease, delay, self._options.description.decode())
            elif verb == REJECT:
                self._settlement.dead_letter(
                    lease, reason, self._options.description.decode(), True
                )
            elif verb == EXTEND:
                self._settlement.extend(lease)
            else:
                self._settlement.release(lease)
        finally:
            # Also when a resent packet is too late, which MQTT 3.1.1 acknowledges as a success.
            if lease.state == DEAD_LETTERING:
                self._dead_lettering.append(lease)

    def _find_lease(
        self, settler: Settler, verb: i64, message_id: bytes, token: DeliveryToken, location: bytes
    ) -> Lease | None:
        """Return the lease that a client wants to settle; None: it was acknowledged, late.

        `location`: partition and sequence of the message, if the token has them.
        """
        group = settler.group
        identity = settler.identity
        lookup = self._lease_lookup
        try:
            return lookup.find_lease(
                group,
                message_id,
                token,
                "" if settler.is_operator and not token.counter else identity,
            )
        except (UnknownDelivery, StaleDelivery) as error:
            is_known = isinstance(error, StaleDelivery)
            if not token.counter and not self._may_settle_late(settler, message_id, is_known):
                raise
            if verb == ACK and lookup.ack_late(group, location or message_id, token, identity):
                return None
            reclaimed = (
                lookup.reclaim_lease(group, location or message_id, token, identity)
                if verb != ACK
                else None
            )
            if reclaimed is None:
                if token.counter and lookup.is_token_forged(
                    group, location or message_id, token, identity, is_known
                ):
                    raise WrongToken(message_id.decode("utf-8", "replace")) from None
                raise
            return reclaimed

    def _may_settle_late(self, settler: Settler, message_id: bytes, is_known: bool) -> bool:
        """Return whether a client may settle a delivery of a previous run without a token.

        An operator may. So may a member of the group that cannot send a token because it uses MQTT
        3.1.1; a member could also receive the message and settle it then. `is_known`: this run
        knows the delivery, and another client holds it.
        """
        if settler.is_operator or (settler.is_member and settler.session.lacks_user_properties):
            return True
        if is_known and not settler.is_member:
            raise NotHolder(message_id.decode("utf-8", "replace")) from None
        if (
            settler.is_member
            and not is_known
            and self._lease_lookup.is_from_previous_run(settler.group, message_id)
        ):
            raise TokenNeeded(message_id.decode("utf-8", "replace")) from None
        return False

    def _count_wrong_token(self, settler: Settler) -> None:
        """Count a packet with a token of another client, and log at most one per second."""
        session = settler.session
        session.wrong_tokens += 1
        self._counters.wrong_tokens += 1
        connection = session.connection
        if connection is not None and self._engine.now >= self._next_warning_at:
            self._next_warning_at = self._engine.now + WARNING_INTERVAL_SECONDS
            facts: dict[str, object] = {
                "client": session.client_id,
                "user": session.user,
                "peer": connection.peer(),
                "queue": settler.group.queue.name,
                "group": settler.group.name,
                "count": session.wrong_tokens,
            }
            connection.log("wrong delivery token", facts)

    def _read_reason(self) -> str:
        reason = self._options.reason.decode() or "rejected"
        if reason in ("rejected", "delivery-error", "DeliveryError"):
            return "rejected"
        if reason in ("unacceptable", "Unacceptable"):
            return "unacceptable"
        raise InvalidQueueConfig(
            f"reason is {reason!r}",
            "Use delivery-error or unacceptable, also spelled DeliveryError or Unacceptable",
        )

    def _settle_many(
        self, verb: i64, settler: Settler, ids: list[bytes], token: DeliveryToken
    ) -> QueueError | None:
        """Settle as many of a batch as possible; return the first error and the number of failures.

        If none could be settled, raise it: its acknowledgement waits for no commit. An id that was
        refused is refused again without a search: each search visits all deliveries with that id.
        """
        first_error: QueueError | None = None
        failed = 0
        is_wrong_token = False
        refused: set[bytes] = set()
        for message_id in ids:
            if refused and message_id in refused:
                failed += 1
                continue
            try:
                self._settle_one(verb, settler, message_id, token, b"")
            except QueueError as error:
                failed += 1
                refused.add(message_id)
                first_error = first_error or error
                if isinstance(error, WrongToken):
                    is_wrong_token = True
        if is_wrong_token:
            self._count_wrong_token(settler)
        if first_error is not None:
            first_error.remedy = (
                f"{failed} of {len(ids)} could not be settled. {first_error.remedy}"
            )
            if failed == len(ids):
                raise first_error
        return first_error

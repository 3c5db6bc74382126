"""All session proxies of one session: routes its requests to cells and returns the answers.

This module knows the session and the cluster port; the MQTT exchange is in `session_proxy`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespaces import encode_user_property
from sluice.broker.ports import ConnectionPort
from sluice.broker.queue_topics import (
    QUEUE_PREFIX,
    PublishOptions,
    parse_queue_topic,
    read_publish_options,
)
from sluice.broker.routing import TAKEN_OVER, SessionProxies
from sluice.broker.sessions import SubscribeOptions
from sluice.cluster.plain.fanout import MAX_SWEEP_SECONDS, UNREACHABLE
from sluice.cluster.remote_queues.client_claim import RemoteClientClaim
from sluice.cluster.remote_queues.routing import ALL_CELLS, cell_of_filter
from sluice.cluster.remote_queues.session_proxy import MqttSessionProxy
from sluice.cluster.transport import PROXY_GREETING, StreamTransport
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connect, Disconnect, Publish
from sluice.wire.reasons import IMPLEMENTATION_SPECIFIC_ERROR, SESSION_TAKEN_OVER
from sluice.wire.topics import matches

if TYPE_CHECKING:
    from sluice.broker.sessions import Session
    from sluice.cluster.cell import CellClusterPort


class MqttSessionProxies(SessionProxies):
    """The proxies of one session, by remote cell."""

    def __init__(self, session: Session, cluster: CellClusterPort, clean_start: bool) -> None:
        self.session = session
        self._cluster = cluster
        self._turn = cluster.turn()
        # False: the session was restored after a restart, and remote sessions may exist.
        self._clean_start = clean_start
        self._proxies: dict[int, MqttSessionProxy] = {}
        self._throttled_connections: list[ConnectionPort] = []

    def adopt_claim(self, claim: RemoteClientClaim) -> None:
        """Hold the claim of the session to its client id, in the proxy at the cell of the id."""
        claim.hand_over(self._proxy_for(claim.cell))

    def on_claim_lost(self) -> None:
        """End the client: another connection has its client id."""
        connection = self.session.connection
        if connection is not None:
            connection.end(SESSION_TAKEN_OVER, TAKEN_OVER)

    # ---- requests of the session

    def publish(
        self, cell: i64, packet: Publish, is_command: bool, connection: ConnectionPort
    ) -> None:
        session = self.session
        if packet.qos > 0:
            session.inbound.expect_commit(packet)
        proxy = self._proxy_for(int(cell))
        if packet.qos == 2 and not is_command:
            self._cluster.forward_qos2(
                session,
                packet,
                partial(proxy.publish, packet, False, session.inbound.get_epoch()),
            )
        else:
            session.inbound.defer_receipt(packet)
            proxy.publish(packet, is_command, session.inbound.get_epoch())
        if proxy.is_full() and connection.throttle():
            self._throttled_connections.append(connection)

    def subscribe(
        self,
        topic_filter: bytes,
        options: SubscribeOptions,
        on_reply: Callable[[int, str], None],
    ) -> None:
        cells = self._cells_for_filter(topic_filter)
        combined = CombinedSuback(len(cells), options.qos, on_reply)
        for cell in cells:
            self._proxy_for(cell).subscribe(topic_filter, options, combined.add_answer)

    def restore_subscription(self, topic_filter: bytes, options: SubscribeOptions) -> None:
        """Restore a subscription after a restart; streams open when the client is back."""
        for cell in self._cells_for_filter(topic_filter):
            self._proxy_for(cell).restore_subscription(topic_filter, options)

    def unsubscribe(self, topic_filter: bytes) -> None:
        for cell in self._cells_for_filter(topic_filter):
            if cell in self._proxies:
                self._proxies[cell].unsubscribe(topic_filter)

    def on_attached(self) -> None:
        for proxy in self._proxies.values():
            proxy.on_attached()

    def on_detached(self) -> None:
        self._throttled_connections.clear()
        for proxy in self._proxies.values():
            proxy.on_detached()

    def on_session_ended(self) -> None:
        for proxy in self._proxies.values():
            proxy.end()
        self._proxies.clear()

    def on_writable(self) -> None:
        for proxy in self._proxies.values():
            proxy.set_reading(True)

    # ---- services for the proxies

    def dial(self, cell: int, proxy: MqttSessionProxy) -> None:
        self._cluster.node.dial(cell, PROXY_GREETING, proxy)

    def is_connected(self) -> bool:
        return self.session.connection is not None

    def answer_publish(
        self, packet: Publish, is_command: bool, epoch: int, reason: int, reason_string: str
    ) -> None:
        if packet.qos > 0:
            self.session.inbound.ack_deferred(packet, is_command, epoch, reason, reason_string)
        self.unthrottle_connections()

    def refuse_timed_out(self, packet: Publish, is_command: bool, epoch: int) -> None:
        """Refuse a publish whose answer did not arrive in time."""
        session = self.session
        connection = session.connection
        if session.version == V5 or not is_command:
            session.inbound.ack_deferred(
                packet, is_command, epoch, IMPLEMENTATION_SPECIFIC_ERROR, UNREACHABLE
            )
        elif connection is not None and session.inbound.get_epoch() == epoch:
            # MQTT 3.1.1 cannot refuse a settlement: without an answer the client repeats it.
            connection.end(IMPLEMENTATION_SPECIFIC_ERROR, UNREACHABLE)
        self.unthrottle_connections()

    def answer_deadline(self) -> float:
        """Return the time by which a request sent now must be answered."""
        return self.now() + self._cluster.node.answer_seconds

    def sweep_interval(self) -> float:
        return min(MAX_SWEEP_SECONDS, self._cluster.node.answer_seconds / 4)

    def unthrottle_connections(self) -> None:
        if self._throttled_connections and not any(
            proxy.is_full() for proxy in self._proxies.values()
        ):
            throttled, self._throttled_connections = self._throttled_connections, []
            for connection in throttled:
                connection.unthrottle()

    def now(self) -> float:
        return self._turn.now

    def begin_turn(self) -> None:
        """Begin a turn of this cell, because data of a stream is processed."""
        self._turn.begin()

    def call_soon(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    def warn(self, text: str) -> None:
        self._cluster.node.warn(text)

    def end_remote_session(self, cell: int) -> None:
        """End a remote session that has no open stream."""
        self._cluster.node.dial(cell, PROXY_GREETING, RemoteSessionEnder(self.session.client_id))

    def covers(self, topic_filter: bytes, topic: bytes) -> bool:
        """Return whether a delivery on this topic belongs to that subscription."""
        pattern = QUEUE_PREFIX + parse_queue_topic(topic_filter).queue.encode()
        return matches(pattern, QUEUE_PREFIX + parse_queue_topic(topic).queue.encode())

    # ---- routing

    def _cells_for_filter(self, topic_filter: bytes) -> list[int]:
        local, cells = self._cluster.cell_number, self._cluster.node.cells
        cell = cell_of_filter(topic_filter, cells)
        return [one for one in range(cells) if one != local] if cell == ALL_CELLS else [cell]

    def _proxy_for(self, cell: int) -> MqttSessionProxy:
        proxy = self._proxies.get(cell)
        if proxy is None:
            proxy = self._proxies[cell] = MqttSessionProxy(self, cell, self._clean_start)
        return proxy


class CombinedSuback:
    """Combines the SUBACKs of several cells: refused if one cell refuses."""

    def __init__(self, count: int, qos: int, on_reply: Callable[[int, str], None]) -> None:
        self._remaining = count
        self._reason = qos
        self._reason_string = ""
        self._on_reply = on_reply

    def add_answer(self, reason: int, reason_string: str) -> None:
        self._remaining -= 1
        if reason >= 0x80 and self._reason < 0x80:
            self._reason, self._reason_string = reason, reason_string
        if self._remaining == 0:
            self._on_reply(self._reason, self._reason_string)


class RemoteSessionEnder:
    """Ends a remote session: a CONNECT with clean start and no expiry leaves none behind."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id

    def connection_made(self, transport: StreamTransport) -> None:
        connect = Connect(self._client_id, V5, True, 0)
        transport.write(encode(connect, V5) + encode(Disconnect(), V5))

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


def set_message_id(packet: Publish, message_id: str) -> None:
    """Add a message id, so that a queue stores a resent publish only once."""
    options = PublishOptions()
    read_publish_options(packet.raw_properties, options)
    if options.id_begin < 0 and packet.topic.startswith(QUEUE_PREFIX):
        packet.raw_properties += encode_user_property(b"message-id", message_id.encode())

"""The namespace `$SYS/broker/...`: the usual counters of a broker, as retained messages.

The names are those that other brokers use, so existing dashboards find them. Rates are averages
over one, five and fifteen minutes, weighted exponentially like the load of a Unix machine.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from mypy_extensions import mypyc_attr

from sluice.broker.broker import Broker
from sluice.clock import Deadline
from sluice.wire.packets import Publish

_LOAD_WINDOWS = (("1min", 60.0), ("5min", 300.0), ("15min", 900.0))


@mypyc_attr(allow_interpreted_subclasses=True)
class CounterExchange:
    """Shares the counters of this process with other processes of the node; here there are none."""

    def exchange(self, values: dict[str, int]) -> list[dict[str, int]]:
        """Share the counters of this process and return those of the others, if known."""
        return []


class SysTopics(Deadline):
    """Publish changed values each `limits.sys_interval` seconds.

    With `cells`, the values are the sums over these cells, and each of them has the topics: a node
    of a cluster reports about itself. With `others`, those of other processes are added.
    """

    def __init__(
        self,
        broker: Broker,
        version: str,
        cells: Callable[[], list[Broker]] | None = None,
        others: CounterExchange | None = None,
    ) -> None:
        self._broker = broker
        self._cells = cells
        self._others = CounterExchange() if others is None else others
        self._known_brokers: list[Broker] = []  # brokers that have the topics already
        self._version = version
        self._interval: float = broker.limits.sys_interval
        self._last_values: dict[str, str] = {}
        self._last_counts: dict[str, float] = {}
        self._loads: dict[str, float] = {}

    def start(self) -> None:
        if self._interval:
            self._publish_changes(0.0)
            self._broker.wake_at(self._broker.turn.now + self._interval, self)

    def fire(self, now: float) -> float:
        for broker in self._brokers():
            broker.router.retained.delete_expired(now)
        self._publish_changes(self._interval)
        return now + self._interval

    def _brokers(self) -> list[Broker]:
        return [self._broker] if self._cells is None else self._cells()

    def collect_values(self) -> dict[str, int]:
        """Return all counters by their names below `$SYS/broker/`."""
        total: dict[str, int] = {}
        for broker in self._brokers():
            for name, value in self._collect_broker_values(broker).items():
                total[name] = total.get(name, 0) + value
        return total

    def _collect_broker_values(self, broker: Broker) -> dict[str, int]:
        counters = broker.counters
        sessions = len(broker.registry.sessions)
        if self._cells is not None:  # proxies are counted in their home cell
            sessions = sum(1 for one in broker.registry.sessions.values() if not one.is_proxy)
        connected = int(counters.clients_connected)
        values = {
            "clients/connected": connected,
            "clients/disconnected": sessions - connected,
            "clients/total": sessions,
            "clients/maximum": int(counters.clients_maximum),
            "clients/expired": int(counters.sessions_expired),
            "connections/open": int(counters.connections_open),
            "connections/total": int(counters.connections_opened),
            "connections/refused": int(counters.connections_refused),
            "messages/received": int(counters.packets_received),
            "messages/sent": int(counters.packets_sent),
            "publish/messages/received": int(counters.publishes_received),
            "publish/messages/sent": int(counters.publishes_sent),
            "publish/messages/dropped": int(counters.publishes_dropped),
            "publish/bytes/received": int(counters.publish_bytes_received),
            "publish/bytes/sent": int(counters.publish_bytes_sent),
            "bytes/received": int(counters.bytes_received),
            "bytes/sent": int(counters.bytes_sent),
            "subscriptions/count": broker.router.subscriptions.count,
            "shared_subscriptions/count": broker.router.subscriptions.shared_count,
            "retained messages/count": broker.router.retained.count,
            "retained messages/bytes": broker.router.retained.payload_bytes,
            "protocol violations/count": int(counters.protocol_violations),
        }
        for handler in broker.router.namespaces.handlers:
            values.update(handler.collect_counters())
        return values

    def _publish_changes(self, elapsed: float) -> None:
        brokers = self._brokers()
        if not brokers:
            self._known_brokers = []
            return  # a node without a cell has no subscribers
        values = self.collect_values()
        for part in self._others.exchange(values):
            values = {name: value + part.get(name, 0) for name, value in values.items()}
        uptime = int(self._broker.turn.now - self._broker.started_at)
        texts = {name: str(value) for name, value in values.items()}
        texts["version"] = f"sluice {self._version}"
        texts["uptime"] = f"{uptime} seconds"
        if elapsed:
            texts.update(self._update_load(values, elapsed))
        new_brokers = [broker for broker in brokers if broker not in self._known_brokers]
        self._known_brokers = brokers
        for name, value in texts.items():
            changed = self._last_values.get(name) != value
            self._last_values[name] = value
            topic = f"$SYS/broker/{name}".encode()
            for broker in brokers if changed else new_brokers:
                broker.router.publish(Publish(topic, value.encode(), 0, True), None)

    def _update_load(self, values: dict[str, int], elapsed: float) -> dict[str, str]:
        """Return per-minute averages of the counts since the last call."""
        texts: dict[str, str] = {}
        for name, counter in (
            ("messages/received", "messages/received"),
            ("messages/sent", "messages/sent"),
            ("publish/received", "publish/messages/received"),
            ("publish/sent", "publish/messages/sent"),
            ("publish/dropped", "publish/messages/dropped"),
            ("bytes/received", "bytes/received"),
            ("bytes/sent", "bytes/sent"),
            ("connections", "connections/total"),
        ):
            count = float(values[counter])
            # A cell that moved to another node takes its counts with it.
            rate = max(0.0, count - self._last_counts.get(name, 0.0)) * 60.0 / elapsed
            self._last_counts[name] = count
            for label, seconds in _LOAD_WINDOWS:
                key = f"load/{name}/{label}"
                weight = exp(-elapsed / seconds)
                self._loads[key] = rate + weight * (self._loads.get(key, rate) - rate)
                texts[key] = f"{self._loads[key]:.2f}"
        return texts

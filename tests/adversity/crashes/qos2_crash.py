"""Kill a real `sluice serve` in the middle of QoS 2 handshakes and count how often messages arrive.

    scripts/crash-qos2 --rounds 500 [--seed 1] [--store embedded|redis|cluster]

The clients are raw sockets with the rules of MQTT and nothing else, a publisher and a subscriber
for each of MQTT 3.1.1 and 5.0, all with persistent sessions. A publisher resends incomplete
messages: PUBLISH with DUP, or PUBREL. A subscriber accepts a message when PUBLISH arrives and
remembers the packet id until PUBREL (method A of section 4.3.3). In each round the broker is killed
between 0 and 5 ms after one step of a handshake, chosen at random; then it is started again and the
clients continue. A fault is

* a message that a subscriber accepts twice, or never,
* a packet id that is used for another message while the subscriber holds it open,
* messages of one publisher in the wrong order,
* a lost session.

With `--store cluster` there are two nodes and one Redis. One of the nodes, or both, are killed, and
the clients reconnect to either node.
"""

from __future__ import annotations

import argparse
import random
import selectors
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from tests.cluster.real_nodes.node_processes import Nodes
from tests.support.broker_process import Broker
from tests.support.redis_process import RedisProcess

STEPS = (
    "publisher: PUBLISH sent",
    "publisher: PUBREC received",
    "publisher: PUBREL sent",
    "publisher: PUBCOMP received",
    "subscriber: PUBLISH received",
    "subscriber: PUBREC sent",
    "subscriber: PUBREL received",
    "subscriber: PUBCOMP sent",
)
TOPIC = b"crash/qos2"
WINDOW = 3  # messages in flight of one publisher
KILL_SECONDS = 0.005  # maximum time after the step
REST_SECONDS = 0.02  # for data that left the broker before it was killed
STEP_SECONDS = 20.0  # for a step to happen
TIMEOUT_SECONDS = 60.0  # for a connection, and for the end of all handshakes
REDIS_CONFIG = """
[redis]
lease = "1s"
renew = "100ms"
poll = "50ms"
"""
QUIET = ("--http", "off", "--grpc", "off", "--ws", "off")  # unused listeners take long to start

Step = Callable[[str], None]  # called for each step of a handshake

CONNACK, PUBLISH, PUBREC, PUBREL, PUBCOMP, SUBACK = 2, 3, 5, 6, 7, 9


class Report:
    """The faults, and the amount of work done."""

    def __init__(self) -> None:
        self.round = 0
        self.faults: list[str] = []
        self.kills: Counter[str] = Counter()
        self.sent: list[bytes] = []  # every message that a publisher has begun to send

    def sum(self) -> str:
        return f"{self.round} rounds, {len(self.sent)} messages, {len(self.faults)} faults"

    def fault(self, text: str) -> None:
        self.faults.append(f"round {self.round}: {text}")


class ConnectionLost(Exception):
    """The connection has ended."""


class Client:
    """One MQTT client on a raw socket. It outlives its connections, as its session does."""

    def __init__(self, name: str, version: int, report: Report, step: Step, role: str) -> None:
        self.name = name
        self.report = report
        self._version = version
        self._step = step
        self._role = role
        self._socket: socket.socket | None = None
        self._data = b""
        self._known = False  # the broker has a session of this name

    def connect(self, address: tuple[str, int]) -> None:
        """Connect and wait for CONNACK.

        Raises ConnectionLost if the broker does not accept it (yet).
        """
        self.close()
        try:
            self._socket = socket.create_connection(address, 5.0)
        except OSError as fault:
            raise ConnectionLost from fault
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        properties = b"\x05\x11" + (86_400).to_bytes(4, "big") if self._version == 5 else b""
        head = _text(b"MQTT") + bytes([self._version, 0, 0, 0])
        self._write(0x10, head + properties + _text(self.name.encode()))
        until = time.monotonic() + 5.0
        packets: list[tuple[int, bytes]] = []
        while not packets:
            if time.monotonic() > until:
                raise ConnectionLost
            packets = self._read(0.5)
        kind, body = packets[0]
        if kind >> 4 != CONNACK or body[1] != 0:
            raise ConnectionLost
        if self._known and not body[0] & 1:
            self.report.fault(f"{self.name}: the session is lost")
        self._known = True
        self.resume()
        self._handle_all(packets[1:])

    def resume(self) -> None:
        """Resend what MQTT requires at the start of a connection."""

    def handle(self, head: int, body: bytes) -> None:
        """Handle a packet."""

    def poll(self) -> None:
        """Handle all packets that have arrived."""
        self._handle_all(self._read(0.0))

    def _handle_all(self, packets: list[tuple[int, bytes]]) -> None:
        for head, body in packets:
            self.handle(head, body)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send_packet(self, kind: int, packet_id: int) -> None:
        self._write(kind << 4 | (2 if kind == PUBREL else 0), packet_id.to_bytes(2, "big"))

    def reached_step(self, step: str) -> None:
        self._step(f"{self._role}: {step}")

    def properties_end(self, body: bytes, at: int) -> int:
        """Return the end of the properties that begin at `at`."""
        return at + 1 + body[at] if self._version == 5 else at

    def no_properties(self) -> bytes:
        return b"\x00" if self._version == 5 else b""

    def _write(self, head: int, body: bytes) -> None:
        assert len(body) < 128 and self._socket is not None
        try:
            self._socket.sendall(bytes([head, len(body)]) + body)
        except OSError as fault:
            raise ConnectionLost from fault

    def _read(self, seconds: float) -> list[tuple[int, bytes]]:
        """Return the packets that have arrived; wait up to `seconds` for the first bytes."""
        if self._socket is None:
            raise ConnectionLost
        self._socket.settimeout(seconds or 0.000_001)
        try:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionLost
            self._data += data
        except TimeoutError:
            pass
        except OSError as fault:
            raise ConnectionLost from fault
        self._socket.settimeout(5.0)
        packets: list[tuple[int, bytes]] = []
        while len(self._data) >= 2 and len(self._data) >= 2 + self._data[1]:
            assert self._data[1] < 128
            end = 2 + self._data[1]
            packets.append((self._data[0], self._data[2:end]))
            self._data = self._data[end:]
        return packets


class Publisher(Client):
    def __init__(self, name: str, version: int, report: Report, step: Step) -> None:
        super().__init__(name, version, report, step, "publisher")
        self._count = 0
        self._last_id = 0
        self.unfinished: dict[int, bytes] = {}  # by packet id, in the order of the first PUBLISH
        self._released: set[int] = set()  # packet ids whose PUBREC has arrived

    def publish(self) -> None:
        """Begin a new message."""
        self._last_id = self._last_id % 20 + 1  # reuse ids soon
        while self._last_id in self.unfinished:
            self._last_id = self._last_id % 20 + 1
        self._count += 1
        payload = b"%s:%d" % (self.name.encode(), self._count)
        self.unfinished[self._last_id] = payload
        self.report.sent.append(payload)
        self._send(self._last_id, False)
        self.reached_step("PUBLISH sent")

    def _send(self, packet_id: int, again: bool) -> None:
        head = _text(TOPIC) + packet_id.to_bytes(2, "big") + self.no_properties()
        self._write(0x3C if again else 0x34, head + self.unfinished[packet_id])

    def resume(self) -> None:
        for packet_id in self.unfinished:
            if packet_id in self._released:
                self.send_packet(PUBREL, packet_id)
            else:
                self._send(packet_id, True)

    def handle(self, head: int, body: bytes) -> None:
        packet_id = int.from_bytes(body[:2], "big")
        if head >> 4 == PUBREC and packet_id in self.unfinished:
            if len(body) > 2 and body[2] >= 0x80:
                raise AssertionError(f"the broker refuses a message with {body[2]:#x}")
            self._released.add(packet_id)
            self.reached_step("PUBREC received")
            self.send_packet(PUBREL, packet_id)
            self.reached_step("PUBREL sent")
        elif head >> 4 == PUBCOMP and packet_id in self._released:
            self._released.discard(packet_id)
            del self.unfinished[packet_id]
            self.reached_step("PUBCOMP received")


class Subscriber(Client):
    def __init__(self, name: str, version: int, report: Report, step: Step) -> None:
        super().__init__(name, version, report, step, "subscriber")
        self.subscribed = False
        self.unfinished: dict[int, bytes] = {}
        self.handed_over: Counter[bytes] = Counter()
        self._last: dict[bytes, int] = {}  # by publisher, the number of its last message

    def subscribe(self) -> None:
        self._write(0x82, b"\x00\x01" + self.no_properties() + _text(TOPIC) + b"\x02")

    def handle(self, head: int, body: bytes) -> None:
        kind = head >> 4
        if kind == SUBACK:
            self.subscribed = True
        elif kind == PUBLISH:
            at = 2 + len(TOPIC)
            packet_id = int.from_bytes(body[at : at + 2], "big")
            self._take(packet_id, body[self.properties_end(body, at + 2) :])
            self.reached_step("PUBLISH received")
            self.send_packet(PUBREC, packet_id)
            self.reached_step("PUBREC sent")
        elif kind == PUBREL:
            packet_id = int.from_bytes(body[:2], "big")
            self.unfinished.pop(packet_id, None)
            self.reached_step("PUBREL received")
            self.send_packet(PUBCOMP, packet_id)
            self.reached_step("PUBCOMP sent")

    def _take(self, packet_id: int, payload: bytes) -> None:
        known = self.unfinished.get(packet_id)
        if known is not None:  # [MQTT-4.3.3-10]: not accepted again
            if known != payload:
                self.report.fault(
                    f"{self.name}: packet id {packet_id} is open for {known!r} and used for "
                    f"{payload!r}"
                )
            return
        self.unfinished[packet_id] = payload
        count = self.handed_over[payload] = self.handed_over[payload] + 1
        if count > 1:
            self.report.fault(f"{self.name}: {payload!r} was accepted {count} times")
            return
        publisher, _, number = payload.partition(b":")
        if int(number) < self._last.get(publisher, 0):
            self.report.fault(f"{self.name}: {payload!r} came after number {self._last[publisher]}")
        self._last[publisher] = int(number)


class Deployment(Protocol):
    """The processes that are killed."""

    def addresses(self) -> list[tuple[str, int]]: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...


class OneBroker:
    def __init__(self, folder: Path, redis: str = "") -> None:
        self._folder = folder
        self._redis = redis
        self._broker: Broker | None = None
        self.start()

    def addresses(self) -> list[tuple[str, int]]:
        assert self._broker is not None
        return [(self._broker.mqtt.host, self._broker.mqtt.port)]

    def kill(self) -> None:
        if self._broker is not None:
            self._broker.kill()
            self._broker = None

    def start(self) -> None:
        flags = ["--store", self._redis, *QUIET] if self._redis else list(QUIET)
        self._broker = Broker(self._folder, REDIS_CONFIG if self._redis else "", flags, {})


class TwoNodes:
    """Kills random nodes: mostly one of them, sometimes both."""

    NAMES = ("one", "two")

    def __init__(self, folder: Path, redis: str, draw: random.Random) -> None:
        self._draw = draw
        self._nodes = Nodes(folder, redis, "")
        self._down: list[str] = list(self.NAMES)
        self.start()

    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", self._nodes.port(name)) for name in self._nodes.by_name]

    def kill(self) -> None:
        alive = list(self._nodes.by_name)
        lot = self._draw.random()
        self._down = alive if lot < 0.2 else [self._draw.choice(alive)]
        for name in self._down:
            self._nodes.kill(name)

    def start(self) -> None:
        for name in self._down:
            self._nodes.start(name)
        self._down = []

    def kill_all(self) -> None:
        for name in list(self._nodes.by_name):
            self._nodes.kill(name)


class Trial:
    def __init__(self, deployment: Deployment, draw: random.Random) -> None:
        self.report = Report()
        self._deployment = deployment
        self._draw = draw
        self._trigger = ""
        self._kill_at = 0.0
        make_publisher, make_subscriber = Publisher, Subscriber
        self._publishers = [make_publisher(f"p{v}", v, self.report, self._on_step) for v in (4, 5)]
        self._subscribers = [
            make_subscriber(f"s{v}", v, self.report, self._on_step) for v in (4, 5)
        ]
        self._clients: list[Client] = [*self._subscribers, *self._publishers]

    def run(self, rounds: int, say: Callable[[str], None]) -> Report:
        self._connect_all()
        for subscriber in self._subscribers:
            subscriber.subscribe()
        self._turn_until(lambda: all(one.subscribed for one in self._subscribers), TIMEOUT_SECONDS)
        for number in range(rounds):
            self.report.round = number + 1
            self._round()
            if (number + 1) % 20 == 0:
                say(self.report.sum())
        self._finish()
        for client in self._clients:
            client.close()
        return self.report

    def _round(self) -> None:
        """Send messages, kill the broker after a step, restart it, reconnect the clients."""
        for _ in range(self._draw.randint(0, 4)):
            self._fill()
            self._turn(time.monotonic() + 0.01)
        self._trigger = self._draw.choice(STEPS)
        self._kill_at = 0.0
        self.report.kills[self._trigger] += 1
        until = time.monotonic() + STEP_SECONDS
        while not self._kill_at or time.monotonic() < self._kill_at:
            assert time.monotonic() < until, f"this did not happen: {self._trigger}"
            if not self._kill_at:
                self._fill()
            self._turn(self._kill_at or time.monotonic() + 0.01)
        self._trigger = ""
        self._deployment.kill()
        self._read_rest()
        self._deployment.start()
        self._connect_all()

    def _fill(self) -> None:
        for publisher in self._publishers:
            try:
                while len(publisher.unfinished) < WINDOW:
                    publisher.publish()
            except ConnectionLost:
                self._connect(publisher)

    def _on_step(self, step: str) -> None:
        if step == self._trigger and not self._kill_at:
            self._kill_at = time.monotonic() + self._draw.random() * KILL_SECONDS

    def _turn(self, until: float) -> None:
        """Handle packets until a point in time."""
        while True:
            left = until - time.monotonic()
            with selectors.DefaultSelector() as selector:
                for client in self._clients:
                    selector.register(client, selectors.EVENT_READ, client)
                ready = [key.data for key, _ in selector.select(max(0.0, left))]
            for client in ready:
                try:
                    client.poll()
                except ConnectionLost:
                    self._connect(client)
            if time.monotonic() >= until:
                return

    def _read_rest(self) -> None:
        """Let the clients read what left the broker before the kill. Their answers are lost."""
        for client in self._clients:
            until = time.monotonic() + REST_SECONDS  # a connection to the other node stays open
            try:
                while time.monotonic() < until:
                    client.poll()
            except ConnectionLost:
                client.close()

    def _connect_all(self) -> None:
        order = list(self._clients)
        self._draw.shuffle(order)
        for client in order:
            self._connect(client)

    def _connect(self, client: Client) -> None:
        until = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                client.connect(self._draw.choice(self._deployment.addresses()))
                return
            except ConnectionLost:
                assert time.monotonic() < until, f"{client.name} cannot connect"
                time.sleep(0.02)

    def _turn_until(self, ready: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not ready() and time.monotonic() < until:
            self._turn(time.monotonic() + 0.02)
        return ready()

    def _finish(self) -> None:
        """Wait until every handshake is complete, then count."""
        self._turn_until(self._is_done, TIMEOUT_SECONDS)
        self._turn(time.monotonic() + 0.5)  # duplicates may arrive last
        for publisher in self._publishers:
            for payload in publisher.unfinished.values():
                self.report.fault(f"{publisher.name}: {payload!r} was never completed")
        for subscriber in self._subscribers:
            for payload in self.report.sent:
                if not subscriber.handed_over[payload]:
                    self.report.fault(f"{subscriber.name}: {payload!r} was never accepted")
            for packet_id in subscriber.unfinished:
                self.report.fault(f"{subscriber.name}: packet id {packet_id} was never released")

    def _is_done(self) -> bool:
        if any(one.unfinished for one in self._publishers) or any(
            one.unfinished for one in self._subscribers
        ):
            return False
        count = len(self.report.sent)
        return all(len(one.handed_over) >= count for one in self._subscribers)


def crash(
    folder: Path, rounds: int, seed: int, store: str, say: Callable[[str], None] = lambda text: None
) -> Report:
    draw = random.Random(seed)
    with ExitStack() as stack:
        redis = ""
        if store != "embedded":
            process = RedisProcess(folder / "redis").start()
            stack.callback(process.stop)
            redis = process.url
        deployment: OneBroker | TwoNodes
        if store == "cluster":
            deployment = TwoNodes(folder, redis, draw)
            stack.callback(deployment.kill_all)
        else:
            deployment = OneBroker(folder, redis)
            stack.callback(deployment.kill)
        return Trial(deployment, draw).run(rounds, say)


def _print(text: str) -> None:
    print(text, flush=True)


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/crash-qos2", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--store", choices=("embedded", "redis", "cluster"), default="embedded")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="sluice-crash-qos2-") as folder:
        report = crash(Path(folder), arguments.rounds, arguments.seed, arguments.store, _print)
    for step, count in sorted(report.kills.items()):
        print(f"killed {count} times after: {step}")
    print(report.sum())
    for fault in report.faults:
        print(f"BROKEN: {fault}", file=sys.stderr)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""The rate at which a broker takes values for exclusive queues, beside that of one hot work queue.

    python bench/owners.py                              100,000 owners, 100 keys each, 100 B; takes minutes
    python bench/owners.py --owners 10000 --rounds 3

Two real brokers (`sluice` on the PATH, or $SLUICE) and real sockets: four publishers, QoS 1, 500 messages of each on
the way. First every key of every owner is written once. Then it is stretches in turn: values for any key of any owner
at the one broker, publishes to a work queue at the other, which has nothing else. What goes out is made before it is
counted. Told are the messages that were acknowledged per second, and what each took of the broker's CPU, with snapshots
and whatever else fell due meanwhile. `bench/compacted.py` feeds the same bytes without sockets, in small frames.
Only 127.0.0.1 is ever a target.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import shlex
import socket
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, repeat
from pathlib import Path

PUBLISHERS = 4
BLOCK = 250  # messages that a publisher sends at once; two such blocks are on the way
ACK_BYTES = 4
TICK = os.sysconf("SC_CLK_TCK")
CONFIG = """
[[queues.templates]]
match = "bench/#"
config = { limits = { max_queue_depth = 100000000 } }
"""


def packet(topic: bytes, number: int, payload: bytes) -> bytes:
    body = struct.pack(">H", len(topic)) + topic + struct.pack(">HB", number, 0) + payload
    size = len(body)
    head = bytes([0x32, size]) if size < 128 else bytes([0x32, size & 127 | 128, size >> 7])
    return head + body


def blocks(topics: Iterator[bytes], payload: bytes) -> Iterator[bytes]:
    """Of a publisher: packet ids of one block are free again when the one behind it is on the way."""
    half = 0
    while True:
        taken = list(islice(topics, BLOCK))
        if len(taken) < BLOCK:
            return
        first = 1 + half * BLOCK
        yield b"".join(packet(topic, first + nth, payload) for nth, topic in enumerate(taken))
        half = 1 - half


class Publisher:
    def __init__(self, port: int, name: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        client = name.encode()
        connect = b"\x00\x04MQTT\x05\x02\x00\x3c\x00" + struct.pack(">H", len(client)) + client
        self.socket.sendall(bytes([0x10, len(connect)]) + connect)
        answer = self.socket.recv(4096)
        assert answer[0] == 0x20 and answer[3] == 0, answer
        self.socket.setblocking(False)
        self.blocks: Iterator[bytes] = iter(())
        self.rest = memoryview(b"")
        self.sent = 0
        self.acked = 0
        self._unread = b""

    def send(self) -> bool:
        """As much as may go out; whether anything is left to send or to hear of."""
        while True:
            if self.rest:
                try:
                    self.rest = self.rest[self.socket.send(self.rest) :]
                except BlockingIOError:
                    return True
                continue
            if self.sent - self.acked > BLOCK:
                return True
            block = next(self.blocks, b"")
            if not block:
                return self.sent > self.acked
            self.sent += BLOCK
            self.rest = memoryview(block)

    def hear(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise SystemExit("the broker hung up")
        self._unread += data
        whole = len(self._unread) // ACK_BYTES
        for at in (0, (whole - 1) * ACK_BYTES):
            if whole and self._unread[at : at + 2] != b"\x40\x02":
                raise SystemExit(f"not a plain PUBACK: {self._unread[at : at + 80]!r}")
        self._unread = self._unread[whole * ACK_BYTES :]
        self.acked += whole


def publish(publishers: list[Publisher]) -> tuple[int, float]:
    """Until every block is acknowledged: how many messages that were, and how long it took."""
    before = sum(one.acked for one in publishers)
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for one in publishers:
            selector.register(one.socket, selectors.EVENT_READ, one)
        open_ones = set(publishers)
        while open_ones:
            for one in list(open_ones):
                wants = one.send()
                if not wants:
                    open_ones.discard(one)
                    selector.unregister(one.socket)
                else:
                    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.rest else 0)
                    selector.modify(one.socket, mask, one)
            for key, mask in selector.select(1.0) if open_ones else []:
                if mask & selectors.EVENT_READ:
                    key.data.hear()
    return sum(one.acked for one in publishers) - before, time.perf_counter() - began


class Broker:
    """One that runs while this is entered, and its publishers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process: subprocess.Popen[str] | None = None
        self.publishers: list[Publisher] = []

    def __enter__(self) -> Broker:
        self._folder.mkdir()
        config = self._folder / "bench.toml"
        config.write_text(CONFIG)
        process = subprocess.Popen(
            [
                *shlex.split(os.environ.get("SLUICE", "sluice")),
                *("serve", "--config", str(config), "--data", str(self._folder / "data")),
                *("--mqtt", "127.0.0.1:0", "--http", "off", "--grpc", "off", "--log-level", "warning"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = process
        assert process.stdout is not None
        ready = process.stdout.readline()
        if "ready" not in ready:
            raise SystemExit("the broker did not start")
        facts = dict(fact.split("=", 1) for fact in ready.split() if "=" in fact)
        port = int(facts["mqtt"].rpartition(":")[2])
        self.publishers = [Publisher(port, f"publisher-{nth}") for nth in range(PUBLISHERS)]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def cpu(self) -> float:
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--owners", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of each stretch")
    told = parser.parse_args()
    draw = random.Random(2)
    payload = draw.randbytes(told.size)

    def every_key(nth: int) -> Iterator[bytes]:
        for key in range(told.keys):
            for number in range(nth, told.owners, PUBLISHERS):
                yield b"$ECQ/w/owner-%d/key/%d" % (number, key)

    def any_key(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield b"$ECQ/w/owner-%d/key/%d" % (draw.randrange(told.owners), draw.randrange(told.keys))

    def stretch(broker: Broker, topics: Callable[[], Iterator[bytes]]) -> tuple[float, float]:
        """Messages per second, and the broker's CPU time of each."""
        for one in broker.publishers:
            one.blocks = iter(list(blocks(topics(), payload)))
        before = broker.cpu()
        count, taken = publish(broker.publishers)
        return count / taken, (broker.cpu() - before) / count * 1e6

    with tempfile.TemporaryDirectory(prefix="sluice-owners-") as folder, ExitStack() as at_end:
        ours, theirs = (at_end.enter_context(Broker(f"{folder}/{name}")) for name in ("owners", "queue"))
        for nth, one in enumerate(ours.publishers):
            one.blocks = blocks(every_key(nth), payload)
        _, taken = publish(ours.publishers)
        print(
            f"{told.owners:,} owners x {told.keys} keys, {told.size} B: filled in {taken:.0f} s", flush=True
        )
        each = told.messages // PUBLISHERS
        values: list[tuple[float, float]] = []
        messages: list[tuple[float, float]] = []
        for turn in range(1 + told.rounds):
            mine = stretch(ours, lambda: any_key(each))
            other = stretch(theirs, lambda: repeat(b"$queue/bench/0", each))
            if turn:  # the first makes the queue, and warms up
                values.append(mine)
                messages.append(other)
                print(
                    f"  values {mine[0]:,.0f}/s, {mine[1]:.2f} us   messages {other[0]:,.0f}/s, {other[1]:.2f} us"
                )
        for name, found in (
            ("overwrite, any key of any owner", values),
            ("enqueue, one work queue", messages),
        ):
            speed = statistics.median(one[0] for one in found)
            cost = statistics.median(one[1] for one in found)
            print(f"{name:40s} {speed:9,.0f} messages/s, {cost:.2f} us CPU each")
        for nth, name in enumerate(("by the clock", "by CPU time")):
            ratios = sorted(
                (mine[nth] / other[nth]) ** (1 - 2 * nth) for mine, other in zip(values, messages)
            )
            print(
                f"{'the owners against it, ' + name:40s} {statistics.median(ratios):9.2f} x "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()

"""Measure the write rate of exclusive queues against that of one hot work queue.

    python bench/owners.py             100,000 owners, 100 keys each, 100 B; takes minutes
    python bench/owners.py --owners 10000 --rounds 30 --turns 3

Two real brokers (`sluice` on the PATH, or $SLUICE) and real sockets: four publishers, QoS 1, 500
messages of each in flight. First every key of every owner is written once, and then overwritten
`--turns` times on average, so that garbage is produced and compacted at a steady rate. Then
stretches alternate: values for any key of any owner at one broker, publishes to a work queue at the
other, without and with partition keys. Packets are built before the measurement. Prints
acknowledged messages per second, and the broker's CPU time of each: over all stretches together,
because compaction runs in some of them and not in others. `bench/compacted.py` measures without
sockets, in small frames. The only target is 127.0.0.1.
"""

from __future__ import annotations

import argparse
import random
import selectors
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

from harness import start_broker

from sluice.bench.procfs import cpu_of

PUBLISHERS = 4
BLOCK = 250  # messages that a publisher sends at once; two such blocks are in flight
ACK_BYTES = 4
Topics = Callable[[], Iterator[tuple[bytes, bytes]]]  # and keys, for queues
CONFIG = """
[[queues.templates]]
match = "bench/#"
config = { limits = { max_queue_depth = 100000000 } }
"""


def packet(topic: bytes, number: int, key: bytes, payload: bytes) -> bytes:
    props = b"\x26\x00\x03key" + struct.pack(">H", len(key)) + key if key else b""
    body = (
        struct.pack(">H", len(topic))
        + topic
        + struct.pack(">HB", number, len(props))
        + props
        + payload
    )
    size = len(body)
    head = bytes([0x32, size]) if size < 128 else bytes([0x32, size & 127 | 128, size >> 7])
    return head + body


def blocks(topics: Iterator[tuple[bytes, bytes]], payload: bytes) -> Iterator[bytes]:
    """The blocks of a publisher: packet ids of a block are free again when the next one is in
    flight.
    """
    half = 0
    while True:
        taken = list(islice(topics, BLOCK))
        if len(taken) < BLOCK:
            return
        first = 1 + half * BLOCK
        yield b"".join(
            packet(topic, first + nth, key, payload) for nth, (topic, key) in enumerate(taken)
        )
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
        """Send as much as allowed; return whether packets or acknowledgements are outstanding."""
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

    def receive(self) -> None:
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
    """Run until every block is acknowledged; return the number of messages and the duration."""
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
                    key.data.receive()
    return sum(one.acked for one in publishers) - before, time.perf_counter() - began


class Broker:
    """A broker that runs while the context is entered, and its publishers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process: subprocess.Popen[str] | None = None
        self.publishers: list[Publisher] = []

    def __enter__(self) -> Broker:
        self._folder.mkdir()
        self._process, facts = start_broker(str(self._folder), config=CONFIG)
        port = int(facts["mqtt"].rpartition(":")[2])
        self.publishers = [Publisher(port, f"publisher-{nth}") for nth in range(PUBLISHERS)]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def disk(self) -> int:
        return sum(file.stat().st_size for file in self._folder.rglob("*.log"))

    def cpu(self) -> float:
        assert self._process is not None
        return cpu_of(self._process.pid)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--owners", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--turns", type=float, default=2.0, help="how often a key is overwritten before it counts"
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="of each stretch")
    args = parser.parse_args()
    draw = random.Random(2)
    payload = draw.randbytes(args.size)
    each = args.messages // PUBLISHERS

    def every_key(nth: int) -> Iterator[tuple[bytes, bytes]]:
        for key in range(args.keys):
            for number in range(nth, args.owners, PUBLISHERS):
                yield b"$ECQ/w/owner-%d/key/%d" % (number, key), b""

    def any_key() -> Iterator[tuple[bytes, bytes]]:
        for _ in range(each):
            yield (
                b"$ECQ/w/owner-%d/key/%d"
                % (draw.randrange(args.owners), draw.randrange(args.keys)),
                b"",
            )

    def one_queue() -> Iterator[tuple[bytes, bytes]]:
        return repeat((b"$queue/bench/plain", b""), each)

    def by_key() -> Iterator[tuple[bytes, bytes]]:
        for _ in range(each):
            yield b"$queue/bench/keyed", b"owner-%d" % draw.randrange(args.owners)

    def stretch(broker: Broker, topics: Topics) -> tuple[float, float]:
        """Return microseconds per message, of wall time and of the broker's CPU."""
        for one in broker.publishers:
            one.blocks = iter(list(blocks(topics(), payload)))
        before = broker.cpu()
        count, taken = publish(broker.publishers)
        return taken / count * 1e6, (broker.cpu() - before) / count * 1e6

    with tempfile.TemporaryDirectory(prefix="sluice-owners-") as folder, ExitStack() as at_end:
        ours, theirs = (
            at_end.enter_context(Broker(f"{folder}/{name}")) for name in ("owners", "queue")
        )
        for nth, one in enumerate(ours.publishers):
            one.blocks = blocks(every_key(nth), payload)
        _, taken = publish(ours.publishers)
        print(
            f"{args.owners:,} owners x {args.keys} keys, {args.size} B: filled in {taken:.0f} s",
            flush=True,
        )
        filled = ours.disk()
        kinds: list[tuple[str, Broker, Topics]] = [
            ("overwrite, any key of any owner", ours, any_key),
            ("enqueue, one work queue", theirs, one_queue),
            ("the same with a key, one of each owner", theirs, by_key),
        ]
        before = 0
        while before < args.turns * args.owners * args.keys:
            stretch(ours, any_key)
            before += args.messages
        size = ours.disk()
        found: list[list[tuple[float, float]]] = []
        for _ in range(1 + args.rounds):
            found.append([stretch(broker, topics) for _, broker, topics in kinds])
            print(
                "  "
                + "   ".join(f"{1e6 / taken:,.0f}/s, {cost:.2f} us" for taken, cost in found[-1]),
                flush=True,
            )
        del found[0]  # it created the queues, and warmed up
        means = [
            [statistics.mean(turn[nth][one] for turn in found) for one in (0, 1)]
            for nth in range(3)
        ]
        for nth, (name, _, _) in enumerate(kinds):
            taken, cost = means[nth]
            line = f"{name:40s} {1e6 / taken:9,.0f} messages/s, {cost:.2f} us CPU each"
            if nth:
                ratios = sorted(turn[nth][0] / turn[0][0] for turn in found)
                line += f": the owners {taken / means[0][0]:.2f} x by the clock"
                line += f" (stretches {ratios[0]:.2f} to"
                line += f" {ratios[-1]:.2f}), {cost / means[0][1]:.2f} x by CPU time"
            print(line)
        sizes = " and ".join(f"{one / filled:.2f}" for one in (size, ours.disk()))
        print(
            f"the disk holds {sizes} times what it held when each key was written once,"
            " before and after"
        )


if __name__ == "__main__":
    main()

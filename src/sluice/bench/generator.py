"""A generator process: opens its share of the connections, sends, counts, and answers commands.

Commands are lines of JSON on stdin, replies are lines on stdout. The process ends at the end of
stdin, so that it never outlives its parent.

    workload            ->  {"ready": true}, when every connection is open
    begin, with times   ->  (sends, and counts messages within the times)
    progress            ->  messages sent, confirmed and delivered so far
    report              ->  all counters
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import signal
import ssl
import sys
import threading
import time
from typing import Any

import uvloop

from sluice.bench.packet_templates import connect_packet, publish_templates, reader_packets
from sluice.bench.tally import Histogram, Tally
from sluice.bench.traffic import BenchConnection, PublisherConnection, ReaderConnection, Traffic
from sluice.bench.workload import Address, Workload, parse_line

MAX_CONNECTING = 64  # concurrent connection attempts
NANOSECONDS = 1_000_000_000


def cpu_seconds() -> float:
    return time.process_time()


class Generator:
    def __init__(self, work: Workload, address: Address) -> None:
        self.work = work
        self.address = address
        self.tally = Tally(work.run, work.all_publishers, work.slots)
        self.traffic = Traffic(self.tally, work.backlog, work.deliveries_per_message, self._notify)
        self.traffic.paced = work.rate > 0
        self.connections: list[BenchConnection] = []
        self._late_subscriptions: list[tuple[BenchConnection, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._spans: list[dict[str, float]] = []
        self._stopped = threading.Event()
        self._has_begun = False
        self._due = 0  # when the next message is due, if the rate is fixed

    async def connect(self) -> None:
        """Open all connections; readers first, or they would miss messages of publishers."""
        work = self.work
        for reader in work.readers:
            greeting, wanted = reader_packets(work, reader, self.address)
            lane = 0 if work.shared else reader
            first_subscribe = b"" if work.subscribes_late else wanted
            connection = ReaderConnection(
                self.traffic, greeting, first_subscribe, lane, bool(work.group)
            )
            self.connections.append(connection)
            if work.subscribes_late:
                self._late_subscriptions.append((connection, wanted))
        for publisher in work.publishers:
            greeting = connect_packet(f"bench-{work.run}-publisher-{publisher}", self.address)
            pieces = publish_templates(work, publisher)
            window = 0xFFFF if work.rate else work.window
            sender = PublisherConnection(
                self.traffic, greeting, publisher, work.qos, window, work.messages, pieces
            )
            sender.measures_acks = work.measures_acks
            self.traffic.publishers.append(sender)
            self.connections.append(sender)
        await self._connect_all(self.connections)

    async def connect_idle(self) -> None:
        """Open connections that send nothing more."""
        idle = [
            BenchConnection(
                self.traffic,
                connect_packet(f"bench-{self.work.run}-idle-{os.getpid()}-{nth}", self.address),
                b"",
            )
            for nth in range(self.work.idle)
        ]
        self.connections += idle
        await self._connect_all(idle)

    async def _connect_all(self, connections: list[BenchConnection]) -> None:
        tls = ssl.create_default_context() if self.address.tls else None
        ready = int(self.traffic.ready)
        for start in range(0, len(connections), MAX_CONNECTING):
            some = connections[start : start + MAX_CONNECTING]
            await asyncio.gather(*(self._open(connection, tls) for connection in some))
            ready += len(some)
            while self.traffic.ready < ready and not self.traffic.faults:
                self._changed.clear()
                await self._changed.wait()
            if self.traffic.faults:
                return

    async def _open(self, connection: BenchConnection, tls: ssl.SSLContext | None) -> None:
        kind: Any = connection  # an asyncio protocol by its methods
        await self._loop.create_connection(
            lambda: kind, self.address.host, self.address.port, ssl=tls
        )

    def begin(self, at: float, warm: float, end: float | None) -> None:
        self._loop.call_at(at, self._start, at)
        self._loop.call_at(warm, self._record_sample, True)
        if end is not None:
            self._loop.call_at(end, self._stop)

    def _start(self, at: float) -> None:
        self._has_begun = self.traffic.sending = True
        self._due = int(at * NANOSECONDS)
        for connection, wanted in self._late_subscriptions:
            connection.send(wanted)
        if self.work.rate and self.traffic.publishers:
            threading.Thread(target=self._pace, args=(at,), daemon=True).start()
        else:
            self.traffic.send_all(time.monotonic_ns())

    def _stop(self) -> None:
        self.traffic.sending = False
        self._stopped.set()
        self._record_sample(False)

    def _record_sample(self, measuring: bool) -> None:
        """Record the counters. Counts between two samples are part of the measurement."""
        self.tally.measuring = measuring
        self._spans.append(
            {
                "at": time.monotonic(),
                "cpu": cpu_seconds(),
                "sent": int(self.traffic.sent),
                "confirmed": int(self.traffic.confirmed),
                "delivered": int(self.tally.delivered),
            }
        )

    def _pace(self, at: float) -> None:
        """Wake the loop when a message is due, from a thread: timers of the loop have millisecond
        resolution.
        """
        gap = int(NANOSECONDS / self.work.rate)
        due = int(at * NANOSECONDS)
        while not self._stopped.is_set():
            wait = due - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / NANOSECONDS)
            try:
                self._loop.call_soon_threadsafe(self._send_due, gap)
            except RuntimeError:
                return  # the loop is closed
            due += gap

    def _send_due(self, gap: int) -> None:
        self._due = int(self.traffic.send_due(self._due, gap, time.monotonic_ns()))

    def _notify(self) -> None:
        self._changed.set()

    def progress(self) -> dict[str, Any]:
        return {
            "sent": int(self.traffic.sent),
            "confirmed": int(self.traffic.confirmed) if self.work.qos else int(self.traffic.sent),
            "delivered": int(self.tally.delivered),
            "sending": not self._has_begun
            or (
                self.traffic.sending and any(sender.left != 0 for sender in self.traffic.publishers)
            ),
            "faults": self.traffic.faults,
        }

    def report(self) -> dict[str, Any]:
        if len(self._spans) == 1:  # the run ends with its last message, not by the clock
            self._stop()
            last = self.tally.last_at / NANOSECONDS
            self._spans[-1]["at"] = (
                max(last, self._spans[0]["at"] + 1e-6) if last else self._spans[-1]["at"]
            )
        return {
            **self.progress(),
            "published": {
                int(sender.number): int(sender.sequence) for sender in self.traffic.publishers
            },
            "refused": int(self.traffic.refused),
            "strange": int(self.tally.foreign),
            "spans": self._spans,
            "latency": sparse(self.tally.latency),
            "lateness": sparse(self.tally.lateness),
            "lanes": {
                lane: [
                    {
                        "seen": base64.b64encode(stream.seen()).decode(),
                        "doubled": int(stream.doubled),
                        "disordered": int(stream.disordered),
                    }
                    for stream in streams
                ]
                for lane, streams in self.tally.streams.items()
            },
        }

    def close(self) -> None:
        self._stopped.set()
        for connection in self.connections:
            connection.close()


def sparse(histogram: Histogram) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(histogram.counts) if count}


async def serve_commands() -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = await reader.readline()
    if not first:
        return
    generator = Generator(*parse_line(first))
    try:
        await generator.connect()
    except OSError as fault:
        generator.traffic.faults.append(f"no connection: {fault.strerror or fault}")
    reply({"ready": not generator.traffic.faults, "faults": generator.traffic.faults})
    while line := await reader.readline():
        command = json.loads(line)
        if command["do"] == "begin":
            generator.begin(command["at"], command["warm"], command["end"])
        elif command["do"] == "idle":
            before = cpu_seconds()
            await generator.connect_idle()
            reply({**generator.progress(), "cpu": cpu_seconds() - before})
        elif command["do"] == "progress":
            reply(generator.progress())
        else:
            reply(generator.report())
    generator.close()
    await asyncio.sleep(0.05)  # for the DISCONNECT packets to leave


def reply(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_commands())


if __name__ == "__main__":
    main()

"""Trace the Python calls of one message through a broker: publish, delivery, settlements.

    scripts/trace-path              the calls of each path, indented by depth, and a summary
    scripts/trace-path publish      of one path
    scripts/trace-path --check      fail if a path passes too many files, or ARCHITECTURE.md differs
    scripts/trace-path --write      rewrite the paths in ARCHITECTURE.md

The sources run interpreted, with the store on disk in a temporary directory and on virtual time.
Bytes go to real connections; sockets and the event loop are missing. Each path is done a few times
before it is recorded, so that caches are filled.

What counts: a reader has to follow the calls that lead on to another file. All others end where
they are: accessors, codecs, records, columns. So a file is *passed* if a call into it leads on; how
often that happens is the number of its entries. A publish passes at most 20 files, none more than
twice: once on the way in and once on the way out. The other paths come in, are committed and are
acknowledged as a publish is; their limit of 10 counts all files that a publish does not pass. That
includes the delivery which ends the path of a nack.

The page has the paths between `<!-- trace PATH -->` and `<!-- end of trace -->`. The page chooses
which functions are shown, and comments them; their order and indentation come from the trace.
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from sluice.broker.net.connection import Connection
from sluice.broker_core import BrokerCore
from sluice.queues.service.templates import QueueTemplates, Template
from sluice.store.embedded import EmbeddedStore
from sluice.testing.virtual_time import VirtualTime
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    Ack,
    Connect,
    Disconnect,
    Packet,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    build_publish,
)
from sluice.wire.properties import Properties
from sluice.wire.reader import PacketReader
from sluice.wire.topics import matches

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = str(ROOT / "src/sluice") + "/"
PAGE: Final = ROOT / "ARCHITECTURE.md"
# Parts of the harness and not of the path.
HARNESS: Final = ("testing/", "broker_core")

WARM_UPS: Final = 3
RETRY_SECONDS: Final = 10.0  # the first retry of a queue with default settings is due before
ANSWER_SECONDS: Final = 10.0  # for the threads of the store


# For `publish` the files that it passes, for the others the files that a publish does not pass.
MAX_FILES: Final = {"publish": 20, "delivery": 10, "ack": 10, "nack": 10, "dead-letter": 10}
MAX_ENTRIES: Final = 2  # of one file by a publish


@dataclass
class Call:
    module: str
    function: str
    depth: int

    def name(self) -> str:
        return f"{self.module}.{self.function}"


@dataclass
class Trace:
    """The calls of one path, in order. Each thread has its own depth."""

    calls: list[Call] = field(default_factory=list)
    switches: int = 0  # calls and returns from one file to another

    def files(self) -> set[str]:
        return {call.module for call in self.calls}

    def leading(self) -> list[bool]:
        """Return for each call whether it leads on to another file."""
        leads = [False] * len(self.calls)
        open_calls: list[int] = []
        for nth, call in enumerate(self.calls):
            del open_calls[call.depth :]
            if open_calls and self.calls[open_calls[-1]].module != call.module:
                for outer in open_calls:
                    leads[outer] = True
            open_calls.append(nth)
        return leads

    def entries(self) -> Counter[str]:
        """Return the passed files, and how often another file calls into them."""
        found: Counter[str] = Counter()
        callers: list[str] = []
        for call, leads_on in zip(self.calls, self.leading(), strict=True):
            del callers[call.depth :]
            if leads_on and (not callers or callers[-1] != call.module):
                found[call.module] += 1
            callers.append(call.module)
        return found

    def summary(self) -> str:
        passed = self.entries()
        most = ", ".join(f"{module} {count}" for module, count in passed.most_common(6))
        return (
            f"{len(self.calls)} calls, {len(self.files())} files, {self.switches} file switches; "
            f"passes {len(passed)} files: {most}"
        )


class Recorder:
    """Records the calls of Sluice's functions while `trace` is set."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._main_thread = threading.get_ident()
        # What threads of the store have called since `merge_threads`.
        self._thread_calls: list[Call] = []
        # By thread: module and frame of the open calls.
        self._stacks: dict[int, list[tuple[str, FrameType]]] = {}
        self._begins_at = ""

    @contextmanager
    def recording(self, begins_at: str = "") -> Iterator[Trace]:
        """Record until the end of the block, from the first call of the function `begins_at`."""
        trace = Trace()
        self._stacks.clear()
        self._thread_calls.clear()
        self._begins_at = begins_at
        self.trace = trace
        try:
            yield trace
        finally:
            self.trace = None

    def merge_threads(self) -> None:
        """Add the calls of the threads after those that gave them work, in a stable order."""
        calls, self._thread_calls = self._thread_calls, []
        if self.trace is not None:
            self.trace.calls += calls

    @contextmanager
    def paused(self) -> Iterator[None]:
        trace, self.trace = self.trace, None
        yield
        self.trace = trace

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        trace = self.trace
        code = frame.f_code
        if (
            trace is None
            or event not in ("call", "return")
            or not code.co_filename.startswith(SOURCES)
            or code.co_name.startswith("<")  # comprehensions and lambdas belong to their function
        ):
            return
        module = code.co_filename.removeprefix(SOURCES).removesuffix(".py")
        if module.startswith(HARNESS):
            return
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        caller = stack[-1][0] if stack else ""
        if event == "return":
            if stack and stack[-1][1] is frame:
                stack.pop()
                trace.switches += bool(stack) and stack[-1][0] != caller
            return
        if self._begins_at not in ("", f"{module}.{code.co_name}"):
            return
        self._begins_at = ""
        if module != caller:
            trace.switches += bool(caller)
        calls = trace.calls if thread == self._main_thread else self._thread_calls
        calls.append(Call(module, code.co_name, len(stack)))
        stack.append((module, frame))


class Client:
    """The transport of a connection, and the client at its other end."""

    def __init__(self, harness: Harness, name: str) -> None:
        self.received: list[Packet] = []
        # Nothing is recorded after a packet of this class.
        self.ends_recording_with: type[Packet] = Disconnect
        self._reader = PacketReader()
        self._harness = harness
        self._last_id = 0
        self._connection: Connection = harness.core.broker.connect()
        self._connection.connection_made(self)
        self.send(encode(Connect(name, V5, True, 0), V5))

    def send(self, data: bytes) -> None:
        self._connection.data_received(data)

    def subscribe(self, queue_name: str, prefetch: int) -> None:
        properties = Properties()
        properties.user = [("consumer-group", "workers"), ("prefetch", str(prefetch))]
        topic = f"$queue/{queue_name}".encode()
        packet = Subscribe(self._next_id(), [SubscriptionRequest(topic, 1)], properties)
        self.send(encode(packet, V5))

    def publish(self, topic: str, user: list[tuple[str, str]]) -> bytes:
        """Return the bytes of a publish at QoS 1."""
        properties = Properties()
        properties.user = user
        packet = build_publish(topic.encode(), b"payload", 1, False, properties)
        packet.packet_id = self._next_id()
        return encode(packet, V5)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def has(self, kind: type[Packet]) -> bool:
        return any(isinstance(one, kind) for one in self.received)

    def take(self, kind: type[Packet]) -> Packet:
        """Wait for a packet of this class; return it."""
        self._harness.run_until(lambda: self.has(kind))
        found = next(one for one in self.received if isinstance(one, kind))
        self.received.remove(found)
        return found

    # ---- the transport

    def write(self, data: bytes) -> None:
        with self._harness.recorder.paused():
            packets = self._reader.feed(data, V5)
        self.received += packets
        if any(isinstance(one, self.ends_recording_with) for one in packets):
            self._harness.recorder.trace = None

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int, low: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Harness:
    """A broker core with one publisher, one consumer, and the store in a directory."""

    def __init__(self, directory: str, recorder: Recorder) -> None:
        self.time = VirtualTime()
        self.recorder = recorder
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        fragile: dict[str, object] = {"partitions": 1, "retry_policy": {"max_retries": 0}}
        templates = QueueTemplates(
            matches, [Template("fragile", fragile), Template("#", {"partitions": 1})]
        )
        self.core = BrokerCore(self.time, templates, clock=self.time.clock, draw=lambda: 0.5)
        self._store = EmbeddedStore(directory, self._call_threadsafe, print)
        self.core.open(self._store, lambda alerts, warnings: None)
        self.publisher = Client(self, "publisher")
        self.consumer = Client(self, "consumer")

    def _call_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        self._calls.put(lambda: function(*arguments))

    def run_until(self, condition: Callable[[], bool]) -> None:
        self.time.run_ready()
        while not condition():
            call = self._calls.get(timeout=ANSWER_SECONDS)
            self.recorder.merge_threads()
            call()
            self.time.run_ready()

    def advance(self, seconds: float) -> None:
        end = self.time.now + seconds
        while (due := self.time.next_due()) is not None and due <= end:
            self.time.fire_next()
            self.time.run_ready()

    def close(self) -> None:
        self.core.commit_loop.close()


# ---- the paths


def publish(harness: Harness, recorder: Recorder) -> Trace:
    data = harness.publisher.publish("$queue/unread", [])
    with recorder.recording() as trace:
        harness.publisher.ends_recording_with = Ack
        harness.publisher.send(data)
        harness.publisher.take(Ack)
    harness.publisher.ends_recording_with = Disconnect
    return trace


def deliver(harness: Harness, recorder: Recorder, queue_name: str = "work") -> Trace:
    """Publish to a queue with a waiting consumer; record from dispatch to its packet."""
    with recorder.recording("queues/flow/delivery/dispatch.on_frame_committed") as trace:
        harness.consumer.ends_recording_with = Publish
        harness.publisher.send(harness.publisher.publish(f"$queue/{queue_name}", []))
        harness.run_until(lambda: harness.consumer.has(Publish))
        harness.publisher.take(Ack)
    harness.consumer.ends_recording_with = Disconnect
    return trace


def settlement(harness: Harness, queue_name: str, verb: str) -> bytes:
    """Return the bytes that settle the delivery that the consumer has received."""
    delivery = harness.consumer.take(Publish)
    assert isinstance(delivery, Publish)
    user = [
        (name, value)
        for name, value in delivery.decode_properties().user
        if name in ("message-id", "delivery-token")
    ]
    return harness.consumer.publish(f"$queue/{queue_name}/{verb}", user)


def settle(harness: Harness, recorder: Recorder, queue_name: str, verb: str) -> Trace:
    data = settlement(harness, queue_name, verb)
    with recorder.recording() as trace:
        harness.consumer.ends_recording_with = Ack
        harness.consumer.send(data)
        harness.consumer.take(Ack)
    harness.consumer.ends_recording_with = Disconnect
    return trace


def ack(harness: Harness, recorder: Recorder) -> Trace:
    deliver(harness, recorder)
    return settle(harness, recorder, "work", "$ack")


def nack(harness: Harness, recorder: Recorder) -> Trace:
    deliver(harness, recorder)
    data = settlement(harness, "work", "$nack")
    with recorder.recording() as trace:
        harness.consumer.ends_recording_with = Publish
        harness.consumer.send(data)
        harness.consumer.take(Ack)
        harness.advance(RETRY_SECONDS)
        harness.run_until(lambda: harness.consumer.has(Publish))
    harness.consumer.ends_recording_with = Disconnect
    settle(harness, recorder, "work", "$ack")
    return trace


def dead_letter(harness: Harness, recorder: Recorder) -> Trace:
    deliver(harness, recorder, "fragile")
    return settle(harness, recorder, "fragile", "$nack")


def deliver_and_ack(harness: Harness, recorder: Recorder) -> Trace:
    trace = deliver(harness, recorder)
    settle(harness, recorder, "work", "$ack")
    return trace


PATHS: Final[dict[str, Callable[[Harness, Recorder], Trace]]] = {
    "publish": publish,
    "delivery": deliver_and_ack,
    "ack": ack,
    "nack": nack,
    "dead-letter": dead_letter,
}


def trace_paths() -> dict[str, Trace]:
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder()
        threading.setprofile(recorder.profile)  # of the threads that the store starts
        harness = Harness(directory, recorder)
        harness.consumer.subscribe("work", 10)
        harness.consumer.subscribe("fragile", 10)
        for _ in range(2):
            harness.consumer.take(Suback)
        traces = {}
        sys.setprofile(recorder.profile)
        try:
            for name, path in PATHS.items():
                for _ in range(WARM_UPS + 1):
                    traces[name] = path(harness, recorder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            harness.close()
    return traces


# ---- limits and the page


def too_long(traces: dict[str, Trace]) -> list[str]:
    """Return which paths exceed their limits."""
    faults = []
    published = traces["publish"].entries()
    for name, trace in traces.items():
        passed = trace.entries()
        files = set(passed) if name == "publish" else set(passed) - set(published)
        if len(files) > MAX_FILES[name]:
            listed = ", ".join(sorted(files))
            faults.append(f"{name} passes {len(files)} files, not {MAX_FILES[name]}: {listed}")
    faults += [
        f"publish enters {module} {count} times, not {MAX_ENTRIES}"
        for module, count in published.items()
        if count > MAX_ENTRIES
    ]
    return faults


BLOCK: Final = re.compile(
    r"(<!-- trace ([\w-]+) -->\n```text path\n)(.*?)(```\n<!-- end of trace -->)", re.DOTALL
)


def write_paths(page: str, traces: dict[str, Trace]) -> str:
    """Return the page with its paths in the order and depth of the traces."""
    return BLOCK.sub(
        lambda found: found[1] + write_path(found[3], traces[found[2]]) + found[4], page
    )


def write_path(block: str, trace: Trace) -> str:
    comments: dict[str, str] = {}
    for line in block.splitlines():
        name, _, comment = line.strip().partition(" ")
        comments[name] = comment.strip()
    lines: list[tuple[str, str]] = []
    shown: list[int] = []  # the depths of the shown calls that are open
    for call in trace.calls:
        while shown and shown[-1] >= call.depth:
            shown.pop()
        if call.name() in comments:
            lines.append(("  " * len(shown) + call.name(), comments.pop(call.name())))
            shown.append(call.depth)
    column = max((len(name) for name, _ in lines), default=0) + 2
    return "".join(f"{name:{column}}{comment}".rstrip() + "\n" for name, comment in lines)


def differences(page: str, traces: dict[str, Trace]) -> list[str]:
    """Return the paths of the page that are not as the traces say."""
    return [
        f"the path of {name} in {PAGE.name} is not as traced: run scripts/trace-path --write"
        for _, name, block, _ in BLOCK.findall(page)
        if write_path(block, traces[name]) != block
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", help=f"some of {', '.join(PATHS)}")
    parser.add_argument("--check", action="store_true", help="compare with limits and the page")
    parser.add_argument("--write", action="store_true", help="rewrite the paths on the page")
    options = parser.parse_args()
    traces = trace_paths()
    page = PAGE.read_text("utf-8")
    if options.write:
        PAGE.write_text(write_paths(page, traces), "utf-8")
    elif options.check:
        faults = too_long(traces) + differences(page, traces)
        print("\n".join(faults) or "all paths are within their limits and as on the page")
        return 1 if faults else 0
    else:
        for name in options.paths or PATHS:
            print(f"{name}: {traces[name].summary()}")
            for call in traces[name].calls:
                print("  " * (call.depth + 1) + call.name())
    return 0


if __name__ == "__main__":
    sys.exit(main())

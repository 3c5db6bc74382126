"""The parent of the processes of a node: forks them, restarts them, and is their coordinator.

It has no event loop and no thread, so that it may fork at any time: a restarted process has every
module loaded already. It reads no message and opens no store. Requests of the processes arrive over
a socket pair each (`cluster.membership.process_kv` is the other end) and are answered from
`SharedEntries`.

Invariant: entries of a process are deleted when it has been waited for, never earlier; so no other
incarnation of it opens a cell while it runs.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sluice.backoff import Backoff
from sluice.processes.shared_entries import NODE_PREFIX, SharedEntries

log = logging.getLogger(__name__)

# The first restart is immediate; a process that ends again soon after its start waits.
RESTART: Final = Backoff(initial_seconds=0.5, max_seconds=30.0, stable_seconds=60.0)
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
READ_BYTES: Final = 1 << 16

# Runs a process to its end: its number, its socket to the supervisor, the listeners that an earlier
# process of this number has opened. Returns the exit code.
ProcessMain = Callable[[int, socket.socket, dict[str, str]], int]


@dataclass(eq=False)
class Process:
    """One running process."""

    number: int
    pid: int
    channel: socket.socket
    started_at: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_watching: bool = False
    is_connected: bool = True


class Supervisor:
    """Runs `count` processes. `on_ready` is called once, when all of them serve for the first time.

    It gets the listeners of the first process. `on_pulse` is called at least every `pulse_seconds`.
    """

    def __init__(
        self,
        count: int,
        main: ProcessMain,
        on_ready: Callable[[dict[str, str]], None],
        on_pulse: Callable[[], None] = lambda: None,
        pulse_seconds: float = 3600.0,
    ) -> None:
        self._count = count
        self._main = main
        self._on_ready = on_ready
        self._on_pulse = on_pulse
        self._pulse_seconds = pulse_seconds
        self._entries = SharedEntries()
        self._processes: dict[int, Process] = {}
        self._listeners: dict[int, dict[str, str]] = {}  # by process that has been ready
        self._restart_at: dict[int, float] = {}
        self._failures: dict[int, int] = {}  # ends in a row, each soon after the start
        self._is_ready = False
        self._is_stopping = False
        self._exit_code = 0
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()

    def run(self) -> int:
        """Run until a signal to stop, or until a start fails; return the exit code."""
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        for signal_number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signal_number, _ignore_here)  # `_handle_signals` reads its number
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in range(1, self._count + 1):
            self._start(number)
        next_pulse = time.monotonic()
        while self._processes or not self._is_stopping:
            now = time.monotonic()
            if now >= next_pulse:
                self._on_pulse()
                next_pulse = now + self._pulse_seconds
            for number in [one for one, due in self._restart_at.items() if due <= now]:
                del self._restart_at[number]
                self._start(number)
            due = min([next_pulse, *self._restart_at.values()])
            for key, events in self._selector.select(max(0.0, due - time.monotonic())):
                if key.data is None:
                    self._handle_signals()
                else:
                    self._serve(key.data, events)
            self._broadcast()
        return self._exit_code

    # ---- signals

    def _handle_signals(self) -> None:
        numbers = self._wakeup.recv(READ_BYTES)
        if signal.SIGHUP in numbers:
            for process in self._processes.values():
                os.kill(process.pid, signal.SIGHUP)
        for number in STOP_SIGNALS:
            for _ in range(numbers.count(number)):
                self._stop(number)
        if signal.SIGCHLD in numbers:
            for process in list(self._processes.values()):
                self._wait_for(process)

    def _stop(self, number: signal.Signals) -> None:
        """Stop every process in order; the second time, kill them: nothing acknowledged is lost."""
        if self._is_stopping:
            for process in self._processes.values():
                os.kill(process.pid, signal.SIGKILL)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._begin_stop()

    def _begin_stop(self) -> None:
        self._is_stopping = True
        self._restart_at.clear()
        for process in self._processes.values():
            self._send(process, ["stop"])

    # ---- processes

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        gc.freeze()  # so that a collection in the process does not copy the memory that it shares
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._run_process(number, theirs)
        theirs.close()
        ours.setblocking(False)
        process = Process(number, pid, ours, time.monotonic())
        self._processes[number] = process
        self._selector.register(ours, selectors.EVENT_READ, process)
        log.info("process started", extra={"number": number, "pid": pid})

    def _run_process(self, number: int, channel: socket.socket) -> None:
        """Run a process after the fork; never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for one in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(one, signal.SIG_DFL)
            self._selector.close()
            for end in (self._wakeup, self._wakeup_writer):
                end.close()
            for process in self._processes.values():
                process.channel.close()
            code = self._main(number, channel, self._listeners.get(number, {}))
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _wait_for(self, process: Process) -> None:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._disconnect(process)
        process.channel.close()
        del self._processes[process.number]
        self._entries.end_process(process.number)
        code = os.waitstatus_to_exitcode(status)
        facts = {"number": process.number, "pid": process.pid, "code": code}
        if self._is_stopping:
            self._exit_code = self._exit_code or abs(code)
            log.info("process ended", extra=facts)
        elif not self._is_ready:
            # A start that fails would fail again: a port or the store is taken, a setting is wrong.
            self._exit_code = abs(code) or 1
            log.error("process ended before it was ready", extra=facts)
            self._begin_stop()
        else:
            delay = self._restart_delay(process)
            log.error("process ended, restarting it", extra={**facts, "seconds": delay})
            self._restart_at[process.number] = time.monotonic() + delay

    def _restart_delay(self, process: Process) -> float:
        number = process.number
        if time.monotonic() - process.started_at > RESTART.stable_seconds:
            self._failures[number] = 0
        failures = self._failures.get(number, 0)
        self._failures[number] = failures + 1
        return RESTART.delay(failures - 1) if failures else 0.0

    # ---- requests

    def _serve(self, process: Process, events: int) -> None:
        if not process.is_connected:
            return  # it ended earlier in this pass
        if events & selectors.EVENT_WRITE:
            self._flush(process)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = process.channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(process)
            return
        process.received += data
        *lines, rest = process.received.split(b"\n")
        process.received = bytearray(rest)
        for line in lines:
            self._answer(process, json.loads(line))

    def _answer(self, process: Process, request: list[Any]) -> None:
        number, operation, *arguments = request
        entries = self._entries
        result: object = None
        match operation:
            case "watch":
                self._broadcast()
                process.is_watching = True
                result = entries.entries
            case "grant":
                result = entries.grant(process.number)
            case "keep":
                result = entries.is_alive(*arguments)
            case "revoke":
                entries.end_lease(*arguments)
            case "put":
                result = entries.put(*arguments)
            case "swap":
                result = entries.swap(*arguments)
            case "evict":
                self._evict(*arguments)
            case "ready":
                self._report_ready(process, *arguments)
        self._broadcast()
        self._send(process, [number, result])

    def _evict(self, key: str) -> None:
        """Kill a process that the others do not reach: it is restarted when it has ended."""
        number = self._entries.process_of(key)
        if number is not None and number in self._processes and not self._is_stopping:
            log.error(
                "process hangs, killing it",
                extra={"number": number, "node": key.removeprefix(NODE_PREFIX)},
            )
            os.kill(self._processes[number].pid, signal.SIGKILL)

    def _report_ready(self, process: Process, listeners: dict[str, str]) -> None:
        self._listeners[process.number] = listeners
        if not self._is_ready and len(self._listeners) == self._count:
            self._is_ready = True
            self._on_ready(self._listeners[1])

    # ---- sending

    def _broadcast(self) -> None:
        changes = self._entries.take_changes()
        if changes:
            for process in self._processes.values():
                if process.is_watching:
                    self._send(process, ["changes", changes])

    def _send(self, process: Process, message: list[Any]) -> None:
        if process.is_connected:
            process.unsent += json.dumps(message).encode() + b"\n"
            self._flush(process)

    def _flush(self, process: Process) -> None:
        """Send as much as the socket accepts: a process that does not read delays no other."""
        try:
            sent = process.channel.send(process.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the read reports the end
        del process.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        if self._selector.get_key(process.channel).events != events:
            self._selector.modify(process.channel, events, process)

    def _disconnect(self, process: Process) -> None:
        if process.is_connected:
            process.is_connected = False
            self._selector.unregister(process.channel)


def _ignore_here(number: int, frame: object) -> None:
    """Do nothing: the number arrives at the wake-up socket."""

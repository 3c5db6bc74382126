"""Words to whoever started the process and watches over it: systemd's notify protocol, which is a datagram per word.

NOTIFY_SOCKET names the socket (`@` for the abstract kind). Without it nobody wants to know, and nothing is said. With
WATCHDOG_USEC the supervisor restarts a process that has been silent for so long: the word comes from the loop that
moves messages, so that a loop which no longer turns is a silent one. Being a supervisor's child must never hurt: a
word that cannot be delivered is dropped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress


class SystemdNotifier:
    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._interval = _watchdog_seconds(environ) / 2
        self._timer: asyncio.TimerHandle | None = None

    def notify_ready(self, status: str) -> None:
        """Clients are served from now on: units that wait for this one may start, and the watchdog begins to count."""
        self._send("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")
        if self._interval > 0:
            self._send_watchdog()

    def notify_stopping(self) -> None:
        """The end has begun, and was asked for: it is no crash however long it takes."""
        self._send("STOPPING=1", "STATUS=stopping")

    def stop_watchdog(self) -> None:
        """The loop ends; its timer with it."""
        if self._timer is not None:
            self._timer.cancel()

    def _send_watchdog(self) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._send_watchdog)

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
            notify_socket.setblocking(False)
            notify_socket.sendto("\n".join(assignments).encode(), self._address)


def _watchdog_seconds(environ: Mapping[str, str]) -> float:
    """What the watchdog allows; 0 when there is none, or when it is meant for another process."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    if (
        environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid())
        or not microseconds.isdecimal()
    ):
        return 0.0
    return int(microseconds) / 1_000_000


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT asks for a graceful end. From then on they are deadly as they are by nature: whoever
    sends a second one has waited long enough, and loses nothing by it that a `kill -9` would not lose, which is
    nothing that was acknowledged."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def request_stop() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(
                number, signal.SIG_DFL
            )  # SIGINT would be a KeyboardInterrupt somewhere in the middle

    for number in numbers:
        loop.add_signal_handler(number, request_stop)

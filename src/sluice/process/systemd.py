"""systemd's notify protocol (sd_notify): ready, watchdog and stopping, one datagram each.

NOTIFY_SOCKET names the socket (`@` for an abstract one); without it nothing is sent. With
WATCHDOG_USEC systemd restarts a process that has been silent for that time. The event loop that
handles messages sends the watchdog datagram, so a blocked loop is silent. Errors of sending are
ignored: systemd must never hurt the broker.
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
        self.watchdog_interval = _watchdog_seconds(environ) / 2  # 0: there is no watchdog
        self._timer: asyncio.TimerHandle | None = None

    def notify_ready(self, status: str) -> None:
        """Report readiness: dependent units may start, and the watchdog starts."""
        self._send("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def start_watchdog(self) -> None:
        """Let the running loop notify the watchdog from now on, if there is one."""
        if self.watchdog_interval > 0:
            self.notify_watchdog()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.watchdog_interval, self.start_watchdog)

    def notify_stopping(self) -> None:
        """Report a requested stop, so that a slow one is not taken for a crash."""
        self._send("STOPPING=1", "STATUS=stopping")

    def stop_watchdog(self) -> None:
        """Cancel the watchdog timer before the loop ends."""
        if self._timer is not None:
            self._timer.cancel()

    def notify_watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
            notify_socket.setblocking(False)
            notify_socket.sendto("\n".join(assignments).encode(), self._address)


def _watchdog_seconds(environ: Mapping[str, str]) -> float:
    """Return the watchdog's time limit, or 0 if there is none or it is for another process."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    if (
        environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid())
        or not microseconds.isdecimal()
    ):
        return 0.0
    return int(microseconds) / 1_000_000


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop gracefully on the first SIGTERM or SIGINT; a second one kills the process.

    A kill loses nothing that was acknowledged.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    def request_stop() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            # The default of Python would raise KeyboardInterrupt at an arbitrary point.
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, request_stop)

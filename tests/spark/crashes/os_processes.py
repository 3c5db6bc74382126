"""Processes for crash_run.py: children, a port that stays free, and a watchdog."""

from __future__ import annotations

import faulthandler
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def descendants(pid: int) -> dict[int, tuple[int, str]]:
    """Return the descendants of a process: parent and command line of each."""
    every: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except (OSError, IndexError):
                continue  # ended meanwhile
            every[int(entry.name)] = (parent, words)
    found: dict[int, tuple[int, str]] = {}
    below = {pid}
    while below:
        below = {child for child, (parent, _) in every.items() if parent in below}
        found.update({child: every[child] for child in below})
    return found


def free_port() -> int:
    """Return a port that stays free while there is no listener.

    The system assigns ports above 32768 to outgoing connections, and a restarted broker could not
    get its own back.
    """
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port between 20000 and 32000 is free")


class Watch(threading.Thread):
    """A watchdog. Without a call of `alive` for `seconds`, it prints all stacks and calls
    `give_up`.

    `give_up` removes what the threads wait for.
    """

    def __init__(self, give_up: Callable[[], None], seconds: float) -> None:
        super().__init__(daemon=True)
        self._give_up = give_up
        self._seconds = seconds
        self._ended = threading.Event()
        self.alive()

    def alive(self) -> None:
        self._last_alive = time.monotonic()

    def run(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds)):
            if time.monotonic() - self._last_alive > self._seconds:
                print(
                    f"nothing has moved for {self._seconds:.0f} s; this is where it stands:",
                    flush=True,
                )
                faulthandler.dump_traceback(sys.stdout, all_threads=True)
                self._give_up()
                return

    def end(self) -> None:
        self._ended.set()
        self.join()

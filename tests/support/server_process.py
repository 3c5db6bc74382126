"""A server process of a test, which can be killed and paused."""

from __future__ import annotations

import signal
import subprocess


class ServerProcess:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the server, because its data is no longer needed."""
        if not self.is_dead():
            self.kill()

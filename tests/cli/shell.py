"""The command as a user runs it: a process of its own, on pipes or on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner

from sluice.cli.root import app
from tests.cli.conftest import CommandResult
from tests.support.broker_process import Broker, same_build

TIMEOUT_SECONDS = 30.0


class Shell:
    """Commands for one broker."""

    def __init__(self, broker: Broker) -> None:
        self.environ = {
            **same_build(),
            "SLUICE_URL": f"http://{broker.facts['http']}",
            "SLUICE_MQTT": broker.facts["mqtt"],
            "SLUICE_TRACEBACK": "1",
            "TERM": "xterm-256color",
        }
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "SLUICE_TOKEN"):
            self.environ.pop(name, None)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the command with SIGINT enabled: a suite in the background passes on an ignored
        SIGINT.

        Nothing of ours runs between fork and exec: this process may have gRPC threads, which can
        abort there.
        """
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "sluice", *arguments], env=self.environ, **options
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, *arguments: str, stdin: str = "") -> CommandResult:
        done = subprocess.run(
            [sys.executable, "-m", "sluice", *arguments],
            env=self.environ,
            input=stdin.encode(),
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    async def run_ok(self, *arguments: str, stdin: str = "") -> CommandResult:
        """Run the command beside other tasks of this loop."""
        return await asyncio.to_thread(self.run, *arguments, stdin=stdin)

    def pipe(self, line: str) -> CommandResult:
        """Run a line of bash; `sluice` in it is this one."""
        script = f'set -o pipefail; sluice() {{ "{sys.executable}" -m sluice "$@"; }}; {line}'
        done = subprocess.run(
            ["bash", "-c", script],
            env=self.environ,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    @contextmanager
    def terminal(self, *arguments: str, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
        """The command on a terminal of its own, for all three streams."""
        ours, theirs = pty.openpty()
        os.set_blocking(ours, False)
        size = f"stty -F /dev/fd/{theirs} rows {rows} cols {columns}"
        subprocess.run(["bash", "-c", size], check=True, pass_fds=[theirs])
        process = self.start(
            *arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            os.close(ours)


class InProcessShell(Shell):
    """Commands in this process, which has loaded everything already."""

    def run(self, *arguments: str, stdin: str = "") -> CommandResult:
        result = CliRunner().invoke(
            app, list(arguments), stdin.encode(), self.environ, catch_exceptions=False
        )
        return CommandResult(result.exit_code, result.stdout, result.stderr)


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], line: int) -> None:
        self._process = process
        self._line = line
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Wait until `text` is shown; earlier output is dropped."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} was not shown:\n{self.shown}"
            assert self._read(0.2), f"ended before {text!r} was shown:\n{self.shown}"
        self.shown = self.shown.partition(text)[2]

    def press(self, keys: str) -> None:
        os.write(self._line, keys.encode())

    def end(self) -> int:
        """Return the exit code; the output until then is in `shown`."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while self._read(0.2):
            assert time.monotonic() < end, f"did not end:\n{self.shown}"
        return self._process.wait(TIMEOUT_SECONDS)

    def _read(self, seconds: float) -> bool:
        """Read output; return whether more may come."""
        ready, _, _ = select.select([self._line], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._line, 65536)
        except OSError:  # Linux: the other side of the terminal is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

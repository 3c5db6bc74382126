"""Runs a real `sluice serve` in its own process, as users do."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import sluice
from sluice.units import Address, parse_address

READY = re.compile(r"sluice (?P<version>\S+) ready(?P<facts>( \w+=\S+)+)\n")
START_SECONDS = 45.0
STOP_SECONDS = 30.0


def same_build() -> dict[str, str]:
    """Return an environment in which a child process imports the same build of Sluice.

    COLUMNS is removed, so that its output is not wrapped.
    """
    environ = {**os.environ, "PYTHONPATH": str(Path(sluice.__file__).parents[1])}
    environ.pop("COLUMNS", None)
    return environ


class Broker:
    """One running broker. `mqtt`, `ws` and so on are addresses; KeyError if a listener is off."""

    def __init__(
        self,
        folder: Path,
        config: str,
        flags: Sequence[str],
        environ: Mapping[str, str],
        under: Sequence[str] = (),  # a command that starts it, such as prlimit
    ) -> None:
        self.folder = folder
        self.log = folder / "broker.log"
        (folder / "sluice.toml").write_text(config)
        command = [
            *under,
            sys.executable,
            "-m",
            "sluice",
            "serve",
            "--config",
            "sluice.toml",
            "--data",
            "data",
        ]
        for listener in ("--mqtt", "--ws", "--http", "--grpc"):
            command += [listener, "127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                cwd=folder,
                env={**same_build(), **environ},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._expected_exit = 0
        try:
            self.ready_line = self._read_ready_line()
        except BaseException:
            self.kill()
            raise
        match = READY.fullmatch(self.ready_line)
        assert match, f"not a ready line: {self.ready_line!r}"
        self.version = match["version"]
        self.facts = dict(fact.split("=", 1) for fact in match["facts"].split())

    @property
    def mqtt(self) -> Address:
        return self.address("mqtt")

    @property
    def mqtts(self) -> Address:
        return self.address("mqtts")

    @property
    def ws(self) -> Address:
        return self.address("ws")

    @property
    def wss(self) -> Address:
        return self.address("wss")

    def address(self, listener: str) -> Address:
        return parse_address(self.facts[listener])

    def stop(self) -> None:
        """Stop the broker and check its exit code; a broker that ended by itself is a failure."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"still running {STOP_SECONDS:.0f} s after SIGTERM\n{self.log_text()}"
            ) from None
        finally:
            self._close()
        assert code == self._expected_exit, f"the broker ended with {code}\n{self.log_text()}"

    def kill(self) -> None:
        """Kill the broker without any cleanup."""
        self._expected_exit = -signal.SIGKILL
        self.process.kill()
        self.process.wait()
        self._close()

    def await_end(self, code: int, seconds: float) -> None:
        """Wait until the broker ends by itself, and check its exit code."""
        self._expected_exit = code
        assert self.process.wait(seconds) == code, self.log_text()
        self._close()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _read_ready_line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(START_SECONDS), (
                f"no ready line in {START_SECONDS:.0f} s\n{self.log_text()}"
            )
        line = self.process.stdout.readline().decode()
        assert line, (
            f"the broker ended with {self.process.wait()} before it was ready\n{self.log_text()}"
        )
        return line

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()


class StartBroker(Protocol):
    """The fixture `start_broker`: starts a configured broker, which is stopped after the test."""

    def __call__(
        self, config: str = "", flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> Broker: ...

"""The measured broker: our own in a process and a directory of its own, or a running one."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import sluice
from sluice.bench.procfs import CpuSample, MachineCpu, cpu_of, memory_of
from sluice.bench.workload import Address
from sluice.errors import SluiceError

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0


class BenchError(SluiceError):
    """The benchmark could not be carried out."""


class BrokerUnreachable(BenchError):
    """No broker answers at the address."""


@dataclass(frozen=True)
class MeasuredBroker:
    address: Address
    pid: int | None = None  # None: its CPU and memory are unknown

    def sample(self) -> CpuSample:
        pid = self.pid
        return CpuSample(
            time.monotonic(),
            None if pid is None else cpu_of(pid),
            None if pid is None else memory_of(pid),
            MachineCpu.now(),
        )


def parse_address(url: str) -> Address:
    parts = urlsplit(url if "://" in url else f"mqtt://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or port == -1:
        raise ValueError("not the MQTT address of a broker")
    return Address(
        parts.hostname,
        port or (8883 if parts.scheme == "mqtts" else 1883),
        parts.scheme == "mqtts",
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
    )


def child_environment() -> dict[str, str]:
    """Return an environment in which a child uses the same Sluice as this process.

    Settings of the caller for another broker are left out.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")
    }
    return {**inherited, "PYTHONPATH": str(Path(sluice.__file__).parents[1])}


@contextmanager
def scratch_directory(parent: Path | None) -> Iterator[Path]:
    """Create a directory on the disk to measure, and remove it afterwards. Its parent stays."""
    parent_directory = parent or Path.cwd()
    made: list[Path] = []
    try:
        while not parent_directory.exists():
            made.append(parent_directory)
            parent_directory = parent_directory.parent
        if made:
            made[0].mkdir(parents=True)
        folder = Path(
            tempfile.mkdtemp(prefix="sluice-bench-", dir=made[0] if made else parent_directory)
        )
    except OSError as fault:
        raise BenchError(
            f"cannot make a directory in {parent or parent_directory}: {fault.strerror}",
            "Name one on the disk to be measured with --data",
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for each in made:
            try:
                each.rmdir()
            except OSError:
                break


@contextmanager
def start_broker(folder: Path, durability: str) -> Iterator[MeasuredBroker]:
    """Run `sluice serve` with defaults, on free loopback ports.

    The broker has its own session: Ctrl-C reaches only this process, which then stops the broker.
    """
    log = folder / "broker.log"
    config = folder / "sluice.toml"
    config.write_text(
        '[[queues.templates]]\nmatch = "bench/#"\n'
        f'config = {{ performance = {{ durability = "{durability}" }} }}\n'
    )
    command = [
        sys.executable,
        "-m",
        "sluice",
        "serve",
        "--config",
        str(config),
        "--data",
        str(folder / "data"),
    ]
    for listener in ("--mqtt", "--http", "--grpc"):
        command += [listener, "127.0.0.1:0"]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"],
            cwd=folder,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        host, _, port = _wait_ready(process, log)["mqtt"].rpartition(":")
        yield MeasuredBroker(Address(host, int(port)), process.pid)
    finally:
        stop_process(process)
        shutil.rmtree(folder / "data", ignore_errors=True)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline().decode() if selector.select(START_SECONDS) else ""
    if " ready " not in line:
        log_lines = log.read_text(errors="replace").strip().splitlines()
        raise BenchError("the broker did not start" + (f": {log_lines[-1]}" if log_lines else ""))
    return dict(fact.split("=", 1) for fact in line.split() if "=" in fact)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process; kill it after STOP_SECONDS."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()

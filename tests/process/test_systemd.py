"""Tests of the broker under systemd: notifications, signals, and the unit file."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.client.sync import Client
from sluice.config.sources import load_settings
from sluice.process.systemd import SystemdNotifier
from tests.support.broker_process import StartBroker, same_build

UNIT = Path(__file__).parents[2] / "packaging/sluice.service"
SECONDS = 30.0

# A process that takes an hour to stop, on the event loop of `sluice serve`.
SLOW_TO_STOP = """
import asyncio, uvloop
from sluice.process.systemd import stop_on_signals

async def main():
    stop = asyncio.Event()
    stop_on_signals(asyncio.get_running_loop(), stop)
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(3600)

uvloop.run(main())
"""


class NotifySocket:
    """The socket of systemd: a datagram socket, at a path or (`@`) in the abstract namespace."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(SECONDS)

    def next(self) -> list[str]:
        return self._socket.recv(65_536).decode().splitlines()

    def next_but(self, word: str) -> list[str]:
        """Return the next message that is not only this word."""
        while (words := self.next()) == [word]:
            pass
        return words

    def received(self) -> bool:
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[NotifySocket]:
    listening = NotifySocket(str(tmp_path / "notify"))
    yield listening
    listening.close()


def test_supervisor_is_notified_of_ready_watchdog_and_stopping(
    start_broker: StartBroker, listener: NotifySocket
) -> None:
    broker = start_broker(environ={"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "200000"})
    assert listener.next() == [
        "READY=1",
        f"STATUS={broker.ready_line.rstrip()}",
        f"MAINPID={broker.process.pid}",
    ]
    with socket.create_connection((broker.mqtt.host, broker.mqtt.port), SECONDS):
        for _ in range(3):
            assert listener.next() == ["WATCHDOG=1"]
    broker.process.send_signal(signal.SIGTERM)
    assert listener.next_but("WATCHDOG=1") == ["STOPPING=1", "STATUS=stopping"]
    assert broker.process.wait(SECONDS) == 0


def test_notify_socket_may_be_in_the_abstract_namespace() -> None:
    listener = NotifySocket(f"@sluice-{os.getpid()}")
    try:
        SystemdNotifier({"NOTIFY_SOCKET": listener.address}).notify_stopping()
        assert listener.next()[0] == "STOPPING=1"
    finally:
        listener.close()


@pytest.mark.parametrize(
    "watchdog", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}]
)
async def test_watchdog_of_another_process_is_not_notified(
    watchdog: dict[str, str], listener: NotifySocket
) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": listener.address, **watchdog}).notify_ready("here")
    assert listener.next()[0] == "READY=1"
    assert not listener.received()


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_missing_notify_socket_does_no_harm(address: str) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": address}).notify_stopping()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_a_slow_stop_at_once(second: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_STOP],
        env=same_build(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(second)
        assert process.wait(SECONDS) == -second
        assert process.stderr.read() == ""


def test_killed_broker_restarts_on_its_data_and_a_second_one_is_refused(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    flags = ["--data", str(data)]
    first = start_broker(flags=flags)
    with Client.from_url(f"mqtt://{first.mqtt}", client_id="clerk") as client:
        client.publisher("tasks").send("kept")
    other = subprocess.run(
        [
            sys.executable,
            "-m",
            "sluice",
            "serve",
            *flags,
            "--mqtt",
            "127.0.0.1:0",
            "--http",
            "off",
            "--grpc",
            "off",
        ],
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (other.returncode, other.stdout) == (1, "")
    assert f"{first.process.pid}" in other.stderr  # the owner
    first.kill()
    again = start_broker(flags=flags)
    with (
        Client.from_url(f"mqtt://{again.mqtt}", client_id="worker-1") as client,
        client.consumer("tasks") as tasks,
    ):
        task = tasks.take(timeout=SECONDS)
        assert task is not None and task.text == "kept"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "sluice.service"
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/sluice/bin/sluice", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_configuration_shipped_with_the_unit_is_the_default() -> None:
    flags: dict[tuple[str, tuple[str, ...]], str | Path | bool | None] = {
        ("--data", ("data",)): "sluice-data"
    }
    assert load_settings(UNIT.with_name("sluice.toml"), {}, flags) == load_settings(None, {}, {})


def test_unit_restarts_after_a_crash_and_not_after_a_configuration_error() -> None:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    assert (service["Type"], service["Restart"]) == ("notify", "on-failure")
    assert service["RestartPreventExitStatus"] == "2"
    assert service["DynamicUser"] == "yes" and service["StateDirectory"] == "sluice"
    assert int(service["LimitNOFILE"]) >= 100_000


def test_unit_calls_nothing_that_a_small_system_lacks() -> None:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.read(UNIT)
    called = {
        value.split()[0] for name, value in unit["Service"].items() if name.startswith("exec")
    }
    assert called == {"/opt/sluice/bin/sluice", "/bin/sh"}  # /bin/kill is in a separate package

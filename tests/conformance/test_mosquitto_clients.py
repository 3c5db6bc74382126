"""mosquitto_pub and mosquitto_sub, over TCP and TLS in both versions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conformance.conftest import Certificates
from tests.support.broker_process import Broker
from tests.support.external_programs import need_program

SECONDS = "10"


class Commands:
    def __init__(
        self, listening_broker: Broker, certificates: Certificates, listener: str, version: int
    ) -> None:
        address = listening_broker.address(listener)
        self._common = [
            "-h",
            address.host,
            "-p",
            str(address.port),
            "-V",
            "5" if version == 5 else "311",
        ]
        if listener == "mqtts":
            self._common += ["--cafile", str(certificates.ca)]

    def publish(self, *arguments: str, payload: bytes | None = None) -> None:
        command = [need_program("mosquitto_pub"), *self._common, *arguments]
        subprocess.run(command, input=payload, check=True, timeout=30)

    @contextmanager
    def subscriber(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run mosquitto_sub, and yield it after its SUBACK.

        Its debug lines go to stdout with the messages, so -F marks the messages.
        """
        command = [need_program("stdbuf"), "-oL", need_program("mosquitto_sub"), *self._common]
        command += ["-W", SECONDS, "-d", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                for connection in process.stdout:
                    if connection.startswith(b"Subscribed"):
                        break
                yield process
            finally:
                process.kill()

    def collect(self, *arguments: str) -> list[str]:
        """Subscribe, and return the messages after the number given by -C has arrived."""
        command = [need_program("mosquitto_sub"), *self._common, "-W", SECONDS, "-F", "%t|%q|%r|%p"]
        done = subprocess.run(
            [*command, *arguments], stdout=subprocess.PIPE, check=True, timeout=30
        )
        return done.stdout.decode().splitlines()


def messages_of(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stdout is not None
    lines = process.stdout.read().decode().splitlines()
    assert process.wait(15) == 0, lines
    return [line[1:] for line in lines if line.startswith(">")]


@pytest.fixture(params=["mqtt", "mqtts"])
def commands(
    request: pytest.FixtureRequest,
    listening_broker: Broker,
    certificates: Certificates,
    version: int,
) -> Commands:
    return Commands(listening_broker, certificates, request.param, version)


def test_messages_are_exchanged_at_each_qos(commands: Commands, name: str) -> None:
    with commands.subscriber("-t", f"{name}/#", "-q", "2", "-C", "3", "-F", ">%t|%q|%p") as process:
        for qos in "012":
            commands.publish("-t", f"{name}/{qos}", "-q", qos, "-m", f"m{qos}")
        got = messages_of(process)
    assert got == [f"{name}/{qos}|{qos}|m{qos}" for qos in "012"]


def test_retained_messages(commands: Commands, name: str) -> None:
    commands.publish("-t", name, "-q", "1", "-r", "-m", "kept")
    assert commands.collect("-t", name, "-q", "1", "-C", "1") == [f"{name}|1|1|kept"]
    commands.publish("-t", name, "-q", "1", "-r", "-n")


def test_will(commands: Commands, name: str) -> None:
    with commands.subscriber("-t", name, "-q", "1", "-C", "1", "-F", ">%p") as subscriber:
        with commands.subscriber("-t", f"{name}/x", "--will-topic", name, "--will-payload", "gone"):
            pass  # and killed
        assert messages_of(subscriber) == ["gone"]


def test_session_is_resumed(commands: Commands, name: str) -> None:
    lasting = ["-i", name, "-c", "-t", name, "-q", "1"]
    if "5" in commands._common:
        lasting += ["-x", "300"]
    with commands.subscriber(*lasting):
        pass
    commands.publish("-t", name, "-q", "1", "-m", "waited")
    assert commands.collect(*lasting, "-C", "1") == [f"{name}|1|0|waited"]


def test_large_message(commands: Commands, name: str) -> None:
    with commands.subscriber("-t", name, "-C", "1", "-F", ">%l") as process:
        commands.publish("-t", name, "-q", "1", "-s", payload=b"x" * 1_500_000)
        assert messages_of(process) == ["1500000"]


@pytest.mark.parametrize("version", [5], indirect=True, ids=["5.0"])
def test_properties(commands: Commands, name: str) -> None:
    with commands.subscriber("-t", name, "-C", "1", "-F", ">%C|%R|%D|%P|%E") as process:
        sent = (
            ["content-type", "text/plain"],
            ["response-topic", "answers"],
            ["correlation-data", "7"],
        )
        options = [word for one in sent for word in ("-D", "publish", *one)]
        options += ["-D", "publish", "user-property", "k", "v"]
        options += ["-D", "publish", "message-expiry-interval", "60"]
        commands.publish("-t", name, "-q", "1", "-m", "x", *options)
        assert messages_of(process) == ["text/plain|answers|7|k:v|60"]

"""One broker with every kind of listener and its certificates, for all real clients."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.support.broker_process import Broker

LISTENERS = ["mqtt", "mqtts", "ws", "wss"]


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority, the server's, and those of a client that the authority signed."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("device")
    files = Certificates(
        *(folder / name for name in ("ca.pem", "cert.pem", "key.pem", "dc.pem", "dk.pem"))
    )
    authority.cert_pem.write_to_path(str(files.ca))
    server.cert_chain_pems[0].write_to_path(str(files.cert))
    server.private_key_pem.write_to_path(str(files.key))
    client.cert_chain_pems[0].write_to_path(str(files.client_cert))
    client.private_key_pem.write_to_path(str(files.client_key))
    return files


def tls_config(certificates: Certificates, client_ca: bool = False) -> str:
    lines = [
        "[listen]",
        'mqtts = "127.0.0.1:0"',
        'wss = "127.0.0.1:0"',
        "[tls]",
        f'cert = "{certificates.cert}"',
        f'key = "{certificates.key}"',
    ]
    if client_ca:
        lines.append(f'client_ca = "{certificates.ca}"')
    return "\n".join([*lines, ""])


@pytest.fixture(scope="session")
def listening_broker(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Broker]:
    """A broker with all four listeners; tests share it and use their own topics and ids."""
    running = Broker(tmp_path_factory.mktemp("broker"), tls_config(certificates), (), {})
    yield running
    running.stop()
    assert "Traceback" not in running.log_text()


@pytest.fixture(params=LISTENERS)
def listener(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5.0"])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for client ids and as the first level of topics."""
    return "".join(
        character if character.isalnum() else "-"
        for character in request.node.nodeid.rpartition("/")[2]
    )

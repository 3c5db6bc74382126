"""TLS: the client verifies the server with the given context."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from sluice.client import Client, ConnectFailed
from tests.client.conftest import StartMosquitto
from tests.client.servers import Server

Connect = Callable[..., Awaitable[Client]]


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_server(start_mosquitto: StartMosquitto, authority: trustme.CA, tmp_path: Path) -> Server:
    issued = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    return start_mosquitto(f"certfile {chain}\nkeyfile {key}")


async def test_messages_are_exchanged_over_tls(
    tls_server: Server, authority: trustme.CA, version: int, connect: Connect
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    client = await connect(tls_server, version=version, tls=context)
    await client.subscribe("t", qos=1)
    await client.publish("t", b"x" * 300_000, qos=1)
    async for message in client.messages():
        assert len(message.payload) == 300_000
        break
    await client.close()


async def test_server_with_untrusted_certificate_is_refused(tls_server: Server) -> None:
    with pytest.raises(ConnectFailed, match="Check the certificates"):
        await Client(tls_server.host, tls_server.port, tls=True).connect()

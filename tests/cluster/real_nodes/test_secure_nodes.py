"""Real nodes that refuse other programs, by certificates and by the cluster secret."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx
import pytest
import trustme

from sluice.access.api_tokens import make_token
from sluice.access.identity import Role
from sluice.client import Client
from sluice.cluster.transport.link_authentication import LinkCall
from sluice.cluster.transport.link_handshake import LinkRefused
from sluice.cluster.transport.mux import Mux
from sluice.cluster.transport.stream_acceptor import PROXY_GREETING
from sluice.units import parse_address
from tests.cluster.kit import LinkEnd, call_link
from tests.cluster.real_nodes.node_processes import Nodes
from tests.support.redis_process import RedisProcess


class SecureNodes(Nodes):
    def __init__(self, folder: Path, store: str) -> None:
        super().__init__(folder, store, "")
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.pem")

    def settings_of(self, name: str) -> str:
        issued = self._authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self._folder / f"{name}.key")
        chain = b"".join(one.bytes() for one in issued.cert_chain_pems)
        (self._folder / f"{name}.pem").write_bytes(chain)
        files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": "ca.pem"}
        lines = [f'{setting} = "{self._folder / file}"\n' for setting, file in files.items()]
        return super().settings_of(name) + "".join(lines)


class NodesWithSecrets(Nodes):
    """`secrets` has a line of the table `cluster` for each node."""

    def __init__(self, folder: Path, store: str, secrets: dict[str, str]) -> None:
        super().__init__(folder, store, "")
        self._secrets = secrets

    def settings_of(self, name: str) -> str:
        return super().settings_of(name) + self._secrets[name] + "\n"


async def use_both(nodes: Nodes, name: str) -> None:
    """Publish to queues in cells of all nodes."""
    async with Client(port=nodes.port(name), client_id="safe") as client:
        for nth in range(8):
            await client.publish(f"$queue/safe-{nth}", b"", qos=1)


async def test_queues_of_another_node_are_reached_over_mutual_tls(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    nodes = SecureNodes(tmp_path, redis_server.url)
    try:
        nodes.start("one")
        nodes.start("two")
        await use_both(nodes, "one")
    finally:
        nodes.stop()


async def test_nodes_with_the_same_secret_form_a_cluster_and_another_secret_is_refused(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "secret").chmod(0o600)
    secrets = {
        "one": f'secret_file = "{tmp_path / "secret"}"',
        "two": 'secret = "0123456789abcdef"',
        "three": 'secret = "fedcba9876543210"',
        "four": "",
    }
    nodes = NodesWithSecrets(tmp_path, redis_server.url, secrets)
    try:
        nodes.start("one")
        nodes.start("two")
        await use_both(nodes, "one")
        assert "link accepted node=two-" in nodes.log("one")
        for name in ("three", "four"):
            with pytest.raises(AssertionError, match="before it was ready"):
                nodes.start(name)
            assert "has another cluster secret than this one" in nodes.log(name)
            assert "Give every node the same cluster.secret" in nodes.log(name)
        assert "0123456789abcdef" not in nodes.log("one") + nodes.log("two")
    finally:
        nodes.stop()


USERS = """
[auth]
allow_anonymous = false
tokens = "{folder}/tokens.toml"
"""


async def test_viewer_that_reaches_the_link_port_is_refused(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    """A viewer's knowledge and the code of the package are not enough to act as a node."""
    made, token = make_token("watcher", Role.VIEWER, datetime(2100, 1, 1, tzinfo=UTC))
    (tmp_path / "tokens.toml").write_text(
        f'[token."watcher"]\nsha256 = "{made.sha256}"\nrole = "viewer"\n'
    )
    nodes = Nodes(tmp_path, redis_server.url, USERS.format(folder=tmp_path))
    try:
        address = nodes.start("one").address("http")
        url, headers = f"http://{address}/api/v1/cluster", {"Authorization": f"Bearer {token}"}
        answer = await asyncio.to_thread(partial(httpx.get, url, headers=headers, trust_env=False))
        reported = answer.raise_for_status().json()
        (node,) = reported["nodes"]
        for caller in ("intruder-1", node["id"]):
            greeting = LinkCall(reported["name"], caller, node["id"])
            async with call_link(parse_address(node["link"]), greeting) as call:
                await call.read()  # the challenge, which needs the cluster secret
                link_mux = Mux(lambda: None, None, asyncio.get_running_loop().call_soon, node["id"])
                link_mux.dial(0, PROXY_GREETING, LinkEnd())
                await call.write(link_mux.take_output())
                with pytest.raises(LinkRefused):
                    await call.read()
                assert await call.is_closed()
        assert "link refused node=intruder-1" in nodes.log("one")
    finally:
        nodes.stop()

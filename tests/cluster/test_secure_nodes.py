"""Two real nodes that know each other by certificates."""

from __future__ import annotations

from pathlib import Path

import trustme

from sluice.client import Client
from tests.cluster.processes import Nodes
from tests.redis_process import RedisProcess


class SecureNodes(Nodes):
    def __init__(self, folder: Path, store: str) -> None:
        super().__init__(folder, store, "")
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.pem")

    def lines_of(self, name: str) -> str:
        issued = self._authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self._folder / f"{name}.key")
        chain = b"".join(one.bytes() for one in issued.cert_chain_pems)
        (self._folder / f"{name}.pem").write_bytes(chain)
        files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": "ca.pem"}
        lines = [f'{setting} = "{self._folder / file}"\n' for setting, file in files.items()]
        return super().lines_of(name) + "".join(lines)


async def test_queues_of_another_node_are_reached_over_mutual_tls(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    nodes = SecureNodes(tmp_path, redis_server.url)
    try:
        nodes.start("one")
        nodes.start("two")
        async with Client(port=nodes.port("one"), client_id="safe") as client:
            for nth in range(8):  # in cells of both
                await client.publish(f"$queue/safe-{nth}", b"", qos=1)
    finally:
        nodes.stop()

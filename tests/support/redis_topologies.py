"""Runs replicated Redis for tests: a master with replicas and Sentinels, a Redis Cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from tests.support.external_programs import need_redis
from tests.support.redis_process import (
    TIMEOUT_SECONDS,
    RedisCluster,
    RedisProcess,
    free_port,
    port_with_bus,
)
from tests.support.server_process import ServerProcess

MASTER = "main"
PASSWORD = "closed"
DOWN_MILLISECONDS = 400  # after which a Sentinel, or a node of a Cluster, is taken for dead


class Sentinel(ServerProcess):
    def __init__(self, directory: Path, master_port: int, quorum: int) -> None:
        super().__init__()
        self.port = free_port()
        directory.mkdir(parents=True)
        self._config = directory / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\nsentinel resolve-hostnames no\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {master_port} {quorum}\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_MILLISECONDS}\n"
            f"sentinel failover-timeout {MASTER} 6000\n"
        )

    def start(self) -> Sentinel:
        self._process = subprocess.Popen(
            [need_redis(), str(self._config), "--sentinel"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2.0)

    def state(self) -> dict[str, Any]:
        """Return what this Sentinel knows about the master; empty while it does not answer."""
        client = self.client()
        try:
            found: Any = client.sentinel_master(MASTER, return_responses=True)
            return dict(found)
        except (redis.RedisError, OSError):
            return {}
        finally:
            client.close()


class ReplicatedRedis:
    """A master with replicas; with Sentinels, which promote a replica, unless `sentinels` is 0."""

    def __init__(
        self,
        folder: Path,
        replicas: int = 1,
        sentinels: int = 3,
        program: str = "",
        **settings: str,
    ) -> None:
        self.servers = [
            RedisProcess(
                folder / f"redis{nth}", 0, program, repl_diskless_sync_delay="0", **settings
            )
            for nth in range(replicas + 1)
        ]
        self.master = self.servers[0]  # at first
        self.sentinels = [
            Sentinel(folder / f"sentinel{nth}", self.master.port, sentinels // 2 + 1)
            for nth in range(sentinels)
        ]

    @property
    def replicas(self) -> list[RedisProcess]:
        return self.servers[1:]

    @property
    def url(self) -> str:
        if not self.sentinels:
            return self.master.url
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{MASTER}"

    def start(self) -> ReplicatedRedis:
        for server in self.servers:
            server.start()
        for replica in self.replicas:
            replica.client().execute_command("REPLICAOF", "127.0.0.1", self.master.port)
        self.wait_until_level()
        for sentinel in self.sentinels:
            sentinel.start()
        until(self._is_watched, "the Sentinels do not find each other and the replicas")
        return self

    def wait_until_level(self) -> None:
        """Wait until every replica has what the master has now."""
        client = self.master.client()
        client.set("level", 1)
        count = len(self.replicas)
        until(lambda: int(client.wait(count, 500)) == count, "the replicas do not catch up")
        client.close()

    def _is_watched(self) -> bool:
        states = [sentinel.state() for sentinel in self.sentinels]
        return all(
            state.get("num-slaves") == len(self.replicas)
            and state["num-other-sentinels"] == len(self.sentinels) - 1
            and state["flags"] == "master"
            for state in states
        )

    def promoted(self) -> RedisProcess:
        """Wait until the Sentinels name another master than `master`, and return it."""
        until(lambda: len(self._named()) == 1 and self.master not in self._named(), "no promotion")
        return self._named()[0]

    def _named(self) -> list[RedisProcess]:
        ports = {sentinel.state().get("port") for sentinel in self.sentinels}
        return [server for server in self.servers if server.port in ports]

    def isolate_master(self) -> None:
        """Cut the master off from replicas and Sentinels, but not from its other clients.

        It asks for a password from now on, which existing connections do not need, and closes the
        connections of replicas and Sentinels.
        """
        client = self.master.client()
        client.config_set("requirepass", PASSWORD)
        with suppress(redis.ResponseError):
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        for found in client.client_list():
            if str(found["name"]).startswith("sentinel-"):
                client.client_kill_filter(_id=found["id"])
        client.close()

    def heal_master(self) -> None:
        client = redis.Redis(port=self.master.port, password=PASSWORD)
        client.config_set("requirepass", "")
        client.close()

    def stop(self) -> None:
        for process in (*self.sentinels, *self.servers):
            process.stop()


class ReplicatedCluster(RedisCluster):
    """A Redis Cluster of three masters, each with one replica, that fails over by itself."""

    def __init__(self, folder: Path, program: str = "", **settings: str) -> None:
        super().__init__(folder)
        self.nodes = [
            RedisProcess(
                folder / f"node{nth}",
                port_with_bus(),
                program,
                cluster_enabled="yes",
                cluster_node_timeout="1000",
                cluster_replica_validity_factor="0",
                repl_diskless_sync_delay="0",
                **settings,
            )
            for nth in range(6)
        ]
        self.url = "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> ReplicatedCluster:
        masters, replicas = self.nodes[:3], self.nodes[3:]
        self.nodes = masters
        super().start()
        self.nodes = [*masters, *replicas]
        for replica in replicas:
            replica.start().client().execute_command(
                "CLUSTER", "MEET", "127.0.0.1", masters[0].port
            )
        for master, replica in zip(masters, replicas):
            node_id = master.client().execute_command("CLUSTER", "MYID")
            client = replica.client()
            until(partial(_knows, client, node_id), "a node of the cluster is unknown")
            client.execute_command("CLUSTER", "REPLICATE", node_id)
        until(self._is_replicated, "the replicas of the cluster do not catch up")
        return self

    def _is_replicated(self) -> bool:
        links = [node.client().info("replication") for node in self.nodes[3:]]
        return all(one.get("master_link_status") == "up" for one in links) and all(
            node.client().execute_command("CLUSTER", "INFO").count(b"cluster_known_nodes:6")
            for node in self.nodes
        )

    def master_of(self, key: str, nodes: Sequence[RedisProcess] | None = None) -> RedisProcess:
        """Return the node that serves a key, as the first of `nodes` that answers sees it."""
        for asked in self.nodes if nodes is None else nodes:
            client = redis.Redis(port=asked.port, socket_timeout=1.0)
            try:
                slot = int(client.execute_command("CLUSTER", "KEYSLOT", key))
                ranges: list[list[Any]] = client.execute_command("CLUSTER", "SLOTS")
            except (redis.RedisError, OSError):
                continue
            finally:
                client.close()
            port = next(master[1] for first, last, master, *_ in ranges if first <= slot <= last)
            return next(node for node in self.nodes if node.port == port)
        raise AssertionError("no node of the cluster answers")


def _knows(client: redis.Redis, node_id: Any) -> bool:
    text = node_id if isinstance(node_id, str) else bytes(node_id).decode()
    return text in str(client.execute_command("CLUSTER", "NODES"))


def until(is_reached: Any, failure: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_reached():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)

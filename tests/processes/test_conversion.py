"""The data directory of one process is divided into cells when several processes open it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.client import Client
from tests.processes.node_of_processes import NodeOfProcesses
from tests.support.broker_process import same_build

PERSISTENT: dict[str, Any] = {"clean_start": False, "session_expiry": 600}
NAMES = [f"name-{nth}" for nth in range(12)]


async def fill(node: NodeOfProcesses) -> None:
    """Store everything that a broker stores, for many names."""
    async with asyncio.timeout(60), Client(port=node.port, client_id="writer") as writer:
        for name in NAMES:
            async with Client(port=node.port, client_id=name, **PERSISTENT) as session:
                await session.subscribe(f"mail/{name}", qos=1)
                await session.publish(f"$ECQ/w/{name}/k", name.encode(), qos=1)
            await writer.publish(f"mail/{name}", name.encode(), qos=1)
            await writer.publish(f"kept/{name}", name.encode(), qos=1, retain=True)
            for nth in range(3):
                await writer.publish(f"$queue/{name}", f"{name} {nth}", qos=1)
            async with writer.consumer(name, prefetch=1) as tasks:
                stream = aiter(tasks)
                await (await anext(stream)).ack()
                await (await anext(stream)).reject()


async def check(node: NodeOfProcesses) -> None:
    """Take everything that `fill` has stored."""
    listed = {one["name"]: one["total_messages"] for one in node.get("/api/v1/queues").json()}
    assert listed == {one: 1 for name in NAMES for one in (name, f"dlq/{name}")}
    assert node.get("/api/v1/verify").json() == []
    assert node.get("/api/v1/node").json()["retained"] == len(NAMES)
    assert len(node.get("/api/v1/ecq").json()) == len(NAMES)
    assert len(node.get("/api/v1/clients").json()) == len(NAMES)
    async with asyncio.timeout(60), Client(port=node.port, client_id="reader") as reader:
        await reader.subscribe("kept/#", qos=1)
        messages = reader.messages()
        assert {(await anext(messages)).payload.decode() for _ in NAMES} == set(NAMES)
        for name in NAMES:
            async with reader.consumer(name, group="writer") as tasks:
                task = await anext(aiter(tasks))
                assert task.text == f"{name} 2"
                await task.ack()
            async with Client(port=node.port, client_id=name, **PERSISTENT) as session:
                assert session.session_present
                assert (await anext(session.messages())).payload == name.encode()


def verify_offline(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "sluice", "verify", "--data", "data", "--json"]
    done = subprocess.run(command, cwd=folder, env=same_build(), capture_output=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("ending", ["stopped", "killed"])
async def test_everything_that_one_process_has_stored_is_in_the_cells(
    node: NodeOfProcesses, tmp_path: Path, ending: str
) -> None:
    broker = node.start(1, cells=0)
    await fill(node)
    if ending == "killed":
        broker.kill()
        node.broker = None
    else:
        node.stop()
    node.start(2)
    assert not list((tmp_path / "data").glob("*.log"))
    await check(node)
    node.stop()
    report = verify_offline(tmp_path)
    assert (report["queues"], report["faults"]) == (2 * len(NAMES), [])


async def test_crash_while_the_old_store_is_deleted_loses_and_repeats_nothing(
    node: NodeOfProcesses, tmp_path: Path
) -> None:
    node.start(1, cells=0)
    await fill(node)
    node.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "before")
    node.start(2)
    node.stop()
    for name in ("layout", "00000001.log"):
        shutil.copy(tmp_path / "before" / name, tmp_path / "data")
    (tmp_path / "data" / "conversion" / "cells").mkdir(parents=True)
    node.start(1, cells=0)
    await check(node)


async def test_queue_with_a_dead_letter_queue_in_another_cell_is_refused_before_any_change(
    node: NodeOfProcesses, tmp_path: Path
) -> None:
    node.start(1, cells=0)
    async with Client(port=node.port) as client:
        for name in NAMES:
            config = f'{{"name": "{name}", "dlq_config": {{"topic": "the-only"}}}}'
            await client.publish("$admin/queue/create", config, qos=1)
    node.stop()
    with pytest.raises(AssertionError, match="dlq_config names 'the-only', which is in another"):
        node.start(2)
    node.start(1, cells=0)
    assert len(node.get("/api/v1/queues").json()) >= len(NAMES)

"""`sluice worker` as a process, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.client import Client
from tests.support.broker_process import Broker, same_build

JOBS = """
import time
from sluice.worker import Worker

app = Worker(name="cli")

@app.task("cli/jobs", concurrency=1, reject=(KeyError,))
def job(text: str) -> None:
    print("began", text, flush=True)
    if text == "bad":
        raise KeyError("bad")
    while text == "long" and not stop:
        time.sleep(0.01)
    print("ended", text, flush=True)

stop = False

def see_the_stop(record) -> bool:
    global stop
    stop = stop or record.getMessage() == "stopping"
    return True

import logging
logging.getLogger("sluice.worker").addFilter(see_the_stop)
"""


class Process:
    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "jobs.py").write_text(JOBS)
        self.log = folder / "worker.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice", "worker", *arguments],
                cwd=folder,
                env=same_build(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def process(broker: Broker, tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path, "jobs:app", "--mqtt", str(broker.mqtt))
    yield made
    made.end()


async def test_worker_does_its_jobs_and_finishes_the_last_one_at_sigterm(
    broker: Broker, process: Process
) -> None:
    async with Client(broker.mqtt.host, broker.mqtt.port, client_id="cli-watch") as client:
        publisher = client.publisher("cli/jobs")
        await publisher.send("bad", key="k")
        await publisher.send("long", key="k")
        await publisher.send("left over", key="k")
        assert [process.read_line(), process.read_line()] == ["began bad", "began long"]
        assert process.end() == 0
        log = process.log.read_text()
        assert "job rejects" in log and "KeyError: 'bad'" in log
        assert "job takes jobs of cli/jobs in group cli, 1 at once" in log
        assert log.rstrip().endswith("stopped after 1 job")
        left = await client.consumer("cli/jobs", group="cli").take(30)
        assert left is not None and (left.text, left.attempt) == ("left over", 1)
        dead_letter = await client.consumer("dlq/cli/jobs", group="cli").take(30)
        assert (
            dead_letter is not None and dead_letter.headers["dead-description"] == "KeyError: 'bad'"
        )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing:app"], 2, "there is no module 'nothing' here"),
        (["jobs:other"], 2, "jobs has no Worker called 'other'"),
        (["jobs", "--log-level", "loud"], 2, "--log-level loud"),
    ],
)
def test_module_that_cannot_be_run_is_reported(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    process = Process(tmp_path, *arguments)
    assert process.process.wait(30) == code
    process.end()
    assert message in process.log.read_text()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n1 / 0\n", "sluice: broken.py:2: ZeroDivisionError: division by zero\n"),
        ("import nothing_here\n", "broken.py:1: ModuleNotFoundError: No module named"),
        ("def f(:\n", "broken.py:1: SyntaxError: invalid syntax"),
        (
            "from sluice.worker import Worker\napp = Worker(version=4)\n",
            "broken.py:2: a worker speaks MQTT 5.0 only\n  Leave version out",
        ),
    ],
)
def test_error_of_the_module_is_one_line_with_its_place(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    process = Process(tmp_path, "broken")
    assert process.process.wait(30) in (1, 2)
    process.end()
    log = process.log.read_text()
    assert message in log and "Traceback" not in log and len(log.splitlines()) == 2


SHARED = """
import os, time
from sluice.worker import Worker

app = Worker(name="shared")

@app.task("shared/jobs", concurrency=1)
def job(text: str) -> None:
    print(os.getpid(), text, flush=True)
    while text == "wait" and not os.path.exists("go"):
        time.sleep(0.01)
    print(os.getpid(), "done", flush=True)
"""


async def take_both_jobs(process: Process, folder: Path) -> set[int]:
    """Return the ids of the two processes that hold a job, after both jobs have ended."""
    lines = [await asyncio.to_thread(process.read_line) for _ in range(2)]
    assert all(line.endswith(" wait") for line in lines)
    (folder / "go").touch()
    assert all([(await asyncio.to_thread(process.read_line)).endswith(" done") for _ in range(2)])
    (folder / "go").unlink()
    pids = {int(line.split()[0]) for line in lines}
    assert len(pids) == 2
    return pids


async def test_processes_share_the_work_and_are_restarted(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    process = Process(tmp_path, "shared", "--processes", "2", "--mqtt", str(broker.mqtt))
    async with Client(broker.mqtt.host, broker.mqtt.port) as client:
        publisher = client.publisher("shared/jobs")
        await publisher.send_many(["wait", "wait"])
        pids = await take_both_jobs(process, tmp_path)
        os.kill(min(pids), signal.SIGKILL)
        await publisher.send_many(["wait", "wait"])
        seen = await take_both_jobs(process, tmp_path)
        assert max(pids) in seen and min(pids) not in seen
    assert process.end() == 0
    assert "worker process ended number=" in process.log.read_text()
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


RELOADED = """
from sluice.worker import Worker

app = Worker(name="reloaded")

@app.task("reloaded/{version}")
def job(text: str) -> None:
    print("{version}", text, flush=True)
"""


async def test_reload_runs_the_changed_module(broker: Broker, tmp_path: Path) -> None:
    module = tmp_path / "reloaded.py"
    module.write_text(RELOADED.format(version="one"))
    process = Process(tmp_path, "reloaded", "--reload", "--mqtt", str(broker.mqtt))
    async with Client(broker.mqtt.host, broker.mqtt.port) as client:
        for version in ("one", "two"):
            if version == "two":
                module.write_text("syntax error\n")  # waits for the next change
                module.write_text(RELOADED.format(version=version))
            await client.publisher(f"reloaded/{version}").send("x")
            assert await asyncio.to_thread(process.read_line) == f"{version} x"
    assert process.end() == 0


async def test_processes_stop_when_their_supervisor_is_killed(
    broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    process = Process(tmp_path, "shared", "--processes", "2", "--mqtt", str(broker.mqtt))
    async with Client(broker.mqtt.host, broker.mqtt.port) as client:
        await client.publisher("shared/jobs").send("x")
        pid = int((await asyncio.to_thread(process.read_line)).split()[0])
    assert pid != process.process.pid
    process.process.kill()
    process.process.wait()
    assert process.process.stdout is not None
    # The output ends when the last process that can write to it has ended.
    async with asyncio.timeout(30):
        await asyncio.to_thread(process.process.stdout.read)
    process.end()


async def test_wrong_module_ends_the_supervisor(tmp_path: Path) -> None:
    process = Process(tmp_path, "jobs:other", "--processes", "2")
    assert process.process.wait(60) == 2
    process.end()

"""`sluice worker` as a process, ended by SIGTERM."""

from __future__ import annotations

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
        assert log.rstrip().endswith("stopped after 1 jobs")
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


def test_exception_in_the_module_is_shown_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    process = Process(tmp_path, "broken")
    assert process.process.wait(30) == 1
    process.end()
    assert "ZeroDivisionError" in process.log.read_text()

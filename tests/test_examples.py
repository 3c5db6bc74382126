"""Each example is run against a real broker, as its reader would, and says what it is meant to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.brokers import StartBroker, same_build

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(start_broker: StartBroker, name: str, by_variable: bool = False) -> list[str]:
    broker = start_broker()
    told = [] if by_variable else [f"mqtt://{broker.mqtt}"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *told],
        env={**same_build(), "SLUICE_MQTT": str(broker.mqtt) if by_variable else "off"},
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in broker.log_text()
    return done.stdout.splitlines()


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text("utf-8")
    assert [one.name for one in EXAMPLES.glob("*.py") if f'"{one.name}"' not in here] == []


def test_hello_publish_subscribe(start_broker: StartBroker) -> None:
    assert run(start_broker, "hello_publish_subscribe.py") == ["greetings/world hello"]


def test_the_address_may_come_from_the_variable_that_the_command_line_reads(
    start_broker: StartBroker,
) -> None:
    assert run(start_broker, "hello_publish_subscribe.py", by_variable=True) == ["greetings/world hello"]


def test_task_queue(start_broker: StartBroker) -> None:
    said = run(start_broker, "task_queue.py")
    done = [line.partition(": ")[2] for line in said if line.endswith(" done")]
    failed = [line.rpartition(" ")[2] for line in said if "broken.png failed" in line]
    workers = {line.partition(": ")[0] for line in said if line.startswith("jobs-")}
    assert sorted(done) == ["cat.png done", "cow.png done", "dog.png done", "fox.png done", "hen.png done"]
    assert failed == ["1", "2", "3"]
    assert workers == {"jobs-1", "jobs-2"}
    assert said[-2:] == ["dead letter: broken.png, max_retries, not an image", "5 jobs done, 1 dead"]

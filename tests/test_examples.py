"""Each example is run against a real broker, as its reader would, and says what it is meant to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import StartBroker, same_build
from tests.services import need_program

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


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_spark_pipeline(start_broker: StartBroker) -> None:
    need_program("java")
    broker = start_broker()
    addresses = {"SLUICE_MQTT": f"mqtt://{broker.mqtt}", "SLUICE_URL": f"http://{broker.address('http')}"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spark_pipeline.py")],
        env={**same_build(), **addresses, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"},  # short runs
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("the report is ")]
    assert said == [
        "3 devices published 60 orders: 54 shipped, 6 dead",
        "archived 60 messages",
        "6 dead letters: weight is not a number (max_retries)",
        "repaired and put back 6: 6 shipped",
        "archived 6 more",
        "published 60, acked 60, dead 0, archived 60",
        "nothing is missing, nothing is double",
    ]

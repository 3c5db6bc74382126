"""Run each example against a real broker and compare its output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker_process import Broker, StartBroker, same_build
from tests.support.doc_pages import PAGES, commands
from tests.support.external_programs import (
    NODE_MODULES,
    QUICK_JAVA,
    need_node_package,
    need_program,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start one broker for all examples; each has its own queue. Webhooks may use loopback."""
    running = Broker(
        tmp_path_factory.mktemp("broker"), '[webhooks]\nallow = ["127.0.0.0/8"]\n', (), {}
    )
    yield running
    running.stop()
    assert "Traceback" not in running.log_text()


def run(broker: Broker, name: str, *arguments: str, by_variable: bool = False) -> list[str]:
    program = need_program("node") if name.endswith(".js") else sys.executable
    words = [] if by_variable else [f"mqtt://{broker.mqtt}", *arguments]
    done = subprocess.run(
        [program, str(EXAMPLES / name), *words],
        env={
            **same_build(),
            "SLUICE_MQTT": str(broker.mqtt) if by_variable else "off",
            "NODE_PATH": str(NODE_MODULES),
        },
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# tests/docs/test_guide_pages.py runs these with the page of their use case, output included.
ON_A_PAGE = (
    "consumer_paho.py",
    "dead_letter_watch.py",
    "from_plain_topics.py",
    "from_shared_subscription.py",
    "request_response.py",
)


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text("utf-8")
    assert [
        one.name for one in EXAMPLES.iterdir() if one.is_file() and f'"{one.name}"' not in here
    ] == []
    reported = "".join(
        script for page in PAGES if "use-cases" in page for script, _ in commands(page)
    )
    assert [name for name in ON_A_PAGE if f"python examples/{name}" not in reported] == []


def test_hello_publish_subscribe(broker: Broker) -> None:
    assert run(broker, "hello_publish_subscribe.py") == ["greetings/world hello"]


def test_address_may_come_from_the_command_line_variable(broker: Broker) -> None:
    assert run(broker, "hello_publish_subscribe.py", by_variable=True) == ["greetings/world hello"]


def test_task_queue(broker: Broker) -> None:
    output = run(broker, "task_queue.py")
    done = [line.partition(": ")[2] for line in output if line.endswith(" done")]
    failed = [line.rpartition(" ")[2] for line in output if "broken.png failed" in line]
    workers = {line.partition(":")[0] for line in output if line.startswith("worker")}
    assert sorted(done) == sorted(f"image-{number}.png done" for number in range(19))
    assert failed == ["1", "2", "3"]
    assert len(workers) > 1
    assert output[-2:] == [
        "dead letter: broken.png, max_retries, ValueError: not an image",
        "19 jobs done, 1 dead",
    ]


def test_user_events(broker: Broker) -> None:
    output = run(broker, "user_events.py")
    assert "bob paid, attempt 3" in output and len(output) == 10
    assert output.index("bob paid, attempt 3") < output.index("bob left, attempt 1")
    assert output[-1] == "in order: True"


def test_consumer_mqttjs(broker: Broker) -> None:
    need_node_package("mqtt")
    output = run(broker, "consumer_mqttjs.js")
    assert sorted(output) == ["resize cat.png, attempt 1", "resize dog.png, attempt 1"]


@pytest.mark.spark
@pytest.mark.own_java
@pytest.mark.timeout(240)
def test_spark_pipeline(start_broker: StartBroker) -> None:
    need_program("java")
    broker = start_broker()
    addresses = {
        "SLUICE_MQTT": f"mqtt://{broker.mqtt}",
        "SLUICE_URL": f"http://{broker.address('http')}",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spark_pipeline.py")],
        env={**same_build(), **addresses, "JAVA_TOOL_OPTIONS": QUICK_JAVA},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    output = [line for line in done.stdout.splitlines() if not line.startswith("the report is ")]
    assert output == [
        "3 devices published 60 orders: 54 shipped, 6 dead",
        "starting Spark, which takes a moment ...",
        "archived 60 messages",
        "6 dead letters: weight is not a number (max_retries)",
        "repaired and put back 6: 6 shipped",
        "published 60, acked 60, dead 0, archived 60",
        "nothing is missing, nothing is double",
    ]


def test_publisher(broker: Broker) -> None:
    published, refused = run(broker, "publisher.py")
    assert published == "published 7 orders"
    assert "is full" in refused and "0x97" in refused


def test_last_values(broker: Broker) -> None:
    output = run(broker, "last_values.py")
    assert output[:4] == [
        "speed = 110, sequence 3",
        "lights/left = on, sequence 4",
        "window = (deleted), sequence 6",
        "again, after a reconnect",
    ]
    assert [line.partition(",")[0] for line in output[4:]] == [
        "speed = 110",
        "lights/left = on",
        "window = (deleted)",
    ]


def test_consumer_311(broker: Broker) -> None:
    output = run(broker, "consumer_311.py")
    assert sorted(output) == [
        "locked.png, attempt 1: $nack",
        "locked.png, attempt 2: $ack",
        "nonsense, attempt 1: $reject",
        "resize cat.png, attempt 1: $ack",
    ]

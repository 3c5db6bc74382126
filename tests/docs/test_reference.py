"""docs/reference.md says what the code says: topics, properties, reason codes, `$SYS`."""

from __future__ import annotations

import re
from pathlib import Path

from sluice.broker import queue_topics
from sluice.client import Client
from sluice.queues.flow import dead_letters
from sluice.wire import reasons
from tests.support.broker_process import StartBroker

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/sluice"
PAGE = (ROOT / "docs/reference.md").read_text("utf-8")


def source(name: str) -> str:
    return (SOURCES / name).read_text("utf-8")


def first_cells(heading: str) -> list[str]:
    """The first cell of each row of the table below a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [
        row.split(" | ", 1)[0].removeprefix("| ")
        for row in section.splitlines()
        if row.startswith("| `")
    ]


def names(heading: str) -> set[str]:
    return {name for cell in first_cells(heading) for name in re.findall(r"`([^`]+)`", cell)}


def queue_options_read(function: str) -> set[str]:
    """The user properties that a function of queue_options.py reads."""
    text = source("broker/namespaces/queues/queue_options.py").split(function, 1)[1]
    return set(re.findall(r'name == "([a-z-]+)"', re.split(r"\n *def ", text, maxsplit=1)[0]))


def test_queue_verbs_are_exactly_those_of_the_page() -> None:
    reported = {verb for topic in names("Topics") for verb in re.findall(r"<q>/(\$\w+)", topic)}
    assert reported == {verb.decode() for verb in queue_topics._VERBS}


def test_every_other_special_topic_is_documented() -> None:
    reported = names("Topics")
    for line in re.findall(
        r"^(\$\S+)",
        source("broker/namespaces/admin_topics.py")
        + source("broker/namespaces/compacted/handler.py"),
        re.M,
    ):
        assert line in reported
    assert {
        "$queue/responses/<id>",
        "$queue/dlq/<q>",
        "$share/<g>/<filter>",
        "$SYS/broker/...",
    } <= reported


def test_publish_properties_are_those_of_the_page() -> None:
    reader = (
        source("broker/queue_topics.py")
        .split("def read_publish_options", 1)[1]
        .split("\ndef ", 1)[0]
    )
    read = set(re.findall(r'b"([a-z-]+)"', reader))
    read |= queue_options_read("def read_then(")  # by an ack, after the verb is known
    assert names("Properties of a publish") | names("Properties of a settlement") == read


def test_subscribe_properties_are_those_of_the_page() -> None:
    read = queue_options_read("def _set_option(")
    assert names("Properties of a subscribe") == read


def test_delivery_properties_are_those_of_the_page() -> None:
    text = source("broker/namespaces/queues/queue_consumer.py")
    written = set(re.findall(r'Final = b"\\x26\\x00\\x[0-9a-f]{2}([a-z-]+)(?:"|\\x)', text))
    written |= set(re.findall(r'encode_user_property\(\s*b"([a-z-]+)"', text))
    assert len(written) >= 8
    assert names("Properties of a delivery") == written


def test_dead_letter_properties_are_those_of_the_page() -> None:
    cells = first_cells("Properties of a dead letter")
    assert {
        name for cell in cells for name in re.findall(r"`([^`]+)`", cell)
    } == dead_letters._DEAD_LETTER_HEADERS


def test_reason_codes_are_exactly_those_of_the_page_with_a_remedy() -> None:
    constants = {
        name: value
        for name, value in vars(reasons).items()
        if name.isupper() and isinstance(value, int)
    }
    given: set[int] = set()
    for path in [
        *SOURCES.glob("broker/**/*.py"),
        *SOURCES.glob("access/**/*.py"),
        SOURCES / "errors.py",
    ]:
        text = re.sub(r"^from .* import (\([^)]*\)|.*)$", "", path.read_text("utf-8"), flags=re.M)
        given |= {value for name, value in constants.items() if re.search(rf"\b{name}\b", text)}
        given |= {int(code, 16) for code in re.findall(r"reason(?:: int)? = (0x\w\w)\b", text)}
    reported = re.findall(r"^\| (0x[0-9A-F]{2}) \| [^|]+ \| [^|]+ \| [^|]+ \|$", PAGE, re.M)
    assert reported == sorted(reported)
    assert {int(code, 16) for code in reported} == given - {reasons.SUCCESS}


async def test_sys_topics_are_those_of_the_page(start_broker: StartBroker) -> None:
    broker = start_broker('[mqtt]\nsys_interval = "1s"\n')
    reported = names("`$SYS/broker/`") - {"sluice 0.1.0", "86400 seconds"}
    wanted = {name for name in reported if not name.endswith("/+")}
    wanted |= {
        f"{name[:-1]}{span}"
        for name in reported
        if name.endswith("/+")
        for span in ("1min", "5min", "15min")
    }
    seen: set[str] = set()
    async with Client.from_url(f"mqtt://{broker.mqtt}", client_id="looker") as client:
        await client.subscribe("$SYS/broker/#", qos=0)
        async for message in client.messages():
            seen.add(message.topic.removeprefix("$SYS/broker/"))
            if seen >= wanted and any(name.startswith("load/") for name in seen):
                break
    assert seen == wanted

"""Tests of the test kit, as applications use it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from sluice.client import Client, PublishRefused
from sluice.errors import UnknownGroup, UnknownQueue
from sluice.testing import VirtualBroker
from sluice.worker import Worker
from tests.support.broker_process import same_build

ROOT = Path(__file__).parents[2]

USERS_TEST = """
import pytest
from sluice.worker import Worker

app = Worker(name="reports")
attempts = []

@app.task("reports")
async def report(payload: dict) -> None:
    attempts.append(payload["id"])
    raise OSError("the printer is out")

@pytest.mark.sluice(queues={"reports": {"retry_policy": {"max_retries": 50}}})
async def test_a_report_is_given_up_after_three_hours(sluice_broker):
    async with sluice_broker.working(app):
        await sluice_broker.publish("reports", {"id": 1})
        await sluice_broker.advance(hours=2, minutes=59)
        assert sluice_broker.dead_letters("reports") == []
        await sluice_broker.advance(minutes=10)
    [dead] = sluice_broker.dead_letters("reports")
    assert dead.reason == "timeout"
    assert dead.description == "OSError: the printer is out"
    assert len(attempts) > 30
"""


def test_users_test_of_a_three_hour_schedule_passes(tmp_path: Path) -> None:
    (tmp_path / "test_reports.py").write_text(USERS_TEST)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\naddopts = --strict-markers -p sluice.pytest_plugin "
        "-p pytest_asyncio.plugin -p no:cacheprovider\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path,
        env={**same_build(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_pytest_finds_the_fixture_automatically() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        entry = tomllib.load(file)["project"]["entry-points"]["pytest11"]["sluice"]
    assert hasattr(import_module(entry), "sluice_broker")


async def test_queues_are_configured_by_name_or_pattern() -> None:
    broker = VirtualBroker(queues={"small/#": {"limits": {"max_queue_depth": 1}}})
    async with broker.client() as client:
        await client.publisher("small/a").send("1")
        await client.publisher("large").send_many(["1", "2"])
        confirm = client.publisher("small/a").send_nowait("2")
        with pytest.raises(PublishRefused):
            await confirm
    assert confirm.reason == 0x97
    assert (broker.depth("small/a"), broker.depth("large")) == (1, 2)


async def test_misspelled_queue_or_group_is_an_error(sluice_broker: VirtualBroker) -> None:
    await sluice_broker.publish("orders", b"x")
    for inspect in (sluice_broker.depth, sluice_broker.messages, sluice_broker.dead_letters):
        with pytest.raises(UnknownQueue, match="oders"):
            inspect("oders")
    with pytest.raises(UnknownQueue, match="oders"):
        sluice_broker.ledger("oders", "w")
    with pytest.raises(UnknownGroup, match="w"):
        sluice_broker.ledger("orders", "w")


async def test_ledger_is_readable_in_a_failed_assertion(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    @app.task("jobs")
    async def job(payload: dict) -> None:
        pass

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", {"n": 1})
        await sluice_broker.settle()
    assert repr(sluice_broker.ledger("jobs", "w")) == (
        "Ledger(enqueued=1, waiting=0, delivered=0, retrying=0, acked=1, dead=0, expired=0,"
        " purged=0, cancelled=0)"
    )


async def test_time_stands_still_until_advanced(sluice_broker: VirtualBroker) -> None:
    began = sluice_broker.time.now
    await sluice_broker.publish("jobs", b"x")
    assert sluice_broker.time.now == began
    await sluice_broker.advance("1d", hours=1)
    assert sluice_broker.time.now == began + 90_000


async def test_other_clients_connect_through_a_port(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.listening() as port, Client("127.0.0.1", port) as client:
        await client.publisher("jobs").send("over tcp")
    assert [one.payload for one in sluice_broker.messages("jobs")] == [b"over tcp"]


async def test_ledger_is_checked_and_messages_can_be_explained(
    sluice_broker: VirtualBroker,
) -> None:
    app = Worker(name="w")

    @app.task("jobs", reject=ValueError)
    async def job(payload: dict) -> None:
        raise ValueError("bad")

    async with sluice_broker.working(app):
        name = await sluice_broker.publish("jobs", {"n": 1}, key="k")
        await sluice_broker.settle()
    [dead_letter] = sluice_broker.dead_letters("jobs")
    assert (dead_letter.json(), dead_letter.key, dead_letter.reason, dead_letter.attempts) == (
        {"n": 1},
        "k",
        "rejected",
        1,
    )
    assert dead_letter.original_id == name
    assert sluice_broker.faults() == []


def test_kit_is_imported_lazily() -> None:
    code = "import sys, sluice.pytest_plugin; sys.exit('sluice.broker' in sys.modules)"
    env = {**os.environ, **same_build()}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=30).returncode == 0


async def test_virtual_clock_runs_schedules() -> None:
    broker = VirtualBroker({"reports": {"limits": {"message_ttl": "0s"}}})
    await broker.schedule("daily", "reports", "go", cron="0 6 * * *")
    await broker.advance("30d")
    ids = [one.id for one in broker.messages("reports")]
    assert len(ids) == len(set(ids)) == 30 and all(one.startswith("daily@") for one in ids)

"""`sluice bench` as a user runs it: tiny scenarios, the JSON document, the chart, warnings,
interrupts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.bench import scenarios
from sluice.bench.machine import Disk, cpu_model, filesystem_of
from sluice.bench.procfs import process_tree
from sluice.bench.results import Result
from sluice.cli.commands.bench import SCENARIO_NAMES
from sluice.cli.root import app
from tests.support.broker_process import Broker, same_build

pytestmark = pytest.mark.timeout(150)  # whole processes, on busy machines
TIMEOUT_SECONDS = 120.0
ROWS = [
    *("pubsub", "queue", "strict", "fan-out", "compacted"),
    *("backlog fill", "backlog drain", "many-queues", "idle", "latency"),
]


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", "bench", *arguments],
        env={**same_build(), "SLUICE_TRACEBACK": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def measured(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all scenarios with two generator processes, against a running broker."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench(
        *(
            "--url",
            f"mqtt://{broker.mqtt}",
            "--pid",
            str(broker.process.pid),
            "--json",
            "--plot",
            "all.svg",
        ),
        *("--messages", "200", "--generators", "2", "--connections", "100", "--payload", "100"),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    document["picture"] = (folder / "all.svg").read_text()
    document["stderr"] = done.stderr
    return document


@pytest.mark.parametrize("name", ROWS)
def test_scenario_loses_duplicates_and_reorders_nothing(
    name: str, measured: dict[str, Any]
) -> None:
    [row] = [each for each in measured["results"] if each["scenario"] == name]
    assert row["whole"]
    assert (row["lost"], row["doubled"], row["disordered"], row["refused"]) == (0, 0, 0, 0)
    assert row["messages"] >= 100
    assert row["per_second"] > 0
    assert row["per_cpu_second"] > 0
    if name not in ("idle", "backlog drain"):
        assert (
            0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p99"] <= row["latency_ms"]["p99.9"]
        )


def test_report_contains_machine_settings_and_every_row(measured: dict[str, Any]) -> None:
    assert [row["scenario"] for row in measured["results"]] == ROWS
    assert measured["machine"]["cores"] >= 1
    assert measured["machine"]["build"] in ("compiled", "interpreted")
    assert measured["durability"] == "sync"
    assert measured["broker"] == {"ours": False, "seen": True}
    assert measured["disk"] is None
    assert measured["settings"]["payload"] == 100
    rows = {row["scenario"]: row for row in measured["results"]}
    assert "memory_bytes_per_connection" in rows["idle"]["facts"]
    assert "memory_bytes_per_message" in rows["backlog fill"]["facts"]
    assert rows["latency"]["facts"]["sent_late_ms_p50"] >= 0
    assert "sluice queue delete" in measured["stderr"]


def test_chart_has_every_row_and_is_well_formed(measured: dict[str, Any]) -> None:
    root = ElementTree.fromstring(measured["picture"])
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word in ROWS] == ROWS


def test_own_broker_with_memory_store_warns_and_leaves_nothing_behind(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if filesystem_of(memory) != "tmpfs" or not os.access(memory, os.W_OK):
        pytest.skip("there is no tmpfs here")
    data = memory / f"sluice-{os.getpid()}"
    done = bench(
        "queue",
        "--messages",
        "100",
        "--data",
        str(data),
        "--durability",
        "interval",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "the data is on tmpfs, which is memory" in done.stdout
    assert "tmpfs; one fdatasync" in done.stdout
    assert "interval: a publish to a queue is answered after the write" in done.stdout
    assert "queue: durable queue, 4 publishers" in done.stdout
    assert not data.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_process_and_no_directory(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice", "bench", "queue", "--seconds", "600"],
            env=same_build(),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        end = time.monotonic() + TIMEOUT_SECONDS
        while len(below := process_tree(process.pid)) < 3 and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.05)
        assert len(below) >= 3  # itself, a broker and a generator
        end = time.monotonic() + TIMEOUT_SECONDS
        process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, stderr
    assert stderr == b""
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < end:
        time.sleep(0.05)  # an ended process exists until it is reaped
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pubsup"], 2, "there is no scenario 'pubsup'"),
        (["--durability", "never"], 2, "Use sync or interval"),
        (["--url", "http://127.0.0.1:8080"], 2, "--url is not the MQTT address of a broker"),
        (["--pid", "1"], 2, "--pid is the process of the broker that --url names"),
        (["--url", "mqtt://127.0.0.1", "--data", "x"], 2, "Leave one of them out"),
        (["--url", "mqtt://127.0.0.1", "--pid", "4194305"], 2, "there is no process 4194305 here"),
        (["--plot", "figures.xlsx"], 2, "Name a file that ends in .svg"),
        (["--plot", "nowhere/figures.svg"], 2, "in a directory that is there"),
        (["queue", "--data", "/proc/nowhere"], 1, "--data"),
        (["pubsub", "--url", "mqtt://127.0.0.1:1"], 4, "no connection"),
    ],
)
def test_impossible_measurement_is_refused(arguments: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--messages", "10", *arguments])
    assert done.exit_code == code
    assert words in done.stderr


def test_unreadable_broker_cpu_is_reported_and_a_loss_exits_with_5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose_messages(bench: scenarios.Bench) -> list[Result]:
        return [
            Result(
                "pubsub",
                "plain topics",
                messages=10,
                seconds=1.0,
                per_second=10.0,
                lost=3,
                doubled=1,
            )
        ]

    monkeypatch.setitem(scenarios.SCENARIOS, "pubsub", lose_messages)
    done = CliRunner().invoke(app, ["bench", "pubsub", "--url", "mqtt://user:secret@127.0.0.1"])
    assert done.exit_code == 5
    assert "CPU and memory of the broker cannot be seen" in done.stdout
    assert "3 lost, 1 doubled" in done.stdout
    assert "these figures are worth nothing" in done.stderr
    assert "secret" not in done.output


def test_help_lists_the_existing_scenarios() -> None:
    assert tuple(scenarios.SCENARIOS) == SCENARIO_NAMES


def test_file_system_is_that_of_the_nearest_mount_point(tmp_path: Path) -> None:
    here = os.path.realpath(tmp_path)
    mounts = f"root / ext4 rw 0 0\nnone {here} tmpfs rw 0 0\nother {here}x xfs rw 0 0\n"
    assert filesystem_of(tmp_path, mounts) == "tmpfs"
    assert filesystem_of(tmp_path.parent, mounts) == "ext4"
    assert Disk("tmpfs", 0.0, 0.0, 200).is_memory and not Disk("xfs", 1.0, 2.0, 200).is_memory


def test_cpu_without_a_name_is_called_by_its_architecture() -> None:
    assert cpu_model("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n") == "Some CPU @ 3 GHz"
    assert cpu_model("processor : 0\n")

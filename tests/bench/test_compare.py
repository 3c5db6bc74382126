"""`bench/compare`: ratios with their spread, tables between their marks, missing peers."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker_process import same_build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def comparison() -> Iterator[Any]:
    """Import its modules as the script does."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "bench"))


def line(case: str, target: str, nth: int, figure: float, **more: object) -> dict[str, object]:
    return {"case": case, "target": target, "round": nth, "msgs_per_cpu_s": figure, **more}


LINES = [
    *(
        line("q1k", "sluice", nth, figure, delivered=10)
        for nth, figure in enumerate((100.0, 80.0, 120.0))
    ),
    *(
        line("q1k", "redis-always", nth, figure, order_viol=2)
        for nth, figure in enumerate((50.0, 80.0, 40.0))
    ),
    line("q1k", "nats-js", 0, 200.0),
    {"case": "q1k", "target": "nats-js", "round": 1, "error": "timeout"},
    line("lat_q", "sluice", 0, 1.0, p50_us=500, p99_us=1200),
    line("jobs", "Sluice, coroutine", 0, 9000.0),
    line("jobs", "Huey", 0, 3000.0),
]


def test_ratio_is_the_median_of_per_round_ratios_with_its_spread(comparison: Any) -> None:
    rows = comparison("comparison.ratios").Rows(LINES)
    ratio = rows.ratio("q1k", "sluice", "redis-always")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert str(ratio) == "2.00 (1.00..3.0)"
    assert (
        str(rows.ratio("q1k", "sluice", "nats-js")) == "0.50 (0.50..0.50)"
    )  # only the round that both have
    assert rows.ratio("q1k", "sluice", "mosquitto") is None
    assert [failed["error"] for failed in rows.failed] == ["timeout"]


def test_tables_show_figures_ratios_guarantees_and_omissions(comparison: Any) -> None:
    page = comparison("comparison.page")
    made = page.tables(
        comparison("comparison.ratios").Rows(LINES), ["a machine"], ["x is not installed"], "x.svg"
    )
    assert made.startswith("* a machine\n* x is not installed\n")
    assert "![Ratios of messages per second of CPU, Sluice to each peer](x.svg)" in made
    assert (
        "| 4 publishers, 4 consumers, 1 KB (`q1k`) | 100 | 50<br>2.00 (1.00..3.0) |"
        " 200<br>0.50 (0.50..0.50) |" in made
    )
    assert "| Redis Streams, always | after fdatasync | 0 | 0 | 0 | 6 |" in made
    assert "| Sluice | 0.50 | 1.20 | 1.20 |" in made
    assert "| Huey | 3,000 | 3.0 (3.0..3.0) |" in made
    assert "Plain MQTT" not in made  # not measured


def test_tables_are_inserted_between_the_markers_and_the_prose_stays(comparison: Any) -> None:
    page = comparison("comparison.page")
    before = f"# Title\n\n{page.BEGIN}\nold\n{page.END}\n\nprose\n"
    after = page.replace_between_marks(before, "new\n")
    assert after == f"# Title\n\n{page.BEGIN}\n\nnew\n\n{page.END}\n\nprose\n"
    assert page.replace_between_marks(after, "new") == after
    with pytest.raises(SystemExit, match="no place for the tables"):
        page.replace_between_marks("# Title", "new")
    assert page.BEGIN in (ROOT / "docs/performance.md").read_text("utf-8")


def test_chart_shows_every_peer_of_a_case(comparison: Any) -> None:
    groups = comparison("comparison.page").groups(comparison("comparison.ratios").Rows(LINES))
    root = ElementTree.fromstring(comparison("comparison.chart").draw(groups))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Redis Streams, always", "NATS JetStream", "Huey", "2x", "0.50x"} <= set(words)


def test_missing_peer_is_named_with_install_instructions(
    comparison: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = comparison("comparison.peers")
    monkeypatch.setenv("PATH", str(tmp_path))
    here, left_out = peers.split()
    assert here == []
    assert "nats-server is not installed, and left out: `apt install nats-server`" in left_out
    assert len(left_out) == 4  # one line for each program, not for each way to use it
    libraries, missing, _ = peers.split_libraries(sys.executable)
    assert len(libraries) + len(missing) == 4
    assert all(re.search("left out: `pip install '.+'`$", line) for line in missing)


FAKE_HARNESS = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for target in given["--targets"].split(","):
    if target == "nats-js":
        sys.exit("broker exited with 1")
    with open(given["--json"], "a") as out:
        out.write(json.dumps({"case": given["--cases"], "target": target, "round": 0}) + "\\n")
"""


def test_peer_that_does_not_start_is_left_out_and_the_others_are_measured_again(
    comparison: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.py").write_text(FAKE_HARNESS)
    targets = ["sluice", "nats-js", "mosquitto"]
    run = comparison("comparison.running").run_brokers
    lines = run(tmp_path, tmp_path, tmp_path, targets, ["q1k"], 1, 1.0)
    assert [line["target"] for line in lines] == ["sluice", "mosquitto"]
    assert "nats-js does not start, and is left out" in capfd.readouterr().err


def test_folder_that_is_not_the_harness_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "comparison", "--harness", str(tmp_path)],
        env={
            **same_build(),
            "PYTHONPATH": os.pathsep.join([same_build()["PYTHONPATH"], str(ROOT / "bench")]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "is not the load harness" in done.stderr

"""Runs the fuzzers with a few inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broker_process import same_build

FUZZERS = Path(__file__).parents[2] / "fuzz"


@pytest.mark.parametrize(
    "command",
    [
        ["fuzz_arrow.py"],
        ["fuzz_config.py"],
        ["fuzz_link.py"],
        ["fuzz_store.py", "notes"],
        ["fuzz_store.py", "snapshots"],
        ["fuzz_wire.py"],
    ],
    ids=" ".join,
)
def test_fuzzer_runs_and_finds_nothing(command: list[str]) -> None:
    name, *target = command
    done = subprocess.run(
        [sys.executable, str(FUZZERS / name), *target, "--inputs", "300", "--seed", "7"],
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("300 inputs, ")

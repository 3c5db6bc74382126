"""The memory of a broker that has nothing to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.serve import build
from tests.support.broker_process import StartBroker, same_build

IDLE_MB = 64.0  # resident, all APIs open and unused; 57 MB when it was set

# Libraries of several megabytes that an idle broker does not use, and other commands.
RARE_LIBRARIES = (
    "fastapi", "uvicorn", "grpc", "prometheus_client", "httpx", "jsonschema_rs", "redis", "jwt",
    "picows", "rich", "pyarrow", "sluice.client", "sluice.cli.commands",
)  # fmt: skip


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(build() != "compiled", reason="the bar is for the compiled build")
def test_idle_broker_stays_within_its_memory(start_broker: StartBroker) -> None:
    assert resident_mb(start_broker().process.pid) < IDLE_MB


def test_broker_does_not_load_libraries_that_only_some_need() -> None:
    program = (
        "import sys, sluice.cli.serve, sluice.config.sources, sluice.app\n"
        f"print(*[name for name in {RARE_LIBRARIES} if name in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env=same_build(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "\n", loaded.stdout

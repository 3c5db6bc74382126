"""What several benchmarks share: a broker of its own process, and cases of the load harness.

`sluice` is the command on the PATH, or $SLUICE.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any


def start_broker(
    folder: str, core: str = "", config: str = "", grpc: str = "off"
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start a broker on one core, or any; return its process and the facts of its ready line.

    `config` is the text of its configuration file.
    """
    file = Path(folder) / "sluice.toml"
    file.write_text(config)
    process = subprocess.Popen(
        [
            *(("taskset", "-c", core) if core else ()),
            *shlex.split(os.environ.get("SLUICE", "sluice")),
            *("serve", "--config", str(file), "--data", f"{folder}/data", "--log-level", "warning"),
            *("--mqtt", "127.0.0.1:0", "--http", "127.0.0.1:0", "--grpc", grpc),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    if "ready" not in ready:
        raise SystemExit("the broker did not start")
    return process, dict(fact.split("=", 1) for fact in ready.split() if "=" in fact)


def run_case(
    mqload: str, arguments: list[str], facts: dict[str, str], options: Any
) -> dict[str, Any]:
    done = subprocess.run(
        [
            *("taskset", "-c", options.gen_core, mqload, *arguments),
            *(
                "--port",
                facts["mqtt"].rpartition(":")[2],
                "--mqtt",
                "5",
                "--topic",
                "$queue/bench/q1",
            ),
            *(
                "--ack",
                "topic",
                "--cid",
                "bench",
                "--secs",
                str(options.secs),
                "--pid",
                facts["pid"],
            ),
        ],
        capture_output=True,
        text=True,
        timeout=options.secs * 10 + 60,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"mqload said nothing: {done.stderr.strip()}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures

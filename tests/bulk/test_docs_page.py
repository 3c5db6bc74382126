"""The programs and commands of docs/bulk.md run as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from tests.support.broker_process import StartBroker, same_build
from tests.support.doc_pages import steps


def test_programs_of_the_page_write_and_read(start_broker: StartBroker, tmp_path: Path) -> None:
    root = f"http://{start_broker().address('http')}"

    def run(*command: str) -> str:
        done = subprocess.run(
            [*command[:-1], command[-1].replace("http://127.0.0.1:8080", root)],
            env=same_build(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=40,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (_, commands, _), (_, reader, _), (_, writer, _) = steps("docs/bulk.md")
    python = (sys.executable, "-c")
    assert (
        run(*python, writer) == "{'committed': True, 'rows': 2, 'replayed': False, 'skipped': 0}\n"
    )
    assert (
        run(*python, writer) == "{'committed': True, 'rows': 2, 'replayed': True, 'skipped': 0}\n"
    )
    once = reader.replace("while True:", "for _ in range(1):")  # read once
    assert once != reader
    assert sum(int(line.split()[0]) for line in run(*python, once).splitlines()) == 2
    assert '"earliest":' in run("bash", "-ec", commands)
    with pa.ipc.open_stream((tmp_path / "rows.arrow").read_bytes()) as rows:
        assert {"value", "key", "sequence"} <= set(rows.schema.names)

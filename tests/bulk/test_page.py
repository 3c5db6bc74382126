"""The programs of docs/bulk.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.brokers import StartBroker, same_build

PAGE = Path(__file__).parents[2] / "docs" / "bulk.md"


def run(program: str, root: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8080", root)],
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_programs_of_the_page_write_and_read(start_broker: StartBroker) -> None:
    reader, writer = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    root = f"http://{start_broker().address('http')}"
    assert run(writer, root) == "{'committed': True, 'rows': 2, 'replayed': False, 'skipped': 0}\n"
    assert run(writer, root) == "{'committed': True, 'rows': 2, 'replayed': True, 'skipped': 0}\n"
    once = reader.replace("while True:", "for _ in range(1):")
    assert once != reader
    found = run(once, root)
    assert sum(int(line.split()[0]) for line in found.splitlines()) == 2
    commands = re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    done = subprocess.run(
        ["bash", "-c", commands.splitlines()[0].replace("http://127.0.0.1:8080", root)],
        capture_output=True,
        timeout=20,
    )
    assert b'"earliest":' in done.stdout

"""The commands of docs/rest.md do what the page says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.broker_process import Broker
from tests.support.doc_pages import ROOT, commands
from tests.support.external_programs import need_program

PAGE = "docs/rest.md"
BULK = "/api/v1/bulk"  # documented in docs/bulk.md


def test_commands_of_the_page_work(broker: Broker, tmp_path: Path) -> None:
    """In order: later commands use what earlier ones created."""
    need_program("curl")
    for script, output in commands(PAGE):
        done = subprocess.run(
            ["bash", "-c", script.replace("127.0.0.1:8080", str(broker.address("http")))],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=40,
        )
        lines = re.sub(r"\}\{", "}\n{", done.stdout).splitlines()
        assert len(lines) == len(output.splitlines()), done.stdout
        for line, pattern in zip(lines, output.splitlines(), strict=True):
            words = re.escape(pattern).replace(re.escape("..."), ".*")
            assert re.fullmatch(words, line), f"{line!r} is not {pattern!r}"


def test_table_of_the_page_lists_every_route(broker: Broker) -> None:
    spec = httpx.get(f"http://{broker.address('http')}/openapi.json", timeout=30).json()
    page = (ROOT / PAGE).read_text("utf-8")
    reported = {
        (
            method,
            re.sub(r"\?.*", "", path.replace("...", "/queues/{name}")).replace(
                "{id}", "{message_id}"
            ),
        )
        for method, path in re.findall(
            r"`(GET|POST|PUT|DELETE) ([^`]+)`", page.partition("## Publishing")[0]
        )
    }
    there = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, operations in spec["paths"].items()
        for method in operations
        if path.startswith("/api/v1") and not path.startswith(BULK)
    }
    assert reported == there


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_table_of_the_page_lists_the_roles(broker: Broker, role: str) -> None:
    spec = httpx.get(f"http://{broker.address('http')}/openapi.json", timeout=30).json()
    rows = [
        line
        for line in (ROOT / PAGE).read_text("utf-8").splitlines()
        if line.startswith(("| `GET", "| `P", "| `D"))
    ]
    reported = {
        row.split("`")[1].replace("{id}", "{message_id}")
        for row in rows
        if row.split("|")[2].strip() == role
    }
    there = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, operations in spec["paths"].items()
        for method, operation in operations.items()
        if operation.get("x-role") == role and not path.startswith(BULK)
    }
    assert reported == there

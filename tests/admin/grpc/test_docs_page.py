"""docs/grpc.md: its program runs with the documented output, its tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from sluice.admin.grpc.interceptor import METHOD_ROLES, STATUS_CODES, error_code_of
from sluice.cli.root import app
from sluice.errors import SluiceError
from tests.support.broker_process import Broker, StartBroker, same_build
from tests.support.doc_pages import steps

PAGE = (Path(__file__).parents[3] / "docs/grpc.md").read_text("utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_program_of_the_page_prints_what_the_page_shows(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """A client with a token, where one is needed."""
    (_, first, output), (_, second, whom) = steps("docs/grpc.md")
    run(first, output, start_broker(), tmp_path)
    secrets = tmp_path / "tokens.toml"
    created = CliRunner().invoke(
        app, ["token", "add", "ci", "--role", "viewer", "--file", str(secrets)]
    )
    closed = start_broker(config=f'[auth]\ntokens = "{secrets}"\n')
    run(second, whom, closed, tmp_path, SLUICE_TOKEN=created.stdout.strip())


def run(program: str, output: str, broker: Broker, tmp_path: Path, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:9090", str(broker.address("grpc")))],
        env={**same_build(), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_every_method_is_in_the_table_with_its_role() -> None:
    found: dict[str, str] = {}
    for calls, roles in re.findall(r"^\| (`[A-Z][^|]*) \| ([a-z, ]+) \|", PAGE, re.MULTILINE):
        names = re.findall(r"`(\w+)`", calls)
        words = roles.split(", ")
        found |= dict(zip(names, words * len(names) if len(words) == 1 else words, strict=False))
    assert found == {name: role.label for name, (role, _) in METHOD_ROLES.items()}


def test_every_error_is_in_the_table_with_its_code() -> None:
    reported = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    # never used for a refusal
    silent = {
        "unknown_delivery",
        "responses_full",
        "store_error",
        "sluice_error",
    }
    for kind, code in STATUS_CODES:
        word = error_code_of(kind.__new__(kind))
        assert issubclass(kind, SluiceError)
        assert word in silent or f"`{word}`" in reported[code.name], word

"""A fake API, and the command line pointed at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

from sluice.cli.root import app
from tests.cli.fake_api import FakeApi, serve_fake_api


class CommandResult:
    """The two outputs and the exit code of a command."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


Run = Callable[..., CommandResult]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serve_fake_api() as fake:
        yield fake


@pytest.fixture
def run(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command: `run("queue", "list", COLUMNS="80")`. Our own errors are not hidden."""
    for name in ("SLUICE_TOKEN", "SLUICE_TOKEN_FILE", "SLUICE_MQTT", "SLUICE_CA", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLUICE_URL", api.url)
    monkeypatch.setenv("SLUICE_TRACEBACK", "1")

    def go(*arguments: str, stdin: str = "", **environ: str) -> CommandResult:
        result = CliRunner().invoke(
            app, list(arguments), input=stdin, env=environ, catch_exceptions=False
        )
        return CommandResult(result.exit_code, result.stdout, result.stderr)

    return go

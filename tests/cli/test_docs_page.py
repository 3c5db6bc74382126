"""docs/cli.md has an example of every command, and of no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from sluice.cli.root import app
from sluice.cli.variables import CLIENT_VARIABLES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text("utf-8")
PIPELINES = (DOCS / "pipelines.md").read_text("utf-8")  # has the examples of `sluice pipeline`
BLOCKS = re.findall(r"```sh run\n(.*?)```", PAGE + PIPELINES, re.S)
EXAMPLES = [line for block in BLOCKS for line in block.splitlines()]


def commands(command: Any, name: str = "sluice") -> Iterator[str]:
    below = getattr(command, "commands", None)
    if not below:
        yield name
    for word, part in (below or {}).items():
        yield from commands(part, f"{name} {word}")


ALL = list(commands(typer.main.get_command(app)))


def test_every_command_has_an_example() -> None:
    for name in ALL:
        assert name in PAGE
        assert any(re.search(rf"(^|\| |\(){name}( |$|\))", line) for line in EXAMPLES), name


def test_every_example_is_a_command() -> None:
    for line in EXAMPLES:
        for found in re.findall(r"(?:^|\| )(sluice [^|]*)", line):
            if found.startswith("sluice --"):
                continue
            assert any(found.startswith(name) for name in ALL), line


def test_every_variable_is_documented() -> None:
    for name in CLIENT_VARIABLES:
        assert f"`{name}`" in PAGE


def test_help_shows_no_type_for_flags_without_value() -> None:
    for name in (
        "sluice",
        "sluice pipeline",
        "sluice pipeline archive",
        "sluice serve",
        "sluice user add",
    ):
        shown = (
            CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "150"}).output
        )
        assert "--help" in shown and "bool" not in shown.lower().replace("boolean", ""), name

"""`sluice config check`: what `sluice serve` would say about a file, without starting a broker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.support import (
    BAD,
    EXIT_USAGE,
    GOOD,
    Json,
    Output,
    exit_on_error,
    format_plural,
    styled,
)
from sluice.cli.variables import CLIENT_VARIABLES
from sluice.errors import SluiceError

app = typer.Typer(no_args_is_help=True, help="The configuration file of the broker.")


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="config", rich_help_panel=panel)


@app.callback()
def config() -> None:
    """The configuration file of the broker."""


@app.command("check")
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="TOML file; SLUICE_CONFIG unless given."),
    ] = None,
    json: Json = False,
) -> None:
    """Check a configuration as `sluice serve --config FILE` does: every key and value, SLUICE_...
    variables, queue templates, users, rules and certificates. Exit code 2 if it cannot be used.
    """
    with exit_on_error("the file"):
        out = Output(json)
        problems, templates = _find_problems(file)
        if json:
            out.print_json({"valid": not problems, "problems": problems})
        elif problems:
            out.show(styled(f"✗ {format_plural(len(problems), 'problem')}:", style=BAD))
            out.show(*(f"  {one}" for one in problems))
        else:
            source = file or os.environ.get("SLUICE_CONFIG") or "The environment"
            out.show(
                styled(
                    f"✓ {source} can be used, with {format_plural(templates, 'queue template')}.",
                    style=GOOD,
                )
            )
        if problems:
            raise typer.Exit(EXIT_USAGE)


def _find_problems(file: Path | None) -> tuple[list[str], int]:
    """Return all problems, and the number of queue templates."""
    # Packages of the broker, which no other command needs.
    from sluice.app import check_settings
    from sluice.config.sources import load_settings

    environ = {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES}
    try:
        settings = load_settings(file, environ, {})
    except SluiceError as fault:
        head, *problems = str(fault).split("\n  ")
        return problems or [head], 0
    return [str(fault) for fault in check_settings(settings)], len(settings.queues.templates)

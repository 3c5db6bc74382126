"""`sluice worker module:app`: run jobs of queues with the functions of a module, until SIGTERM.

Logs go to stderr, one line for each failed job. An error inside the module is shown with its
traceback, for the author of the module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.support import (
    exit_on_error,
    usage_error,
)

if TYPE_CHECKING:
    from sluice.worker import Worker


def add_to(root: typer.Typer, panel: str) -> None:
    root.command("worker", rich_help_panel=panel)(worker)


def worker(
    app: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP",
            help="Where the Worker is: images:app, or shop.jobs:worker; :app unless given.",
        ),
    ],
    mqtt: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="HOST:PORT or mqtts://USER:PASSWORD@HOST:PORT, instead of what the app says.",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Run jobs of queues with the functions of a module, until SIGTERM or Ctrl-C."""
    from sluice.process.logs import configure_logs

    with exit_on_error("the broker"):
        if log_level not in ("debug", "info", "warning", "error") or log_format not in (
            "text",
            "json",
        ):
            raise usage_error(
                f"--log-level {log_level} and --log-format {log_format} cannot be used",
                "Use debug, info, warning or error, and text or json",
            )
        configure_logs(log_level, log_format)
        module_name, name = _parse_app(app)
    # Not guarded: the author of the module needs the traceback.
    module = importlib.import_module(module_name)
    with exit_on_error("the broker"):
        found = _find_app(module, name)
        if mqtt is not None:
            found.url = mqtt
        found.run()


def _parse_app(text: str) -> tuple[str, str]:
    """Return module and name, if the module exists in the current directory or is installed."""
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        exists = importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise usage_error(
            f"there is no module {module_name!r} here",
            "Write MODULE:APP, and go to the folder that has the module",
        )
    return module_name, name or "app"


def _find_app(module: ModuleType, name: str) -> Worker:
    from sluice.worker import Worker

    found = getattr(module, name, None)
    if not isinstance(found, Worker):
        raise usage_error(
            f"{module.__name__} has no Worker called {name!r}",
            f"Define {name} = Worker(...) there, or name another",
        )
    return found

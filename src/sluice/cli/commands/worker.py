"""`sluice worker module:app`: run jobs of queues with the functions of a module, until SIGTERM.

Logs go to stderr, one line for each failed job, with queue and message id. `--processes` and
`--reload` run the same command in processes of its own (`worker/supervisor`).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.support import (
    CommandError,
    exit_on_error,
    usage_error,
)
from sluice.errors import SluiceError

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
    processes: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Run it N times; a process that dies is restarted."),
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a Python file in this folder changes.")
    ] = False,
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
        if processes > 1 or reload:
            flags = ["--log-level", log_level, "--log-format", log_format]
            flags += [] if mqtt is None else ["--mqtt", mqtt]
            raise typer.Exit(_supervise([app, *flags], processes, reload))
        found = _find_app(_import(module_name), name)
        if mqtt is not None:
            found.url = mqtt
        _add_job_fields()
        found.run()


def _supervise(arguments: list[str], processes: int, reload: bool) -> int:
    from sluice.worker.supervisor import Supervisor

    command = [sys.executable, "-m", "sluice", "worker", *arguments]
    supervisor = Supervisor(command, processes, Path.cwd() if reload else None)
    return asyncio.run(supervisor.run())


def _add_job_fields() -> None:
    """Add queue and message id to the log lines of handlers."""
    from sluice.worker import JobLogFilter

    for handler in logging.getLogger().handlers:
        handler.addFilter(JobLogFilter())


def _import(name: str) -> ModuleType:
    """Import the module. Its errors are one line with the place, not a traceback."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if os.environ.get("SLUICE_TRACEBACK"):
            raise
        place = _place_of(error)
        if isinstance(error, SluiceError):
            raise CommandError(f"{place}: {error.what}", error.remedy) from None
        text = str(error).partition("\n")[0]
        kind = type(error).__name__
        raise CommandError(
            f"{place}: {kind}: {text}" if text else f"{place}: {kind}",
            "Correct the module; SLUICE_TRACEBACK=1 shows the whole traceback",
        ) from None


def _place_of(error: Exception) -> str:
    """Return file and line in the user's code where an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shorten(error.filename)}:{error.lineno}"
    own = str(Path(importlib.__file__).parent.parent)  # the standard library
    library = str(Path(__file__).parents[2])
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        one
        for one in frames
        if not one.filename.startswith((own, library, "<")) and "site-packages" not in one.filename
    ]
    last = (users or frames)[-1]
    return f"{_shorten(last.filename)}:{last.lineno}"


def _shorten(file: str) -> str:
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


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

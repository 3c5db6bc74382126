"""The root of the command line: all commands with their names and help panels.

Related commands share a module. They reach the broker through its public APIs, REST and MQTT, so a
user's script can do the same. `serve` starts the broker, and the commands of `access` edit its
files.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from sluice import __version__
from sluice.cli.commands import (
    access,
    bench,
    clients,
    configuration,
    consume,
    diagnosis,
    dlq,
    ecq,
    groups,
    losses,
    nodes,
    peek,
    publish,
    queues,
    schedules,
    stores,
    top,
    waiting,
    worker,
)
from sluice.cli.pipelines import job_commands
from sluice.cli.serve import build, serve
from sluice.cli.support import (
    hide_flag_types,
)

EXIT_CODES = (
    "Exit codes: 0 done, 1 refused or failed, 2 wrong command, 3 not found, 4 not reachable, "
    "5 doctor, verify, bench or an audit found something wrong."
)

# Rich tracebacks print local variables, and with them passwords.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    app(prog_name="sluice")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sluice {__version__} ({build()})")
        raise typer.Exit


@app.callback()
def sluice(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show version and build."
        ),
    ] = False,
) -> None:
    """An MQTT broker with durable queues."""


# In the order of `sluice --help`.
app.command(rich_help_panel="Broker")(serve)
configuration.add_to(app, "Broker")
_PANELS: Final = (
    ("Queues and groups", (queues, groups, ecq)),
    ("Messages", (publish, consume, worker, peek, waiting, schedules, dlq)),
    ("Monitoring", (diagnosis, top, clients, nodes, stores, losses, bench)),
    ("Spark", (job_commands,)),
    ("Access", (access,)),
)
for _panel, _modules in _PANELS:
    for _module in _modules:
        _module.add_to(app, _panel)
hide_flag_types(app)

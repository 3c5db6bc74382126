"""All commands in one place: which there are, and under which name.

Commands that belong together are a module beside this one. They reach the broker through the doors that anybody may
use, REST and MQTT, so that what the command line can do, a script of one's own can do as well. `serve` starts it, and
those of `access` work on its files.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from sluice import __version__
from sluice.cli.commands import access
from sluice.cli.commands import bench
from sluice.cli.commands.messages import consume
from sluice.cli.commands.monitoring import diagnosis
from sluice.cli.commands.messages import dlq
from sluice.cli.commands import ecq
from sluice.cli.commands import groups
from sluice.cli.commands.monitoring import losses
from sluice.cli.commands.messages import peek
from sluice.cli.commands.monitoring import nodes
from sluice.cli.pipelines import job_commands
from sluice.cli.commands.messages import publish
from sluice.cli.commands import queues
from sluice.cli.commands.monitoring import stores
from sluice.cli.commands.monitoring import top
from sluice.cli.commands import worker
from sluice.cli.support.help_format import explain_plainly
from sluice.cli.commands.serve import build, serve

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


def main() -> None:
    app(prog_name="sluice")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sluice {__version__} ({build()})")
        raise typer.Exit


@app.callback()
def sluice(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say which build this is."),
    ] = False,
) -> None:
    """An MQTT broker with durable queues."""


# In the order of `sluice --help`.
app.command(rich_help_panel="Broker")(serve)
_PARTS: Final = (
    ("Queues and groups", (queues, groups, ecq)),
    ("Messages", (publish, consume, worker, peek, dlq)),
    ("What is going on", (diagnosis, top, nodes, stores, losses, bench)),
    ("Spark", (job_commands,)),
    ("Who may come in", (access,)),
)
for _panel, _modules in _PARTS:
    for _module in _modules:
        _module.add_to(app, _panel)
explain_plainly(app)

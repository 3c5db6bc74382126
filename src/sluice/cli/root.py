"""All commands in one place: which there are, and under which name.

Commands that belong together are a module beside this one. They reach the broker through the doors that anybody may
use, REST and MQTT, so that what the command line can do, a script of one's own can do as well. `serve` starts it, and
those of `access` work on its files.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from sluice import __version__
from sluice.cli.commands import access, bench, ecq, groups, queues, worker
from sluice.cli.commands.messages import consume, dlq, peek, publish
from sluice.cli.commands.monitoring import diagnosis, losses, nodes, stores, top
from sluice.cli.commands.serve import build, serve
from sluice.cli.pipelines import job_commands
from sluice.cli.support.help_format import hide_flag_types

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
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Say which build this is."
        ),
    ] = False,
) -> None:
    """An MQTT broker with durable queues."""


# In the order of `sluice --help`.
app.command(rich_help_panel="Broker")(serve)
_PANELS: Final = (
    ("Queues and groups", (queues, groups, ecq)),
    ("Messages", (publish, consume, worker, peek, dlq)),
    ("What is going on", (diagnosis, top, nodes, stores, losses, bench)),
    ("Spark", (job_commands,)),
    ("Who may come in", (access,)),
)
for _panel, _modules in _PANELS:
    for _module in _modules:
        _module.add_to(app, _panel)
hide_flag_types(app)

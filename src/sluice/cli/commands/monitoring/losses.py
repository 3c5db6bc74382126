"""`sluice losses ...`: committed frames that the store has lost; list and confirm."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from sluice.cli.support import (
    BAD,
    EXIT_NOT_FOUND,
    Column,
    CommandContext,
    CommandError,
    Yes,
    command,
    format_age,
    format_count,
    format_plural,
    styled,
    table,
)

app = typer.Typer(
    no_args_is_help=True, help="Confirmed frames that the store has lost: see, confirm."
)

NO_CELL: Final = -1
SHOWN_QUEUES: Final = 5


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="losses", rich_help_panel=panel)


@command(app, "list")
def list_losses(cli: CommandContext) -> None:
    """List losses of the store that are not confirmed yet."""
    found = cli.api.get("/losses")
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show("The store has lost nothing that it had confirmed, or it was confirmed.")
        return
    _show_losses(cli, found)


@command(app, "confirm")
def confirm(
    cli: CommandContext,
    cell: Annotated[
        int, typer.Option("--cell", help="Only that of this cell of a cluster.")
    ] = NO_CELL,
    yes: Yes = False,
) -> None:
    """Confirm that you know what was lost: it is not reported any more."""
    found = [one for one in cli.api.get("/losses") if cell in (NO_CELL, one["cell"])]
    if not found:
        which = "" if cell == NO_CELL else f" of cell {cell}"
        raise CommandError(
            f"there is no loss{which} to confirm",
            "List what there is: sluice losses list",
            EXIT_NOT_FOUND,
        )
    if not yes:
        _show_losses(cli, found)
    cli.out.confirm(f"Confirm {format_plural(len(found), 'loss', 'losses')}?", yes)
    done = [cli.api.post(f"/losses/{one['cell']}/confirm") for one in found]
    if not cli.print_if_json(done):
        cli.out.show(f"Confirmed: {format_plural(len(done), 'loss', 'losses')}.")


def warn_of_losses(cli: CommandContext) -> None:
    """Print one line, for other commands, if there is a loss to confirm."""
    found = cli.api.get("/losses")
    if found:
        frames = format_plural(sum(one["frames"] for one in found), "frame")
        cells = format_plural(len(found), "cell")
        cli.out.show(
            styled(
                f"The store has lost {frames} that it had confirmed ({cells}): sluice losses list",
                BAD,
            )
        )


def _show_losses(cli: CommandContext, found: list[dict[str, Any]]) -> None:
    columns = [Column("cell", number=True), Column("frames", number=True)]
    columns += [Column("first", number=True), Column("last", number=True)]
    columns += [Column("times", number=True), Column("noticed"), Column("lost messages", cut=True)]
    rows = [
        [
            str(one["cell"]),
            format_count(one["frames"]),
            format_count(one["first"]),
            format_count(one["last"]),
            format_count(one["times"]),
            format_age(one["at"], cli.now),
            _queues(one["queues"]),
        ]
        for one in found
    ]
    cli.out.show(table(columns, rows, cli.out.width))


def _queues(queues: dict[str, int]) -> str:
    if not queues:
        return "none known"
    named = [
        f"{name}: {format_count(number)}" for name, number in sorted(queues.items())[:SHOWN_QUEUES]
    ]
    more = len(queues) - len(named)
    return ", ".join(named) + (f" and {more} more queues" if more else "")

"""`sluice losses ...`: confirmed frames that the store has lost, and the operator's word that they are known."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from sluice.cli.support.errors import NOT_FOUND, Failure
from sluice.cli.support.options import Yes
from sluice.cli.support.output import BAD, Column, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, count, plural

app = typer.Typer(no_args_is_help=True, help="Confirmed frames that the store has lost: see, confirm.")

NO_CELL: Final = -1
SHOWN_QUEUES: Final = 5


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="losses", rich_help_panel=panel)


@command(app, "list")
def list_losses(visit: Visit) -> None:
    """Losses of the store that nobody has confirmed yet."""
    found = visit.api.get("losses")
    if visit.answered(found):
        return
    if not found:
        visit.out.show("The store has lost nothing that it had confirmed, or it was confirmed.")
        return
    _show(visit, found)


@command(app, "confirm")
def confirm(
    visit: Visit,
    cell: Annotated[int, typer.Option("--cell", help="Only that of this cell of a cluster.")] = NO_CELL,
    yes: Yes = False,
) -> None:
    """Say that you know what was lost: it is not reported any more."""
    found = [one for one in visit.api.get("losses") if cell in (NO_CELL, one["cell"])]
    if not found:
        which = "" if cell == NO_CELL else f" of cell {cell}"
        raise Failure(
            f"there is no loss{which} to confirm", "List what there is: sluice losses list", NOT_FOUND
        )
    if not yes:
        _show(visit, found)
    visit.out.confirm(f"Confirm {plural(len(found), 'loss', 'losses')}?", yes)
    done = [visit.api.post(f"losses/{one['cell']}/confirm") for one in found]
    if not visit.answered(done):
        visit.out.show(f"Confirmed: {plural(len(done), 'loss', 'losses')}.")


def warn_of_losses(visit: Visit) -> None:
    """One line for other commands, if there is something to confirm."""
    found = visit.api.get("losses")
    if found:
        frames = plural(sum(one["frames"] for one in found), "frame")
        where = plural(len(found), "cell")
        visit.out.show(
            styled(f"The store has lost {frames} that it had confirmed ({where}): sluice losses list", BAD)
        )


def _show(visit: Visit, found: list[dict[str, Any]]) -> None:
    columns = [Column("cell", number=True), Column("frames", number=True)]
    columns += [Column("first", number=True), Column("last", number=True)]
    columns += [Column("times", number=True), Column("noticed"), Column("lost messages", cut=True)]
    rows = [
        [
            str(one["cell"]),
            count(one["frames"]),
            count(one["first"]),
            count(one["last"]),
            count(one["times"]),
            ago(one["at"], visit.now),
            _queues(one["queues"]),
        ]
        for one in found
    ]
    visit.out.show(table(columns, rows, visit.out.width))


def _queues(queues: dict[str, int]) -> str:
    if not queues:
        return "none known"
    named = [f"{name}: {count(number)}" for name, number in sorted(queues.items())[:SHOWN_QUEUES]]
    more = len(queues) - len(named)
    return ", ".join(named) + (f" and {more} more queues" if more else "")

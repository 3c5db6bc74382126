"""The output of a command: tables and sentences on stdout, or JSON and nothing else.

Colors are for terminals (`NO_COLOR` turns them off). In a file or a pipe, a table is as wide as it
needs to be and lines have no trailing blanks, so that `grep` and `awk` see whole values. Notes,
questions and progress go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from sluice.cli.support.errors import usage_error
from sluice.cli.support.formatting import escape_controls

UNBOUNDED_WIDTH: Final = 10_000
MAX_PIPED_PAYLOAD_CHARS: Final = 200  # of a payload in a table
MIN_CUT_WIDTH: Final = 16  # of a payload, on a narrow terminal as well
MIN_PROGRESS_ITEMS: Final = 100  # less work is too short for a progress bar

GOOD: Final = "green"
BAD: Final = "red"
WARN: Final = "yellow"
FAINT: Final = "dim"


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    number: bool = False  # right-aligned, never folded
    cut: bool = False  # shrinks first: cut to the remaining width
    style: str = ""


def styled(text: str, style: str = "", multiline: bool = False) -> Text:
    """Return text for the terminal, with control characters escaped; all output uses it."""
    return Text(escape_controls(text, multiline), style=style)


class Output:
    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
        self.console = Console(
            file=sys.stdout,
            width=UNBOUNDED_WIDTH if piped else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._notes = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)

    @property
    def width(self) -> int:
        return self.console.width

    @property
    def payload_width(self) -> int:
        """Return how many characters of a payload a table shows."""
        return min(MAX_PIPED_PAYLOAD_CHARS, self.console.width)

    def print_json(self, value: object) -> None:
        """Print one JSON document."""
        print(json.dumps(value, indent=2, ensure_ascii=False))

    def print_json_line(self, value: object) -> None:
        """Print one of several JSON documents on a line of its own, and flush."""
        print(json.dumps(value, separators=(",", ":"), ensure_ascii=False), flush=True)

    def show(self, *parts: RenderableType) -> None:
        # Rich ends the process by itself when the pipe is closed; so it renders, and we write.
        with self.console.capture() as captured:
            for part in parts:
                self.console.print(styled(part, multiline=True) if isinstance(part, str) else part)
        text = captured.get()
        if not self.console.is_terminal:
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        sys.stdout.write(text)

    def note(self, text: str) -> None:
        """Print a note for the user to stderr."""
        self._notes.print(styled(text, multiline=True), style=FAINT, soft_wrap=True)

    def confirm(self, question: str, yes: bool) -> None:
        """Return if the user agrees; otherwise end the command without changes."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise usage_error(
                f"{question} stdin is not a terminal", "Add --yes to do it without asking"
            )
        if not typer.confirm(escape_controls(question), err=True):
            self.note("Nothing was changed.")
            raise typer.Exit(1)

    def progress(self, total: int | None) -> Progress:
        """Return a progress bar on stderr, shown on a terminal and for long work only."""
        hidden = not self._notes.is_terminal or (total is not None and total < MIN_PROGRESS_ITEMS)
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._notes,
            transient=True,
            disable=hidden,
        )

    def spinner(self) -> Progress:
        """Return a spinner for work of unknown length: it shows that the work continues, and for
        how long.
        """
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._notes,
            transient=True,
            disable=self.as_json or not self._notes.is_terminal,
        )


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], width: int = UNBOUNDED_WIDTH
) -> Table:
    """Lay out columns two blanks apart. Numbers stay whole, names fold; one `cut` column gets the
    rest of `width`.
    """
    cells = [[styled(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    wide = [
        max([len(column.head), *(cell_len(row[nth].plain) for row in cells)])
        for nth, column in enumerate(columns)
    ]
    others = sum(2 + size for size, column in zip(wide, columns) if not column.cut)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(
            column.head,
            justify="right" if column.number else "left",
            no_wrap=column.number or column.cut,
            overflow="ellipsis" if column.cut else "fold",
            style=column.style,
            max_width=max(MIN_CUT_WIDTH, width - others) if column.cut else None,
        )
    for row in cells:
        grid.add_row(*row)
    return grid


def facts_table(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Lay out names and values, one pair per line."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    grid.add_column(style=FAINT, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(escape_controls(name), styled(value) if isinstance(value, str) else value)
    return grid

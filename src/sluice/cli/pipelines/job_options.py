"""Options that several pipelines have, spelled and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.support.completion import complete_queue

Queue = Annotated[
    str,
    typer.Option(
        "--queue", "-q", metavar="QUEUE", help="Name of the queue.", autocompletion=complete_queue
    ),
]
FailedQueue = Annotated[
    str,
    typer.Option(
        "--queue",
        "-q",
        metavar="QUEUE",
        help="The queue whose messages died, not that of the letters.",
        autocompletion=complete_queue,
    ),
]
Group = Annotated[
    str,
    typer.Option(
        "--group",
        "-g",
        metavar="GROUP",
        help="Consumer group that Spark reads as; the name of the pipeline unless given.",
    ),
]
Settle = Annotated[
    bool,
    typer.Option(
        "--settle", help="Of dead letters: let them go once they are done with; else they stay."
    ),
]
SkipLost = Annotated[
    bool,
    typer.Option(
        "--skip-lost",
        help="Go on with what is left if messages have gone unread: purged, expired, settled by others.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="To the end of what is there now, then stop.")]
Every = Annotated[
    str, typer.Option(metavar="DURATION", help="How often a batch is made, when it goes on.")
]
RowsPerBatch = Annotated[
    int, typer.Option(min=1, metavar="ROWS", help="At most so many messages in a batch.")
]
KeyExpression = Annotated[str, typer.Option(metavar="EXPR", help="What the key is, in SQL.")]
DropEmpty = Annotated[
    bool, typer.Option("--drop-empty", help="An empty payload says that its key is gone.")
]
RowFilter = Annotated[
    str, typer.Option(metavar="EXPR", help="Only rows for which this SQL is true.")
]
ReportFile = Annotated[
    Path | None, typer.Option("--to", metavar="FILE", help="Write the report, one HTML file.")
]

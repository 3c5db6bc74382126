"""Options that several pipelines share, with the same spelling and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.support import (
    complete_queue,
)

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
        help="The queue whose messages died, not the dead-letter queue.",
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
    typer.Option("--settle", help="Delete dead letters once they are processed; else they stay."),
]
SkipLost = Annotated[
    bool,
    typer.Option(
        "--skip-lost",
        help="Go on with what is left if messages were removed unread:"
        " purged, expired, settled by others.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Stop at the end of what is stored now.")]
Every = Annotated[
    str, typer.Option(metavar="DURATION", help="Time between two batches, without --once.")
]
RowsPerBatch = Annotated[
    int, typer.Option(min=1, metavar="ROWS", help="At most this many messages in a batch.")
]
KeyExpression = Annotated[str, typer.Option(metavar="EXPR", help="The key, as an SQL expression.")]
DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="An empty payload deletes its key.")]
RowFilter = Annotated[
    str, typer.Option(metavar="EXPR", help="Only rows for which this SQL is true.")
]
ReportFile = Annotated[
    Path | None, typer.Option("--to", metavar="FILE", help="Write the report, one HTML file.")
]

"""Shell completion: names that the broker knows, or nothing, and never an error."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sluice.cli.support.options import find_broker

TIMEOUT_SECONDS: Final = 1.0


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    found = _fetch(ctx, "queues", prefix=incomplete, limit=200)
    return [row["name"] for row in found if row["name"].startswith(incomplete)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    from sluice.cli.support.rest_client import queue_path

    queue = ctx.params.get("queue") or _first_argument(ctx)
    if not queue:
        return []
    found = _fetch(ctx, queue_path(queue, "groups"))
    return [row["name"] for row in found if row["name"].startswith(incomplete)]


def _first_argument(ctx: typer.Context) -> str:
    """Return the first argument. The parser does not see it while an option lacks its value."""
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()
    after = words[words.index(ctx.info_name) + 1 :] if ctx.info_name in words else []
    return next((word for word in after if not word.startswith("-")), "")


def _fetch(ctx: typer.Context, path: str, **parameters: object) -> list[dict[str, Any]]:
    # At a prompt, an unreachable broker, an invalid token or an unreadable response all mean no
    # names.
    with suppress(Exception):
        from sluice.cli.support.rest_client import RestClient

        given = ctx.params
        file = given.get("token_file")
        broker = find_broker(
            given.get("url"), given.get("token"), Path(file) if file else None, None
        )
        api = RestClient(broker, response_seconds=TIMEOUT_SECONDS)
        try:
            answer: list[dict[str, Any]] = api.get(path, **parameters)
            return answer
        finally:
            api.close()
    return []


Queue = Annotated[
    str, typer.Argument(metavar="QUEUE", help="Name of the queue.", autocompletion=complete_queue)
]
Group = Annotated[
    str, typer.Argument(metavar="GROUP", help="Name of the group.", autocompletion=complete_group)
]
GroupOption = Annotated[
    str,
    typer.Option(
        "--group", "-g", metavar="GROUP", help="Only for this group.", autocompletion=complete_group
    ),
]

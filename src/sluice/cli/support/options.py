"""Options that commands share: their flags, variables and completion, and how values are parsed.

Every command has those of the broker's address, credentials and output (`COMMON_OPTIONS`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sluice.cli.support.errors import CommandError, usage_error
from sluice.cli.support.rest_client import RestClient, queue_path
from sluice.http_client import DEFAULT_URL, Endpoint, is_http_url
from sluice.units import parse_duration

COMPLETION_SECONDS: Final = 1.0  # for the broker to answer at a prompt
HELP_PANEL: Final = "Broker and output"

Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"REST address of the broker (SLUICE_URL; {DEFAULT_URL}).",
        rich_help_panel=HELP_PANEL,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help="Token for it (SLUICE_TOKEN). Others can see a command line:"
        " prefer the variable or a file.",
        rich_help_panel=HELP_PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the token (SLUICE_TOKEN_FILE).", rich_help_panel=HELP_PANEL
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Trust certificates signed by this CA, PEM (SLUICE_CA).",
        rich_help_panel=HELP_PANEL,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="JSON on stdout, and nothing else there.", rich_help_panel=HELP_PANEL
    ),
]
COMMON_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "url": (Url, None),
    "token": (Token, None),
    "token_file": (TokenFile, None),
    "ca": (Ca, None),
    "json": (Json, False),
}

# Options of several commands, with one meaning.
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Contains = Annotated[str, typer.Option(metavar="TEXT", help="With this text in the payload.")]
ToAll = Annotated[
    bool, typer.Option("--to-all", help="To every group, not only to the one that failed.")
]


def find_broker(
    url: str | None, token: str | None, token_file: Path | None, ca: Path | None
) -> Endpoint:
    """Return the broker. A flag overrides its variable, and a token overrides a token file."""
    given = (token or "").strip()
    broker = Endpoint(
        _normalize_url(url or os.environ.get("SLUICE_URL") or DEFAULT_URL, url is None),
        given,
        "" if given or token_file is None else str(token_file.absolute()),
        str(ca) if ca is not None else os.environ.get("SLUICE_CA", ""),
    )
    if broker.token_file and not broker.token:
        _check_readable(Path(broker.token_file))
    return broker


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as fault:
        raise CommandError(
            f"cannot read the token in {file}: {fault.strerror}",
            "Give --token-file a file that you may read",
        ) from None


def _normalize_url(url: str, from_variable: bool) -> str:
    source = "SLUICE_URL" if from_variable else "--url"
    given = url if "://" in url else f"http://{url}"
    if not is_http_url(given):
        raise usage_error(
            f"{source} is not the address of a broker's REST API",
            f"Write it as {DEFAULT_URL}; the MQTT address goes into --mqtt or SLUICE_MQTT",
        )
    return given.rstrip("/").removesuffix("/api/v1")


# ---- names that the broker knows, for the completion of shells: never an error


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    found = _fetch(ctx, "/queues", prefix=incomplete, limit=200)
    return [row["name"] for row in found if row["name"].startswith(incomplete)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
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
        given = ctx.params
        file = given.get("token_file")
        broker = find_broker(
            given.get("url"), given.get("token"), Path(file) if file else None, None
        )
        with RestClient(broker, COMPLETION_SECONDS) as api:
            answer: list[dict[str, Any]] = api.get(path, **parameters)
            return answer
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


# ---- durations and times


def parse_seconds(flag: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as fault:
        raise usage_error(f"{flag}: {fault}", "Write it as 500ms, 10s or 2h") from None


def filter_parameters(given: Any, now: float) -> dict[str, object]:
    """Return the options of a filter (a dataclass with `since` and `until`) for a request."""
    values = asdict(given)
    for name in ("since", "until"):
        values[name] = parse_time_argument(f"--{name}", values[name], now)
    return {name: value for name, value in values.items() if value}


def parse_time_argument(flag: str, text: str, now: float | None) -> str:
    """Return a time as ISO text, in UTC unless it has a zone; `2h` means two hours before now.

    Without `now` only a time is valid: the command must mean the same when it is repeated.
    """
    if not text:
        return ""
    if now is not None:
        try:
            return datetime.fromtimestamp(now - parse_duration(text), UTC).isoformat(
                timespec="milliseconds"
            )
        except (ValueError, OverflowError, OSError):
            pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        if now is None:
            raise usage_error(
                f"{flag} {text!r} is not a time", "Write 2030-01-31T12:00:00Z"
            ) from None
        raise usage_error(
            f"{flag} {text!r} is neither a time nor a duration",
            "Write 2h for two hours ago, or 2030-01-31T12:00:00Z",
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).isoformat(timespec="milliseconds")

"""Options that every command has: the broker's address, credentials and output, with their
variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from sluice.cli.support.errors import CommandError, usage_error

DEFAULT_URL: Final = "http://127.0.0.1:8080"
HELP_PANEL: Final = "Broker and output"

# What these commands read from the environment. `serve` must not take them for settings.
CLIENT_VARIABLES: Final = frozenset(
    {
        "SLUICE_URL",
        "SLUICE_TOKEN",
        "SLUICE_TOKEN_FILE",
        "SLUICE_CA",
        "SLUICE_MQTT",
        "SLUICE_TRACEBACK",
    }
)

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
ToAll = Annotated[
    bool, typer.Option("--to-all", help="To every group, not only to the one that failed.")
]


@dataclass(frozen=True)
class BrokerAddress:
    """The broker's address and token, from flags and variables."""

    url: str
    token: str = field(repr=False)
    ca: Path | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"


def find_broker(
    url: str | None,
    token: str | None,
    token_file: Path | None,
    ca: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> BrokerAddress:
    """Return the broker. A flag overrides its variable, and a token overrides a token file."""
    ca = ca or (Path(environ["SLUICE_CA"]) if environ.get("SLUICE_CA") else None)
    if not token and token_file is None:
        token = environ.get("SLUICE_TOKEN", "").strip()
        if not token and environ.get("SLUICE_TOKEN_FILE"):
            token_file = Path(environ["SLUICE_TOKEN_FILE"])
    if not token and token_file is not None:
        token = _read_token(token_file)
    token = (token or "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise usage_error(
            "the token contains invalid characters",
            "Give it as `sluice token add` printed it, one line without spaces",
        )
    return BrokerAddress(
        _normalize_url(url or environ.get("SLUICE_URL") or DEFAULT_URL, url is None), token, ca
    )


def _read_token(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError as fault:
        raise CommandError(
            f"cannot read the token in {file}: {fault.strerror}",
            "Give --token-file a file that you may read",
        ) from None


def _normalize_url(url: str, from_variable: bool) -> str:
    source = "SLUICE_URL" if from_variable else "--url"
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise usage_error(
            f"{source} is not the address of a broker's REST API",
            f"Write it as {DEFAULT_URL}; the MQTT address goes into --mqtt or SLUICE_MQTT",
        )
    return given.rstrip("/").removesuffix("/api/v1")

"""The MQTT client of the commands that move messages, and its --mqtt option."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from sluice.cli.support.errors import CommandError, usage_error
from sluice.cli.support.options import HELP_PANEL
from sluice.client import Client, PublishRefused, SubscribeRefused
from sluice.http_client import Endpoint

MqttOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="MQTT address, HOST:PORT or mqtts://USER:PASSWORD@HOST:PORT"
        " (SLUICE_MQTT; the host of --url, port 1883).",
        rich_help_panel=HELP_PANEL,
    ),
]


def make_client(broker: Endpoint, address: str | None, **options: Any) -> Client:
    host = f"[{broker.host}]" if ":" in broker.host else broker.host
    url = address or os.environ.get("SLUICE_MQTT") or f"mqtt://{host}"
    if url.startswith("mqtts://"):
        options["tls"] = broker.tls_context()
    try:
        return Client.from_url(url, **options)
    except ValueError:  # an invalid port; the exception's text would show the whole address
        raise usage_error(
            "the MQTT address cannot be read", "Write it as 127.0.0.1:1883 or mqtts://broker:8883"
        ) from None


def error_from_refusal(refusal: PublishRefused | SubscribeRefused) -> CommandError:
    """Return the server's own text and remedy, without the client's wording."""
    if not refusal.reason_string:
        return CommandError(refusal.what, refusal.remedy)
    what, _, do = refusal.reason_string.partition(". ")
    return CommandError(what, do)

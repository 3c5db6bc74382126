"""`sluice serve`: turn flags, variables and the file into settings, and run `sluice.app` with them.

A refusal is one message on stderr and an exit code (2: the configuration is wrong, 1: it could not
be carried out). This module imports no other command and no part of the broker.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sluice.cli.variables import CLIENT_VARIABLES
from sluice.errors import ConfigError, SluiceError


def build() -> str:
    """Return `compiled` if the package `wire` is native code, else `interpreted`."""
    spec = find_spec("sluice.wire.decode")
    native = spec is not None and (spec.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
    return "compiled" if native else "interpreted"


def serve(
    mqtt: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="MQTT over TCP; 127.0.0.1:1883 unless given."),
    ] = None,
    mqtts: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="MQTT over TLS.")] = None,
    ws: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="MQTT over WebSocket.")
    ] = None,
    wss: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="MQTT over secure WebSocket.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain (PEM) of mqtts and wss.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its private key (PEM).")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Demand client certificates signed by this CA (PEM)."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The admin API (REST) and console; 127.0.0.1:8080 unless given.",
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The admin API as gRPC; 127.0.0.1:9090 unless given."
        ),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="STORE", help="embedded (default), memory or redis://...")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the embedded store; sluice-data unless given."
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Run this many processes on the embedded store; auto: one per core."
        ),
    ] = None,
    salvage: Annotated[
        bool | None,
        typer.Option(
            "--salvage", help="Open a damaged store without what is lost, and log what that is."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file; SLUICE_... and flags go before it."),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info (default), warning or error.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text (default) or json.")] = None,
) -> None:
    """Run the broker until SIGTERM or SIGINT. Port 0 picks a free port; `off` closes a listener."""
    flags = {
        ("--mqtt", ("listen", "mqtt")): mqtt,
        ("--mqtts", ("listen", "mqtts")): mqtts,
        ("--ws", ("listen", "ws")): ws,
        ("--wss", ("listen", "wss")): wss,
        ("--tls-cert", ("tls", "cert")): tls_cert,
        ("--tls-key", ("tls", "key")): tls_key,
        ("--tls-client-ca", ("tls", "client_ca")): tls_client_ca,
        ("--http", ("http",)): http,
        ("--grpc", ("grpc",)): grpc,
        ("--store", ("store",)): store,
        ("--data", ("data",)): data,
        ("--processes", ("processes", "count")): processes,
        ("--salvage", ("salvage",)): salvage,
        ("--log-level", ("log", "level")): log_level,
        ("--log-format", ("log", "format")): log_format,
    }
    # The broker, its compiled packages and its settings, which no other command needs.
    from sluice.config.sources import load_settings
    from sluice.process.logs import configure_logs

    try:
        # Variables of the client commands are not settings of the broker.
        environ = {
            name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES
        }
        read_settings = partial(load_settings, config, environ, flags)
        settings = read_settings()
        configure_logs(settings.log.level, settings.log.format)
        from sluice.app import serve as run

        run(settings, read_settings)
    except SluiceError as refusal:
        _exit_refused(refusal)


def run_serve(arguments: list[str]) -> None:
    """Run `sluice serve` alone, without the other commands."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    app(arguments, prog_name="sluice serve")


def _exit_refused(refusal: SluiceError) -> NoReturn:
    print(f"sluice: {refusal}", file=sys.stderr)
    raise typer.Exit(2 if isinstance(refusal, ConfigError) else 1)

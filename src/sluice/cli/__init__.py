"""The command `sluice`: arguments in, tables or JSON out. The broker or a library does the work."""

from sluice.cli.commands import build, serve
from sluice.cli.root import app, main

__all__ = ["app", "build", "main", "serve"]

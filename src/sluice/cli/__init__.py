"""The command `sluice`: words of people in, tables or JSON out. What is asked is decided elsewhere."""

from sluice.cli.commands.serve import build, serve
from sluice.cli.root import app, main

__all__ = ["app", "build", "main", "serve"]

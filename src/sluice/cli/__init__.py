"""The command `sluice`: words of people in, tables or JSON out. What is asked is decided elsewhere."""

from sluice.cli.root import app, main
from sluice.cli.commands.serve import build, serve

__all__ = ["app", "build", "main", "serve"]

"""Make `--help` omit the type of flags without a value: `--once`, not `--once <bool>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable


def _hide_flag_types(parameters: Iterable[Any]) -> list[Any]:
    found = list(parameters)
    for one in found:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return found


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


def hide_flag_types(app: typer.Typer) -> None:
    """Apply this to all commands and groups of `app`."""
    app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            hide_flag_types(group.typer_instance)

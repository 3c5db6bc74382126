"""Register commands that call a running broker.

`@command(app, "peek")` registers a function whose first parameter is a `CommandContext`. The
options of `options.COMMON_OPTIONS` are added after its own, so that every command has them with the
same spelling and help. Commands that share more options (`spark_command.pipeline_command`) have
their own context class (`register_command`). A parameter of a frozen dataclass is a group of
options, one for each field.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from sluice.cli.support.errors import exit_on_error
from sluice.cli.support.options import COMMON_OPTIONS, find_broker
from sluice.cli.support.output import Output
from sluice.cli.support.rest_client import RestClient
from sluice.http_client import Endpoint

P = ParamSpec("P")
V = TypeVar("V", bound="CommandContext")


class CommandContext:
    """One running command: its broker, and its output."""

    def __init__(self, broker: Endpoint, as_json: bool) -> None:
        self.broker = broker
        self.out = Output(as_json)
        self._api: RestClient | None = None

    @property
    def now(self) -> float:
        """Return the current time, so that "in 3 s" agrees with the broker's answer."""
        return time.time()

    @property
    def api(self) -> RestClient:
        """The REST client, created on first use: `verify --data` and `consume` need none."""
        if self._api is None:
            self._api = RestClient(self.broker)
        return self._api

    @property
    def as_json(self) -> bool:
        return self.out.as_json

    def print_if_json(self, value: object) -> bool:
        """With --json, print the value as it came. Return whether that was done."""
        if self.out.as_json:
            self.out.print_json(value)
        return self.out.as_json

    def close(self) -> None:
        if self._api is not None:
            self._api.close()


def command(
    app: typer.Typer, name: str, **more: Any
) -> Callable[
    [Callable[Concatenate[CommandContext, P], None]], Callable[Concatenate[CommandContext, P], None]
]:
    return register_command(app, name, COMMON_OPTIONS, make_context, **more)


def register_command(
    app: typer.Typer,
    name: str,
    shared: Mapping[str, tuple[Any, Any]],
    context_factory: Callable[..., V],
    **more: Any,
) -> Callable[[Callable[Concatenate[V, P], None]], Callable[Concatenate[V, P], None]]:
    """Register a command. `shared` maps options of `context_factory` to type and default."""

    def register(function: Callable[Concatenate[V, P], None]) -> Callable[Concatenate[V, P], None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            for parameter, group in groups.items():
                given[parameter] = group(**{one.name: given.pop(one.name) for one in fields(group)})
            shared_values = {key: given.pop(key) for key in shared}
            with exit_on_error("the broker"):
                cli = context_factory(**shared_values)
                try:
                    function(cli, **given)  # type: ignore[call-arg]
                finally:
                    cli.close()

        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        described = _parameters(function, hints, shared)
        run.__signature__ = inspect.Signature(described)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in described}
        app.command(name, **more)(run)
        return function

    return register


def make_context(
    url: str | None, token: str | None, token_file: Path | None, ca: Path | None, json: bool
) -> CommandContext:
    return CommandContext(find_broker(url, token, token_file, ca), json)


def _parameters(
    function: Callable[..., None],
    hints: Mapping[str, Any],
    shared: Mapping[str, tuple[Any, Any]],
) -> list[inspect.Parameter]:
    """Return the function's parameters without its context, then the shared ones."""
    described: list[tuple[str, Any, Any]] = []
    for one in list(inspect.signature(function).parameters.values())[1:]:
        hint = hints[one.name]
        if is_dataclass(hint):
            kinds = get_type_hints(hint, include_extras=True)
            described += [
                (member.name, kinds[member.name], member.default) for member in fields(hint)
            ]
        else:
            described.append((one.name, hint, one.default))
    described += [(name, kind, default) for name, (kind, default) in shared.items()]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in described
    ]


# ---- `--help` omits the type of flags without a value: `--once`, not `--once <bool>`


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

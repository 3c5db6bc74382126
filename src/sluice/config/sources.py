"""Reads settings: flags override the environment, which overrides the file and the defaults.

The file is TOML. Each key is also an environment variable: `mqtt.max_qos` is
`SLUICE_MQTT__MAX_QOS`, with two underscores for the dot because keys contain single ones. Each
value remembers its source, so that an error can name it. All errors are reported at once, not one
per start.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sluice.config.setting_types import describe_rule
from sluice.config.settings import Settings
from sluice.errors import ConfigError
from sluice.process.logs import hide_secrets

ENVIRONMENT_PREFIX: Final = "SLUICE_"

# Variables with our prefix that are no settings: for the installation, the tests, or the file name.
_NOT_SETTINGS: Final = {"SLUICE_PURE", "SLUICE_OPT_LEVEL", "SLUICE_EXPECT", "SLUICE_CONFIG"}
# Kubernetes sets these in every container if there is a Service named sluice or sluice-something.
_SERVICE_LINK: Final = re.compile(
    r"SLUICE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)"
)

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its source: a flag, a variable or a file."""

    value: object
    source: str


def load_settings(
    config: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[tuple[str, Key], str | Path | bool | None],
) -> Settings:
    """Combine the sources, or raise ConfigError with all problems.

    `flags` maps a flag's name and the key it sets to its value; None is a flag that was not given.
    """
    values: dict[Key, SourcedValue] = {}
    file = config or (Path(environ["SLUICE_CONFIG"]) if environ.get("SLUICE_CONFIG") else None)
    if file is not None:
        values.update(
            (key, SourcedValue(value, str(file))) for key, value in _flatten(_read_file(file))
        )
    values.update(_read_environment(environ))
    values.update(
        {
            key: SourcedValue(value, flag)
            for (flag, key), value in flags.items()
            if value is not None
        }
    )
    try:
        return Settings.model_validate(_unflatten(values))
    except ValidationError as fault:
        raise _make_config_error(
            [_describe_problem(error, values) for error in fault.errors()]
        ) from None


def _read_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as fault:
        raise ConfigError(
            f"cannot read {file}: {fault.strerror}", "Give --config an existing TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{file} is not TOML: {fault}", "Correct that line") from None


def _flatten(table: Mapping[str, object], parent: Key = ()) -> Iterator[tuple[Key, object]]:
    """Flatten tables to keys. An empty table stays, because its name may be wrong."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, (*parent, name))
        else:
            yield (*parent, name), value


def _unflatten(values: Mapping[Key, SourcedValue]) -> dict[str, object]:
    root: dict[str, object] = {}
    for key in sorted(values, key=len):
        node: object = root
        for name in key[:-1]:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        # Otherwise a table was given as a plain value, which validation refuses.
        if isinstance(node, dict):
            node[key[-1]] = values[key].value
    return root


def _read_environment(environ: Mapping[str, str]) -> dict[Key, SourcedValue]:
    values: dict[Key, SourcedValue] = {}
    for variable, text in environ.items():
        if (
            not variable.startswith(ENVIRONMENT_PREFIX)
            or variable in _NOT_SETTINGS
            or _SERVICE_LINK.fullmatch(variable)
        ):
            continue
        key = tuple(variable[len(ENVIRONMENT_PREFIX) :].lower().split("__"))
        values[key] = SourcedValue(_read_variable(variable, key, text), variable)
    return values


def _read_variable(variable: str, key: Key, text: str) -> object:
    """Return the text of a variable; parse it as in the file if the setting is a list."""
    field = _find_field(key)
    if field is None or get_origin(field.annotation) is not list:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"{variable} is not a list", """Write it as in the file: '["first", "second"]'"""
        ) from None


def _find_field(key: Key) -> FieldInfo | None:
    """Return the setting of `key`, or None."""
    model: type[BaseModel] = Settings
    field: FieldInfo | None = None
    for name in key:
        field = model.model_fields.get(name)
        if field is None:
            return None
        annotation = field.annotation
        model = (
            annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel)
            else BaseModel
        )
    return field


def _known_keys(model: type[BaseModel] = Settings, parent: Key = ()) -> Iterator[str]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _known_keys(annotation, (*parent, name))
        else:
            yield ".".join((*parent, name))


def _describe_problem(error: ErrorDetails, values: Mapping[Key, SourcedValue]) -> str:
    """Return one problem as a sentence: key, value, source, allowed values, remedy."""
    if not error["loc"]:  # a rule about several keys, whose text names them
        return error["msg"].removeprefix("Value error, ")
    key = tuple(part for part in error["loc"] if isinstance(part, str))
    name = ".".join(key)
    source = f" ({values[key].source})" if key in values else ""
    if error["type"] == "extra_forbidden":
        return f"{name}{source} is not a setting. {_suggest_key(name)}"
    field = _find_field(key)
    is_secret = field is not None and field.annotation is SecretStr
    value = ""
    if key in values:
        value = " = ***" if is_secret else f" = {hide_secrets(str(values[key].value))}"
    return f"{name}{value}{source}: {_describe_field_rule(error, field)}. {_suggest_remedy(field)}"


def _suggest_key(name: str) -> str:
    known = list(_known_keys())
    # A variable without the double underscore, SLUICE_MQTT_MAX_QOS, becomes mqtt_max_qos.
    close = [key for key in known if key.replace(".", "_") == name.replace(".", "_")]
    close = close or get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return (
            f"Did you mean {close[0]} (environment: "
            f"{ENVIRONMENT_PREFIX}{close[0].upper().replace('.', '__')})?"
        )
    return f"The tables and keys at the top are {', '.join(Settings.model_fields)}"


def _describe_field_rule(error: ErrorDetails, field: FieldInfo | None) -> str:
    return describe_rule(error, field.metadata if field is not None else [])


def _suggest_remedy(field: FieldInfo | None) -> str:
    default = field.default if field is not None else None
    if isinstance(default, BaseModel | list | SecretStr) or default is None:
        return "Correct it, or leave it out"
    return f"Correct it, or leave it out for the default, {default}"


def _make_config_error(problems: list[str]) -> ConfigError:
    return ConfigError(
        "the configuration cannot be used:" + "".join(f"\n  {problem}" for problem in problems)
    )

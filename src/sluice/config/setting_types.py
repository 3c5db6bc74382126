"""Types of settings, for the server's configuration and for the configuration of queues.

Each type knows its range and can print it, so that every error names the allowed values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from sluice.units import format_duration, parse_duration


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A closed range that can print itself."""

    low: float
    high: float
    format_value: Callable[[float], str] = "{:.0f}".format

    def __str__(self) -> str:
        if self.high == inf:
            return f"{self.format_value(self.low)} or more"
        return f"from {self.format_value(self.low)} to {self.format_value(self.high)}"

    def __call__(self, value: float) -> float:
        if not self.low <= value <= self.high:
            raise ValueError(f"must be {self}")
        return value


def number_between(low: float, high: float = inf) -> AfterValidator:
    return AfterValidator(ValueRange(low, high))


def duration_between(low: float, high: float) -> AfterValidator:
    return AfterValidator(ValueRange(low, high, format_duration))


Seconds = Annotated[float, BeforeValidator(parse_duration)]


class ConfigSection(BaseModel):
    """A table of a configuration: unknown keys are refused, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Accept `"8"` as a number (an environment has only text) and refuse `true`."""
        if isinstance(value, bool) and info.field_name is not None:
            field = cls.model_fields[info.field_name]
            annotations = {field.annotation, *get_args(field.annotation)}
            if annotations & {int, float} and not any(
                isinstance(one, BeforeValidator) for one in field.metadata
            ):
                raise ValueError("must be a number")  # durations have an error of their own
        return value


def describe_rule(error: ErrorDetails, metadata: list[object]) -> str:
    """Return the allowed values as text, with the range even if the value is not a number."""
    text = (
        error["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .partition(", unable")[0]
    )
    for check in metadata:
        if isinstance(check, AfterValidator) and isinstance(check.func, ValueRange):
            allowed = str(check.func)
            if allowed not in text:
                text = f"{text}, {allowed}"
    return text

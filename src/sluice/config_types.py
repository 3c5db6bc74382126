"""The kinds of values that settings are made of, for the server's file and for a queue's configuration alike.

Each kind knows its range and can say it, so that every refusal names what would have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from sluice.units import parse_duration, show_duration


@dataclass(frozen=True, slots=True)
class Between:
    """A closed range that can say itself, so that every refusal names what would have been accepted."""

    low: float
    high: float
    show: Callable[[float], str] = "{:.0f}".format

    def __str__(self) -> str:
        if self.high == inf:
            return f"{self.show(self.low)} or more"
        return f"from {self.show(self.low)} to {self.show(self.high)}"

    def __call__(self, value: float) -> float:
        if not self.low <= value <= self.high:
            raise ValueError(f"must be {self}")
        return value


def number(low: float, high: float = inf) -> AfterValidator:
    return AfterValidator(Between(low, high))


def lasting(low: float, high: float) -> AfterValidator:
    return AfterValidator(Between(low, high, show_duration))


Seconds = Annotated[float, BeforeValidator(parse_duration)]


class Section(BaseModel):
    """A table of a configuration: every key is known, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_not_one(cls, value: object, info: ValidationInfo) -> object:
        """`"8"` is a number (an environment has only text), `true` is none, though Python would count with it."""
        if isinstance(value, bool) and info.field_name is not None:
            field = cls.model_fields[info.field_name]
            kinds = {field.annotation, *get_args(field.annotation)}
            if kinds & {int, float} and not any(isinstance(one, BeforeValidator) for one in field.metadata):
                raise ValueError("must be a number")  # a duration refuses it in words of its own
        return value


def rule_of(error: ErrorDetails, metadata: list[object]) -> str:
    """What is allowed, in words; the range included even when the value was not so much as a number."""
    words = (
        error["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .partition(", unable")[0]
    )
    for check in metadata:
        if isinstance(check, AfterValidator) and isinstance(check.func, Between):
            allowed = str(check.func)
            if allowed not in words:
                words = f"{words}, {allowed}"
    return words

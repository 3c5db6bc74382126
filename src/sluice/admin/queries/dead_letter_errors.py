"""Dead letters grouped by error: the description without what varies from message to message."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from sluice.admin import model

MAX_GROUPS: Final = 1000
MAX_EXAMINED: Final = 100_000
MAX_ERROR_LENGTH: Final = 300  # of a description, in characters
NO_DESCRIPTION: Final = "no description"

# Alternatives in this order: the longest that begins at a place wins.
_VARYING: Final = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)"
    r"|(?P<uuid>\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b)"
    r"|(?P<hex>\b0x[0-9a-fA-F]+\b|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b)"
    r"|(?P<n>\d+(?:[.,]\d+)*)"
)


def normalize_error(description: str) -> str:
    """Return a description with placeholders for times, ids and numbers."""
    text = " ".join(description[:MAX_ERROR_LENGTH].split())
    return _VARYING.sub(_placeholder, text) or NO_DESCRIPTION


def _placeholder(found: re.Match[str]) -> str:
    if found.lastgroup == "time":
        return "<time>"
    if found.lastgroup == "n" or found[0].isdecimal():
        return "<n>"
    return "<id>"


@dataclass
class _Counted:
    first_at: float
    count: int = 0
    last_at: float = 0.0
    groups: set[str] = field(default_factory=set)
    example: str = ""


class ErrorCounter:
    """Counts dead letters by error."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], _Counted] = {}
        self.examined = 0
        self.is_full = False

    def add(self, headers: dict[str, str], died_at: float) -> None:
        self.examined += 1
        description = headers.get("dead-description", "")
        key = (headers.get("dead-reason", ""), normalize_error(description))
        counted = self._errors.get(key)
        if counted is None:
            if len(self._errors) >= MAX_GROUPS:
                self.is_full = True
                return
            counted = self._errors[key] = _Counted(died_at)
        counted.count += 1
        counted.first_at = min(counted.first_at, died_at)
        if died_at >= counted.last_at:
            counted.last_at = died_at
            counted.example = description[:MAX_ERROR_LENGTH]
        group = headers.get("original-group", "")
        if group:
            counted.groups.add(group)

    def result(self, complete: bool) -> model.DeadLetterErrors:
        by_count = sorted(self._errors.items(), key=lambda item: (-item[1].count, -item[1].last_at))
        return model.DeadLetterErrors(
            errors=[
                model.ErrorGroup(
                    reason=reason,
                    error=error,
                    count=counted.count,
                    first_at=counted.first_at,
                    last_at=counted.last_at,
                    groups=sorted(counted.groups),
                    example=counted.example,
                )
                for (reason, error), counted in by_count
            ],
            examined=self.examined,
            complete=complete and not self.is_full,
        )

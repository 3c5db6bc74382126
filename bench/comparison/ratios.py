"""From raw lines to figures: medians over the rounds, and per-round ratios with their spread.

A ratio is computed within a round, in which both had the same machine; noise affects both, so the
median of ratios means more than the ratio of medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PER_CPU = "msgs_per_cpu_s"  # field name of the harness


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        def written(value: float) -> str:
            return (
                f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"
            )

        return f"{written(self.median)} ({written(self.low)}..{written(self.high)})"


def spread(values: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values)) if values else None


class Rows:
    """The raw lines by case and target, without failed ones."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self.failed = [line for line in lines if "error" in line]
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in lines:
            if "error" not in line:
                self._rows.setdefault((line["case"], line["target"]), []).append(line)

    def targets(self, case: str) -> list[str]:
        return [target for found, target in self._rows if found == case]

    def median(self, case: str, target: str, name: str) -> float | None:
        values = [row[name] for row in self._rows.get((case, target), ()) if name in row]
        return statistics.median(values) if values else None

    def least(self, case: str, target: str, name: str) -> float | None:
        return min(
            (row[name] for row in self._rows.get((case, target), ()) if name in row), default=None
        )

    def total(self, case: str, target: str, name: str) -> int:
        return int(sum(row.get(name, 0) for row in self._rows.get((case, target), ())))

    def ratio(self, case: str, one: str, other: str, name: str = PER_CPU) -> Spread | None:
        """Return how many times as much `one` does as `other`, per round."""
        others = {
            row["round"]: row[name] for row in self._rows.get((case, other), ()) if row.get(name)
        }
        return spread(
            [
                row[name] / others[row["round"]]
                for row in self._rows.get((case, one), ())
                if row.get(name) and row["round"] in others
            ]
        )

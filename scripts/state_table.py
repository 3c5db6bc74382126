"""Write the table of delivery states into ARCHITECTURE.md, from `TRANSITIONS` of the queues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sluice.queues.model.delivery_lease import EVENT_MEANINGS, STATE_NAMES, TRANSITIONS

PAGE: Final = Path(__file__).parents[1] / "ARCHITECTURE.md"
TABLE: Final = re.compile(r"(<!-- states -->\n).*?(<!-- end of states -->)", re.DOTALL)


def render_transitions() -> str:
    """Return the table: events with the states before and after them."""
    rows = ["| event | from | to |", "|---|---|---|"]
    for event, meaning in EVENT_MEANINGS.items():
        before = [STATE_NAMES[state] for state, other in TRANSITIONS if other == event]
        after = {STATE_NAMES[to] for (_, other), to in TRANSITIONS.items() if other == event}
        rows.append(f"| {meaning} | {', '.join(before)} | {', '.join(after)} |")
    return "\n".join(rows) + "\n"


def write_table(page: str) -> str:
    """Return the page with the present table."""
    return TABLE.sub(lambda found: found[1] + render_transitions() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(write_table(PAGE.read_text("utf-8")), "utf-8")

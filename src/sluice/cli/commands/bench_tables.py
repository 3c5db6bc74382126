"""Show the figures of `sluice bench`: facts, a table, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from sluice.cli.support import (
    BAD,
    FAINT,
    GOOD,
    WARN,
    Column,
    facts_table,
    format_size,
    styled,
    table,
)

if TYPE_CHECKING:
    from sluice.bench.machine import Disk, Machine
    from sluice.bench.results import Result


def measurement_warnings(disk: Disk | None, seen: bool) -> list[str]:
    warnings = []
    if disk is not None and disk.is_memory:
        warnings.append(
            f"the data is on {disk.filesystem}, which is memory: a sync costs nothing there. "
            "Name a directory on a disk with --data"
        )
    if not seen:
        warnings.append(
            "CPU and memory of the broker cannot be seen:"
            " name its process with --pid, if it is here"
        )
    return warnings


def run_facts(
    machine: Machine, disk: Disk | None, url: str | None, durability: str, processes: int
) -> Table:
    pairs: list[tuple[str, str]] = [
        ("machine", f"{machine.cpu}, {machine.cores} cores, {format_size(machine.memory_bytes)}"),
        ("system", f"{machine.kernel}, {machine.python}"),
        ("sluice", f"{machine.sluice}, {machine.build}"),
    ]
    if disk is not None:
        pairs.append(
            (
                "disk",
                f"{disk.filesystem}; one fdatasync {disk.sync_median_ms:.2f} ms, "
                f"p99 {disk.sync_p99_ms:.2f} ms, of {disk.syncs}",
            )
        )
    pairs += [
        ("durability", f"{durability}: {_DURABILITY_TEXT[durability]}"),
        (
            "broker",
            "our own, a fresh one for each scenario" if url is None else url.rpartition("@")[2],
        ),
        ("generators", f"{processes} process{'es' if processes > 1 else ''}"),
    ]
    return facts_table(pairs)


_DURABILITY_TEXT: Final = {
    "sync": "a publish to a queue is answered after fdatasync",
    "interval": "a publish to a queue is answered after the write, synced within 200 ms",
}

_COLUMNS: Final = (
    Column("scenario"),
    Column("msgs/s", number=True),
    Column("per CPU-s", number=True),
    Column("p50 ms", number=True),
    Column("p99 ms", number=True),
    Column("p99.9 ms", number=True),
    Column("wrong", number=True),
    Column("broker", number=True),
    Column("load", number=True),
)


def result_table(results: Sequence[Result], width: int) -> Table:
    """Lay out the results. `broker` and `load` are cores: of the broker, and of the busiest
    generator.
    """
    rows: list[list[str | Text]] = [
        [
            result.scenario,
            styled(f"{result.per_second:,.0f}", "bold"),
            _or_dash(result.per_cpu_second, "{:,.0f}"),
            *(_milliseconds(result.latency_ms.get(name)) for name in ("p50", "p99", "p99.9")),
            styled("0", GOOD) if result.is_correct else styled(_fault_counts(result), BAD),
            _or_dash(result.broker_cores, "{:.0%}"),
            f"{result.generator_cores:.0%}",
        ]
        for result in results
    ]
    return table(_COLUMNS, rows, width)


def _fault_counts(result: Result) -> str:
    counts = {
        "lost": result.lost,
        "doubled": result.doubled,
        "out of order": result.disordered,
        "refused": result.refused,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _scenario_facts(result: Result) -> list[str]:
    """Return the facts that only this scenario has, as text."""
    notes: list[str] = []
    late: list[str] = []
    for name, value in result.facts.items():
        if name.startswith("memory_bytes_per_"):
            notes.append(f"{value:,.0f} bytes of memory per {name.rpartition('_')[2]}")
        elif name.startswith("sent_late_ms_"):
            late.append(f"{name.rpartition('_')[2]} {value:.2f} ms")
        else:
            notes.append(f"{name.replace('_', ' ')}: {value:,.0f}")
    if late:
        notes.append(f"the generator itself was late by {', '.join(late)}")
    if result.facts and result.memory_bytes is not None and not late:
        notes.append(f"the broker has {format_size(result.memory_bytes)}")
    return notes


def scenario_notes(results: Sequence[Result], disturbed: Sequence[str]) -> list[Text]:
    """Return what each scenario did, its own facts, and warnings."""
    lines: list[Text] = []
    for result in results:
        summary = "; ".join((f"{result.scenario}: {result.what}", *_scenario_facts(result)))
        lines.append(styled(summary, FAINT))
        lines += [warning_line("  ! ", text) for text in result.warnings]
    return [*lines, *(warning_line("! ", text) for text in disturbed)]


def warning_line(prefix: str, text: str) -> Text:
    return Text.assemble((prefix, WARN), styled(text, WARN))

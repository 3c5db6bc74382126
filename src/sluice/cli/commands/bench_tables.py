"""How the figures of `sluice bench` are shown: a head of facts, a table, and what needs words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from sluice.cli.support.output import BAD, FAINT, GOOD, WARN, Column, facts, styled, table
from sluice.cli.support.formatting import size

if TYPE_CHECKING:
    from sluice.bench.machine import Disk, Machine
    from sluice.bench.results import Result


def warnings_of(disk: Disk | None, seen: bool) -> list[str]:
    warnings = []
    if disk is not None and disk.is_memory:
        warnings.append(
            f"the data is on {disk.filesystem}, which is memory: a sync costs nothing there. "
            "Name a directory on a disk with --data"
        )
    if not seen:
        warnings.append(
            "CPU and memory of the broker cannot be seen: name its process with --pid, if it is here"
        )
    return warnings


def head(machine: Machine, disk: Disk | None, url: str | None, durability: str, processes: int) -> Table:
    pairs: list[tuple[str, str]] = [
        ("machine", f"{machine.cpu}, {machine.cores} cores, {size(machine.memory_bytes)}"),
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
        ("durability", f"{durability}: {_PROMISE[durability]}"),
        ("broker", "our own, a fresh one for each scenario" if url is None else url.rpartition("@")[2]),
        ("generators", f"{processes} process{'es' if processes > 1 else ''}"),
    ]
    return facts(pairs)


_PROMISE: Final = {
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
    """`broker` and `load` are cores: what the broker used, and the busiest generator process."""
    rows: list[list[str | Text]] = [
        [
            result.scenario,
            styled(f"{result.per_second:,.0f}", "bold"),
            _or_dash(result.per_cpu_second, "{:,.0f}"),
            *(_milliseconds(result.latency_ms.get(name)) for name in ("p50", "p99", "p99.9")),
            styled("0", GOOD) if result.is_whole else styled(_wrong(result), BAD),
            _or_dash(result.broker_cores, "{:.0%}"),
            f"{result.generator_cores:.0%}",
        ]
        for result in results
    ]
    return table(_COLUMNS, rows, width)


def _wrong(result: Result) -> str:
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


def _facts(result: Result) -> list[str]:
    """What only this scenario tells, in words."""
    said: list[str] = []
    late: list[str] = []
    for name, value in result.facts.items():
        if name.startswith("memory_bytes_per_"):
            said.append(f"{value:,.0f} bytes of memory per {name.rpartition('_')[2]}")
        elif name.startswith("sent_late_ms_"):
            late.append(f"{name.rpartition('_')[2]} {value:.2f} ms")
        else:
            said.append(f"{name.replace('_', ' ')}: {value:,.0f}")
    if late:
        said.append(f"the generator itself was late by {', '.join(late)}")
    if result.facts and result.memory_bytes is not None and not late:
        said.append(f"the broker has {size(result.memory_bytes)}")
    return said


def remarks(results: Sequence[Result], disturbed: Sequence[str]) -> list[Text]:
    """What each scenario did, what only it tells, and what to beware of."""
    lines: list[Text] = []
    for result in results:
        told = "; ".join((f"{result.scenario}: {result.what}", *_facts(result)))
        lines.append(styled(told, FAINT))
        lines += [warning("  ! ", text) for text in result.warnings]
    return [*lines, *(warning("! ", text) for text in disturbed)]


def warning(mark: str, text: str) -> Text:
    return Text.assemble((mark, WARN), styled(text, WARN))

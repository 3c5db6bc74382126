"""Render the tables as Markdown, and insert them into docs/performance.md between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.chart import Group
from comparison.peers import NAMES, PEERS, SLUICE
from comparison.ratios import PER_CPU, Rows

BEGIN = "<!-- made by bench/compare: begin -->"
END = "<!-- made by bench/compare: end -->"
OWN = (
    "<!-- made by bench/compare, with sluice bench: begin -->",
    "<!-- made by bench/compare, with sluice bench: end -->",
)

PLAIN = {
    "ps0_1x1": "QoS 0, 1 to 1, 100 B",
    "ps1_4x4": "QoS 1, 4 to 4, 100 B",
    "many1": "QoS 1, 100 to 100, one message in flight each, 100 B",
    "fan_100": "QoS 0, 1 to 100, 100 B",
}
QUEUES = {
    "q1k": "4 publishers, 4 consumers, 1 KB",
    "q100": "4 publishers, 4 consumers, 100 B",
    "qmany": "64 publishers, 16 consumers, one message in flight each, 1 KB",
}
LATENCY = "lat_q"
FRESH = ("conns", "backlog")
JOBS = "jobs"


def replace_between_marks(page: str, made: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(
            f"the page has no place for the tables: put {marks[0]} and {marks[1]} into it"
        )
    return f"{before}{begin}\n\n{made.strip()}\n\n{end}{after}"


def own_table(document: Mapping[str, Any], chart: str) -> str:
    """Render the output of `sluice bench --json`, with its chart."""
    machine, disk = document["machine"], document["disk"]
    lines = [
        [
            "scenario",
            "msgs/s",
            "per CPU-s",
            "p50, ms",
            "p99, ms",
            "p99.9, ms",
            "lost, doubled, disordered",
        ]
    ]
    for row in document["results"]:
        latency = [row["latency_ms"].get(name) for name in ("p50", "p99", "p99.9")]
        lines.append(
            [
                row["scenario"],
                f"{row['per_second']:,.0f}",
                "-" if row["per_cpu_second"] is None else f"{row['per_cpu_second']:,.0f}",
                *("-" if value is None else f"{value:.2f}" for value in latency),
                f"{row['lost']}, {row['doubled']}, {row['disordered']}",
            ]
        )
    where = (
        f"On {machine['cpu']} with {machine['cores']} cores, {disk['filesystem']} with "
        f"{disk['sync_median_ms']:.2f} ms for one fdatasync, {machine['build']}, "
        f"messages of {document['settings']['payload']:,} bytes:"
    )
    facts = [
        f"{value:,.0f} bytes of memory per {name.rpartition('_')[2]} (`{row['scenario']}`)"
        for row in document["results"]
        for name, value in row["facts"].items()
        if name.startswith("memory_bytes_per_")
    ]
    parts = [
        where,
        f"![Messages per second, per second of broker CPU, and latency of each scenario]({chart})",
    ]
    parts += [_table(lines), "; ".join(facts).capitalize() + "."]
    parts += [f"* **{warning}**" for warning in document["warnings"]]
    return "\n\n".join(parts)


def groups(rows: Rows) -> list[Group]:
    """Return the content of the chart: each case, and Sluice's ratio to each peer in it."""
    found: list[Group] = []
    for title, cases in (("Plain", PLAIN), ("Queue", QUEUES)):
        for case, words in cases.items():
            of = [
                (NAMES[target], ratio)
                for target in rows.targets(case)
                if target != SLUICE.target
                and (ratio := rows.ratio(case, SLUICE.target, target)) is not None
            ]
            if of:
                found.append((f"{title}: {words}", of))
    fastest = [(name, rows.ratio(JOBS, "Sluice, coroutine", name)) for name in rows.targets(JOBS)]
    jobs = [
        (name, ratio)
        for name, ratio in fastest
        if ratio is not None and not name.startswith("Sluice")
    ]
    if jobs:
        found.append(("Jobs that do nothing, per CPU-second of the worker", jobs))
    return found


def tables(rows: Rows, facts: Sequence[str], left_out: Sequence[str], chart: str) -> str:
    parts = ["\n".join(f"* {fact}" for fact in [*facts, *left_out])]
    parts.append(f"![Ratios of messages per second of CPU, Sluice to each peer]({chart})")
    parts.append(_cross("### Plain MQTT", PLAIN, rows))
    parts.append(_cross("### Queues", QUEUES, rows))
    parts.append(_faults(rows))
    parts.append(_latency(rows))
    parts.append(_fresh(rows))
    parts.append(_jobs(rows))
    return "\n\n".join(part for part in parts if part)


def plain_table(rows: Rows) -> str:
    return _cross(
        "### Plain MQTT", {case: PLAIN[case] for case in PLAIN if rows.targets(case)}, rows
    )


def _targets(cases: Sequence[str], rows: Rows) -> list[str]:
    seen = {target for case in cases for target in rows.targets(case)}
    return [peer.target for peer in (SLUICE, *PEERS) if peer.target in seen]


def _cross(title: str, cases: dict[str, str], rows: Rows) -> str:
    """Render cases as rows and brokers as columns: the figure, and Sluice's ratio below it."""
    targets = _targets(list(cases), rows)
    lines = [["messages per CPU-second", *(NAMES[target] for target in targets)]]
    for case, words in cases.items():
        line = [f"{words} (`{case}`)"]
        for target in targets:
            figure = rows.median(case, target, PER_CPU)
            ratio = rows.ratio(case, SLUICE.target, target)
            text = "-" if figure is None else f"{figure:,.0f}"
            line.append(text if ratio is None or target == SLUICE.target else f"{text}<br>{ratio}")
        lines.append(line)
    return f"{title}\n\n{_table(lines)}" if len(targets) > 1 else ""


def _faults(rows: Rows) -> str:
    targets = _targets(list(QUEUES), rows)
    promises = {peer.target: peer.promise for peer in (SLUICE, *PEERS)}
    lines = [
        [
            "queue",
            "its acknowledgement means",
            "delivered",
            "lost",
            "doubled",
            "out of order within a key",
        ]
    ]
    for target in targets:
        counts = [
            sum(rows.total(case, target, name) for case in QUEUES)
            for name in ("delivered", "lost", "dups", "order_viol")
        ]
        lines.append([NAMES[target], promises[target], *(f"{count:,}" for count in counts)])
    return f"All rounds of these cases together:\n\n{_table(lines)}" if targets else ""


def _latency(rows: Rows) -> str:
    targets = _targets([LATENCY], rows)
    lines = [
        [
            "1,000 messages of 1 KB per second, open loop",
            "p50, ms",
            "p99, ms",
            "p99 of the best round, ms",
        ]
    ]
    for target in targets:
        figures = [rows.median(LATENCY, target, name) for name in ("p50_us", "p99_us")]
        figures.append(rows.least(LATENCY, target, "p99_us"))
        lines.append(
            [NAMES[target], *("-" if value is None else f"{value / 1000:.2f}" for value in figures)]
        )
    return f"### Latency\n\n{_table(lines)}" if targets else ""


def _fresh(rows: Rows) -> str:
    targets = _targets(FRESH, rows)
    columns = (
        ("conns", "kb_per_conn", "{:.1f} KB"),
        ("conns", "cpu_us_per_conn", "{:.0f} us"),
        ("backlog", "rss_mb", "{:.0f} MB"),
        ("backlog", PER_CPU, "{:,.0f}"),
        ("backlog", "drain_per_cpu_s", "{:,.0f}"),
    )
    heads = [
        "",
        "memory per idle connection",
        "CPU per connect",
        "memory for 200,000 waiting messages of 1 KB",
    ]
    lines = [[*heads, "enqueued per CPU-second", "drained per CPU-second"]]
    for target in targets:
        line = [NAMES[target]]
        for case, name, form in columns:
            value = rows.median(case, target, name)
            line.append("-" if value is None else form.format(value))
        lines.append(line)
    text = (
        "### Connections and backlog\n\n"
        "A freshly started broker for each; Sluice without HTTP and gRPC. One round."
    )
    return f"{text}\n\n{_table(lines)}" if targets else ""


def _jobs(rows: Rows) -> str:
    names = sorted(rows.targets(JOBS), key=lambda name: -(rows.median(JOBS, name, PER_CPU) or 0))
    lines = [["worker", "jobs per CPU-second of the worker", "Sluice, coroutine, to it"]]
    for name in names:
        figure, ratio = (
            rows.median(JOBS, name, PER_CPU),
            rows.ratio(JOBS, "Sluice, coroutine", name),
        )
        same = name == "Sluice, coroutine"
        lines.append([name, f"{figure:,.0f}", "" if same or ratio is None else str(ratio)])
    text = (
        "### Job queues of Python\n\n"
        "Jobs of 100 B that do nothing; the others on Redis with `appendfsync everysec`."
    )
    return f"{text}\n\n{_table(lines)}" if names else ""


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])

"""`sluice store`: the store of the broker."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from sluice.cli.support import (
    Column,
    CommandContext,
    command,
    facts_table,
    format_count,
    format_plural,
    format_size,
    table,
)


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "store", rich_help_panel=panel)(store)


def store(cli: CommandContext) -> None:
    """Show the store: its health and size, and what Redis itself shows of the queues."""
    found = cli.api.get("/store")
    if cli.print_if_json(found):
        return
    rows = [
        ("store", found["address"]),
        ("health", found["fault"] or "well"),
        ("log", f"{format_size(found['bytes'])} in {format_plural(found['segments'], 'segment')}"),
    ]
    if found["version"]:
        kind = "Redis Cluster" if found["cluster"] else "Redis"
        rows += [
            ("what", f"{kind} {found['version']}"),
            ("owner", found["owner"] or "no node"),
            ("frames", format_count(found["frame"])),
            ("replicas", format_count(found["replicas"])),
        ]
    if found["frames_lost"]:
        rows.append(
            ("lost", f"{format_plural(found['frames_lost'], 'frame')} that it had confirmed")
        )
    rows += [("warning", warning) for warning in found["warnings"]]
    cli.out.show(facts_table(rows))
    if found["queues"]:
        cli.out.show("", _queue_table(found["queues"]))
    if any(queue["groups"] for queue in found["queues"]):
        cli.out.show("", _group_table(found["queues"]))


def _queue_table(queues: list[dict[str, Any]]) -> Table:
    counted = ("produced", "consumed", "acked", "retried", "dead")
    columns = [Column("queue"), Column("partitions", number=True), Column("length", number=True)]
    columns += [Column(head, number=True) for head in counted]
    rows = []
    for queue in queues:
        counters = [format_count(queue["counters"].get(name, 0)) for name in counted]
        rows.append(
            [
                queue["name"],
                format_count(queue["partitions"]),
                format_count(queue["length"]),
                *counters,
            ]
        )
    return table(columns, rows)


def _group_table(queues: list[dict[str, Any]]) -> Table:
    fields = ("pending", "consumers", "lag", "retrying")
    columns = [Column("queue"), Column("group"), *(Column(head, number=True) for head in fields)]
    rows = [
        [queue["name"], group["name"], *(format_count(group[name]) for name in fields)]
        for queue in queues
        for group in queue["groups"]
    ]
    return table(columns, rows)

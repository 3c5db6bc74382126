"""`sluice store`: what the broker keeps its messages in."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from sluice.cli.support.output import Column, facts, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import count, plural, size


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "store", rich_help_panel=panel)(store)


def store(visit: Visit) -> None:
    """The store: whether it is well, how large it is, and what Redis itself shows of the queues."""
    found = visit.api.get("store")
    if visit.answered(found):
        return
    lines = [
        ("store", found["address"]),
        ("health", found["fault"] or "well"),
        ("log", f"{size(found['bytes'])} in {plural(found['segments'], 'segment')}"),
    ]
    if found["version"]:
        kind = "Redis Cluster" if found["cluster"] else "Redis"
        lines += [
            ("what", f"{kind} {found['version']}"),
            ("owner", found["owner"] or "nobody"),
            ("frames", count(found["frame"])),
        ]
    if found["frames_lost"]:
        lines.append(("lost", f"{plural(found['frames_lost'], 'frame')} that it had confirmed"))
    lines += [("warning", warning) for warning in found["warnings"]]
    visit.out.show(facts(lines))
    if found["queues"]:
        visit.out.show("", _queue_table(found["queues"]))
    if any(queue["groups"] for queue in found["queues"]):
        visit.out.show("", _group_table(found["queues"]))


def _queue_table(queues: list[dict[str, Any]]) -> Table:
    counted = ("produced", "consumed", "acked", "retried", "dead")
    columns = [Column("queue"), Column("partitions", number=True), Column("length", number=True)]
    columns += [Column(head, number=True) for head in counted]
    rows = []
    for queue in queues:
        counters = [count(queue["counters"].get(name, 0)) for name in counted]
        rows.append([queue["name"], count(queue["partitions"]), count(queue["length"]), *counters])
    return table(columns, rows)


def _group_table(queues: list[dict[str, Any]]) -> Table:
    told = ("pending", "consumers", "lag", "retrying")
    columns = [Column("queue"), Column("group"), *(Column(head, number=True) for head in told)]
    rows = [
        [queue["name"], group["name"], *(count(group[name]) for name in told)]
        for queue in queues
        for group in queue["groups"]
    ]
    return table(columns, rows)

"""`sluice node` and `sluice nodes`: the broker itself."""

from __future__ import annotations

import typer

from sluice.cli.output import Column, facts, table
from sluice.cli.remote import Visit, command
from sluice.cli.wording import count, duration, plural, read_time, size


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "node", rich_help_panel=panel)(node)
    command(root, "nodes", rich_help_panel=panel)(nodes)


def node(visit: Visit) -> None:
    """The node that answers: version, store, connections, traffic."""
    found = visit.api.get("node")
    if visit.answered(found):
        return
    up = read_time(found["now"]) - read_time(found["started_at"])
    visit.out.show(
        facts(
            [
                ("node", found["name"]),
                ("version", f"{found['version']} ({found['build']})"),
                ("store", found["store"]),
                ("up", duration(up) + (", stopping" if found["stopping"] else "")),
                (
                    "clients",
                    f"{plural(found['connections'], 'connection')}, {plural(found['sessions'], 'session')}, "
                    f"{plural(found['subscriptions'], 'subscription')}",
                ),
                (
                    "kept",
                    f"{plural(found['messages'], 'message')} in {plural(found['queues'], 'queue')}, "
                    f"{count(found['retained'])} retained",
                ),
                (
                    "received",
                    f"{plural(found['publishes_received'], 'publish', 'publishes')}, "
                    f"{plural(found['packets_received'], 'packet')}, {size(found['bytes_received'])}",
                ),
                (
                    "sent",
                    f"{plural(found['publishes_sent'], 'publish', 'publishes')}, "
                    f"{plural(found['packets_sent'], 'packet')}, {size(found['bytes_sent'])}",
                ),
                ("dropped", plural(found["publishes_dropped"], "publish", "publishes")),
            ]
        )
    )


def nodes(visit: Visit) -> None:
    """All nodes of the cluster."""
    found = visit.api.get("nodes")
    if visit.answered(found):
        return
    columns = [Column("node"), Column("version"), Column("store"), Column("up", number=True)]
    columns += [Column(head, number=True) for head in ("connections", "queues", "messages", "in", "out")]
    rows = [
        [
            row["name"],
            row["version"],
            row["store"],
            duration(read_time(row["now"]) - read_time(row["started_at"])),
            count(row["connections"]),
            count(row["queues"]),
            count(row["messages"]),
            size(row["bytes_received"]),
            size(row["bytes_sent"]),
        ]
        for row in found
    ]
    visit.out.show(table(columns, rows))

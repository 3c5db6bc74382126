"""`sluice node`, `sluice nodes` and `sluice cluster status`: the broker itself."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sluice.cli.commands.monitoring.losses import warn_of_losses
from sluice.cli.support import (
    Column,
    CommandContext,
    CommandError,
    command,
    facts_table,
    format_count,
    format_duration,
    format_plural,
    format_size,
    table,
    to_timestamp,
)
from sluice.units import parse_duration


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "node", rich_help_panel=panel)(node)
    command(root, "nodes", rich_help_panel=panel)(nodes)
    cluster = typer.Typer(help="The cluster: its nodes and their cells.", no_args_is_help=True)
    command(cluster, "status")(cluster_status)
    root.add_typer(cluster, name="cluster", rich_help_panel=panel)


def node(cli: CommandContext) -> None:
    """The node that answers: version, store, connections, traffic."""
    found = cli.api.get("/node")
    if cli.print_if_json(found):
        return
    up = to_timestamp(found["now"]) - to_timestamp(found["started_at"])
    cli.out.show(
        facts_table(
            [
                ("node", found["name"]),
                ("version", f"{found['version']} ({found['build']})"),
                ("store", found["store"]),
                ("up", format_duration(up) + (", stopping" if found["stopping"] else "")),
                (
                    "clients",
                    f"{format_plural(found['connections'], 'connection')}, "
                    f"{format_plural(found['sessions'], 'session')}, "
                    f"{format_plural(found['subscriptions'], 'plain subscription')}",
                ),
                (
                    "stored",
                    f"{format_plural(found['messages'], 'message')} in "
                    f"{format_plural(found['queues'], 'queue')}, "
                    f"{format_count(found['retained'])} retained",
                ),
                (
                    "received",
                    f"{format_plural(found['publishes_received'], 'publish', 'publishes')}, "
                    f"{format_plural(found['packets_received'], 'packet')}, "
                    f"{format_size(found['bytes_received'])}",
                ),
                (
                    "sent",
                    f"{format_plural(found['publishes_sent'], 'publish', 'publishes')}, "
                    f"{format_plural(found['packets_sent'], 'packet')}, "
                    f"{format_size(found['bytes_sent'])}",
                ),
                ("dropped", format_plural(found["publishes_dropped"], "publish", "publishes")),
            ]
        )
    )


def nodes(cli: CommandContext) -> None:
    """All nodes of the cluster."""
    found = cli.api.get("/nodes")
    if cli.print_if_json(found):
        return
    columns = [Column("node"), Column("version"), Column("store"), Column("up", number=True)]
    columns += [
        Column(head, number=True) for head in ("connections", "queues", "messages", "in", "out")
    ]
    rows = [
        [
            row["name"],
            row["version"],
            row["store"],
            format_duration(to_timestamp(row["now"]) - to_timestamp(row["started_at"])),
            format_count(row["connections"]),
            format_count(row["queues"]),
            format_count(row["messages"]),
            format_size(row["bytes_received"]),
            format_size(row["bytes_sent"]),
        ]
        for row in found
    ]
    cli.out.show(table(columns, rows))


def cluster_status(
    cli: CommandContext,
    queue: Annotated[
        str, typer.Option("--queue", "-q", help="Show which node owns this queue.")
    ] = "",
    cells: Annotated[bool, typer.Option("--cells", help="List every cell and its node.")] = False,
    wait: Annotated[
        str,
        typer.Option("--wait", help="Wait up to this long (60s) until no cell moves."),
    ] = "0",
    nodes: Annotated[
        int, typer.Option("--nodes", help="With --wait: and until there are this many nodes.")
    ] = 1,
) -> None:
    """Show the nodes, how many cells each owns, and which cells are moving."""
    found = _await_cluster(cli, parse_duration(wait), nodes, queue)
    if cli.print_if_json(found):
        return
    if not found["enabled"]:
        cli.out.show("This broker is alone: cluster.coordinator is off.")
        return
    location = found["place"]
    if location is not None:
        cli.out.show(
            f"queue {location['queue']} is in cell {location['cell']},"
            f" with {location['node'] or 'no node now'}"
        )
        return
    moving = found["moving"]
    state = (
        f"{format_plural(moving, 'cell')} on the way"
        if moving
        else "every cell is where it should be"
    )
    cli.out.show(
        f"cluster {found['name']}: {format_plural(len(found['nodes']), 'node')},"
        f" {len(found['cells'])} cells, {state}"
    )
    warn_of_losses(cli)
    columns = [Column("node"), Column("cells", number=True), Column("up", number=True)]
    columns += [Column(head) for head in ("mqtt", "http", "grpc", "link", "not heard by")]
    rows = [
        [
            f"{row['name']} (answers)" if row["name"] == found["me"] else row["name"],
            format_count(row["cells"]),
            format_duration(cli.now - to_timestamp(row["started_at"])),
            row["mqtt"],
            row["http"],
            row["grpc"],
            row["link"],
            ", ".join(row["suspected_by"]),
        ]
        for row in found["nodes"]
    ]
    cli.out.show(table(columns, rows))
    listed = (
        found["cells"] if cells else [one for one in found["cells"] if one["node"] != one["wanted"]]
    )
    if listed:
        columns = [Column("cell", number=True), Column("with"), Column("goes to")]
        cli.out.show(
            table(
                columns,
                [
                    [
                        format_count(one["cell"]),
                        one["node"] or "no node",
                        one["wanted"] if one["wanted"] != one["node"] else "",
                    ]
                    for one in listed
                ],
            )
        )


def _await_cluster(cli: CommandContext, seconds: float, nodes: int, queue: str) -> Any:
    """Return the cluster, at once or when it is settled. Retries an unreachable node."""
    until = time.monotonic() + seconds
    while True:
        try:
            found = cli.api.get("/cluster", queue=queue) if queue else cli.api.get("/cluster")
        except CommandError:
            if time.monotonic() > until:
                raise
        else:
            settled = not found["enabled"] or (
                found["moving"] == 0 and len(found["nodes"]) >= nodes
            )
            if settled or seconds == 0:
                return found
            if time.monotonic() > until:
                there, moving = len(found["nodes"]), format_plural(found["moving"], "cell")
                raise CommandError(
                    f"the cluster has not settled: {there} of {format_plural(nodes, 'node')} there,"
                    f" {moving} on the way",
                    "Look into the logs of the nodes, or wait longer",
                )
        time.sleep(0.1)

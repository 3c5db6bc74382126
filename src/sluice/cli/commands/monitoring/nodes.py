"""`sluice node`, `sluice nodes` and `sluice cluster status`: the broker itself."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sluice.cli.support.errors import Failure
from sluice.cli.commands.monitoring.losses import warn_of_losses
from sluice.cli.support.output import Column, facts, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import count, duration, plural, read_time, size
from sluice.units import parse_duration


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "node", rich_help_panel=panel)(node)
    command(root, "nodes", rich_help_panel=panel)(nodes)
    cluster = typer.Typer(help="The nodes together: who holds what.", no_args_is_help=True)
    command(cluster, "status")(cluster_status)
    root.add_typer(cluster, name="cluster", rich_help_panel=panel)


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


def cluster_status(
    visit: Visit,
    queue: Annotated[str, typer.Option("--queue", "-q", help="Say which node has this queue.")] = "",
    cells: Annotated[bool, typer.Option("--cells", help="List every cell and who holds it.")] = False,
    wait: Annotated[
        str, typer.Option("--wait", help="Wait so long (60s) until every cell is where it should be.")
    ] = "0",
    nodes: Annotated[
        int, typer.Option("--nodes", help="With --wait: and until so many nodes are there.")
    ] = 1,
) -> None:
    """Nodes, how many cells each holds, and which cells are on their way elsewhere."""
    found = _await_cluster(visit, parse_duration(wait), nodes, queue)
    if visit.answered(found):
        return
    if not found["enabled"]:
        visit.out.show("This broker is alone: cluster.coordinator is off.")
        return
    place = found["place"]
    if place is not None:
        visit.out.show(
            f"queue {place['queue']} is in cell {place['cell']}, with {place['node'] or 'nobody now'}"
        )
        return
    moving = found["moving"]
    state = f"{plural(moving, 'cell')} on the way" if moving else "every cell is where it should be"
    visit.out.show(
        f"cluster {found['name']}: {plural(len(found['nodes']), 'node')}, {len(found['cells'])} cells, {state}"
    )
    warn_of_losses(visit)
    columns = [Column("node"), Column("cells", number=True), Column("up", number=True)]
    columns += [Column(head) for head in ("mqtt", "http", "grpc", "link", "not heard by")]
    rows = [
        [
            f"{row['name']} (answers)" if row["name"] == found["me"] else row["name"],
            count(row["cells"]),
            duration(visit.now - read_time(row["started_at"])),
            row["mqtt"],
            row["http"],
            row["grpc"],
            row["link"],
            ", ".join(row["suspected_by"]),
        ]
        for row in found["nodes"]
    ]
    visit.out.show(table(columns, rows))
    listed = found["cells"] if cells else [one for one in found["cells"] if one["node"] != one["wanted"]]
    if listed:
        columns = [Column("cell", number=True), Column("with"), Column("goes to")]
        visit.out.show(
            table(
                columns,
                [
                    [
                        count(one["cell"]),
                        one["node"] or "nobody",
                        one["wanted"] if one["wanted"] != one["node"] else "",
                    ]
                    for one in listed
                ],
            )
        )


def _await_cluster(visit: Visit, seconds: float, nodes: int, queue: str) -> Any:
    """The cluster as it is, or as soon as it is settled; a node that is not up yet is waited for too."""
    until = time.monotonic() + seconds
    while True:
        try:
            found = visit.api.get("cluster", queue=queue) if queue else visit.api.get("cluster")
        except Failure:
            if time.monotonic() > until:
                raise
        else:
            settled = not found["enabled"] or (found["moving"] == 0 and len(found["nodes"]) >= nodes)
            if settled or seconds == 0:
                return found
            if time.monotonic() > until:
                there, moving = len(found["nodes"]), plural(found["moving"], "cell")
                raise Failure(
                    f"the cluster has not settled: {there} of {plural(nodes, 'node')} there, {moving} on the way",
                    "Look into the logs of the nodes, or wait longer",
                )
        time.sleep(0.1)

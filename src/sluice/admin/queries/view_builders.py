"""Build the views of the node, of the cluster and of the caller."""

from __future__ import annotations

from typing import cast

from sluice import __version__
from sluice.access.identity import Identity
from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade
from sluice.cluster.membership import Directory


def build_node_view(facade: BrokerFacade, name: str, store: str, build: str) -> model.Node:
    broker = facade.broker
    counters = broker.counters
    return model.Node(
        name=name,
        version=__version__,
        build=build,
        store=store,
        started_at=broker.started_at,
        now=facade.engine.now,
        connections=int(counters.connections_open),
        sessions=len(broker.registry.sessions),
        subscriptions=broker.router.subscriptions.count,
        retained=broker.router.retained.count_of_clients(),
        queues=len(facade.engine.queues),
        messages=facade.inspector.count_messages(),
        bytes_received=int(counters.bytes_received),
        bytes_sent=int(counters.bytes_sent),
        packets_received=int(counters.packets_received),
        packets_sent=int(counters.packets_sent),
        publishes_received=int(counters.publishes_received),
        publishes_sent=int(counters.publishes_sent),
        publishes_dropped=int(counters.publishes_dropped),
        stopping=broker.stopping,
    )


def build_caller(identity: Identity) -> model.Caller:
    role = cast(model.RoleName, identity.role.label)
    return model.Caller(identity.name, role, identity.is_anonymous)


def build_cluster(directory: Directory | None, queue: str) -> model.Cluster:
    """Describe the cluster, and the place of a queue if one is named."""
    if directory is None:
        return model.Cluster(enabled=False)
    states = directory.cell_states()
    cells = [model.ClusterCell(one.cell, one.node, one.planned_node) for one in states]
    place = None
    if queue:
        cell = directory.cell_of_queue(queue)
        place = model.QueuePlace(queue, cell, cells[cell].node)
    return model.Cluster(
        enabled=True,
        name=directory.name,
        me=directory.node_name,
        nodes=[
            model.ClusterNode(
                id=one.node.id,
                name=one.node.name,
                started_at=one.node.started_at,
                link=one.node.link,
                mqtt=one.node.mqtt,
                http=one.node.http,
                grpc=one.node.grpc,
                cells=one.cells,
                suspected_by=one.suspected_by,
            )
            for one in directory.node_states()
        ],
        cells=cells,
        moving=sum(one.is_moving for one in states),
        place=place,
    )

"""One admin API for all processes of a node."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from tests.cluster.kit import until
from tests.processes.node_of_processes import CELLS, NodeOfProcesses, clients_everywhere

UP = ("sluice_process_up", ("process", "process-2"))


async def test_counts_of_all_processes_are_on_one_metrics_page_and_in_one_node_view(
    node: NodeOfProcesses,
) -> None:
    broker = node.start(2)
    async with clients_everywhere(node) as clients:
        for nth, client in enumerate(clients):
            await client.publish(f"$queue/count/{nth}", b"x", qos=1)
        await until(lambda: read_metrics(node).get(UP) == 1)
        samples = read_metrics(node)
        assert samples["sluice_queues",] == samples["sluice_messages",] == len(clients)
        assert samples["process_start_time_seconds", ("process", "process-1")] > 0
        assert ("process_start_time_seconds", ("process", "process-2")) in samples
        view = node.get("/api/v1/node").json()
        assert (view["name"], view["queues"], view["messages"]) == ("local", 8, 8)
        assert view["connections"] >= len(clients)
        assert node.get("/api/v1/store").json()["segments"] == CELLS
        with grpc.insecure_channel(str(broker.address("grpc"))) as channel:
            found = await asyncio.to_thread(QueueAdminStub(channel).GetNode, pb.GetNodeRequest())
        assert (found.name, found.queues, found.messages) == ("local", 8, 8)


def read_metrics(node: NodeOfProcesses) -> dict[tuple[object, ...], float]:
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(node.get("/metrics").text)
        for one in family.samples
    }


async def test_missing_process_is_reported_until_it_is_back(node: NodeOfProcesses) -> None:
    node.start(2)
    await until(lambda: node.get("/readyz").status_code == 200)
    await node.kill(2)
    await until(lambda: node.get("/readyz").status_code == 200)
    await until(lambda: read_metrics(node).get(UP) == 1)


async def test_rows_of_queues_of_every_process_are_read_in_bulk(node: NodeOfProcesses) -> None:
    arrow = pytest.importorskip("pyarrow")
    node.start(2)
    queues = [node.queue_of(process, "rows") for process in (1, 2)]
    async with clients_everywhere(node, 1) as clients:
        for queue in queues:
            await clients[0].publish(f"$queue/{queue}", f"to {queue}", qos=1)
    for queue in queues:
        partitions = node.get(f"/api/v1/bulk/queues/{queue}/offsets").json()["partitions"]
        rows: list[bytes] = []
        for partition in range(len(partitions)):
            answer = node.get(
                f"/api/v1/bulk/queues/{queue}/partitions/{partition}/rows"
                "?start=0&end=9&lenient=true"
            )
            assert answer.status_code == 200, answer.text
            rows += arrow.ipc.open_stream(answer.content).read_all().column("value").to_pylist()
        assert rows == [f"to {queue}".encode()]

"""The admin APIs of a cluster: any of three real nodes answers for all of them.

One of the nodes owns no cell of the requested resources.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from tests.cluster.real_nodes.node_processes import Nodes
from tests.support.broker_process import same_build
from tests.support.etcd_process import EtcdProcess
from tests.support.redis_process import RedisProcess

NAMES = ("one", "two", "three")
QUEUES = [f"orders-{nth}" for nth in range(6)]  # in cells of every node


class ClusterApis:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.clients = [
            httpx.Client(
                base_url=f"http://{nodes.by_name[name].address('http')}",
                timeout=30,
                trust_env=False,
            )
            for name in NAMES
        ]

    def get(self, at: int, path: str, **query: Any) -> Any:
        return self._read(self.clients[at].get(f"/api/v1{path}", params=query))

    def post(self, at: int, path: str, body: Any) -> Any:
        return self._read(self.clients[at].post(f"/api/v1{path}", json=body))

    def _read(self, answer: httpx.Response) -> Any:
        assert answer.status_code < 300, answer.text
        return answer.json()

    def stub(self, at: int) -> tuple[Any, Any]:
        channel = grpc.insecure_channel(str(self.nodes.by_name[NAMES[at]].address("grpc")))
        return QueueAdminStub(channel), channel


@pytest.fixture(scope="module")
def apis(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisProcess, etcd_server: EtcdProcess
) -> Iterator[ClusterApis]:
    folder = tmp_path_factory.mktemp("cluster")
    nodes = Nodes(folder, redis_server.url, "", "etcd", etcd_server.endpoint)
    try:
        for name in NAMES:
            nodes.start(name)
        apis = ClusterApis(nodes)
        for nth, queue in enumerate(QUEUES):
            apis.post(nth % 3, "/queues", {"name": queue, "partitions": 2})
            body = {"payload": f"to {queue}", "properties": {"message-id": f"m-{queue}"}}
            apis.post((nth + 1) % 3, f"/queues/{queue}/messages", body)
        yield apis
        for client in apis.clients:
            client.close()
    finally:
        nodes.stop()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_every_node_lists_and_shows_every_queue(apis: ClusterApis, at: int) -> None:
    listed = apis.get(at, "/queues")
    assert [one["name"] for one in listed if one["name"] in QUEUES] == QUEUES
    assert "x-sluice-missing" not in apis.clients[at].get("/api/v1/queues").headers
    assert [one["name"] for one in apis.get(at, "/queues", limit=2)] == [
        one["name"] for one in listed[:2]
    ]
    for queue in QUEUES:
        assert apis.get(at, f"/queues/{queue}/stats")["total_messages"] == 1
        (message,) = apis.get(at, f"/queues/{queue}/messages")
        assert message["payload"] == f"to {queue}"
    assert apis.get(at, "/messages/m-orders-3") == {"queues": ["orders-3"]}
    assert apis.get(at, "/verify") == []
    assert [one["name"] for one in apis.get(at, "/nodes")] == sorted(NAMES)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_every_node_pauses_queues_and_groups_and_moves_messages(apis: ClusterApis, at: int) -> None:
    queue = f"commanded-{at}"
    apis.post(at, "/queues", {"name": queue})
    apis.post(at, f"/queues/{queue}/groups", {"name": "workers"})
    for path in (f"/queues/{queue}", f"/queues/{queue}/groups/workers"):
        assert apis.post(at, f"{path}/pause", {"reason": "repair"})["pause"]["reason"] == "repair"
        assert apis.post(at, f"{path}/resume", {})["pause"] is None
    for name in ("m-1", "m-2", "m-3"):
        body = {"payload": name, "message_id": name, "delay": "1h"}
        apis.post(at, f"/queues/{queue}/messages", body)
    messages = f"/queues/{queue}/messages"
    assert apis.post(at, f"{messages}/m-1/reschedule", {"delay": "0s"})["state"] == "waiting"
    assert apis.clients[at].delete(f"/api/v1{messages}/m-1").status_code == 204
    assert apis.post(at, f"{messages}/reschedule", {"delay": "2h"})["changed"] == 2
    assert apis.post(at, f"{messages}/cancel", {})["changed"] == 2


@pytest.mark.parametrize("at", [0, 1, 2])
def test_error_of_another_node_is_returned_unchanged(apis: ClusterApis, at: int) -> None:
    answer = apis.clients[at].post("/api/v1/queues", json={"name": QUEUES[at]})
    assert answer.status_code == 409
    assert answer.json()["error"] == "queue_exists"
    assert apis.clients[at].get("/api/v1/queues/not-there").status_code == 404
    assert apis.clients[at].post("/api/v1/queues", json={"partitions": 2}).status_code == 400


def test_cluster_view_shows_nodes_and_cell_owners(apis: ClusterApis) -> None:
    reported = [apis.get(at, "/cluster") for at in range(3)]
    assert [one.pop("me") for one in reported] == list(NAMES)
    assert reported[0] == reported[1] == reported[2]
    assert [one["name"] for one in reported[0]["nodes"]] == sorted(NAMES)
    assert [one["cells"] for one in reported[0]["nodes"]] == [4, 4, 4]
    assert reported[0]["moving"] == 0
    assert all(one["node"] == one["wanted"] for one in reported[0]["cells"])
    places = {queue: apis.get(0, "/cluster", queue=queue)["place"]["node"] for queue in QUEUES}
    assert set(places.values()) == set(NAMES)


def test_metrics_of_a_node_cover_its_cells(apis: ClusterApis) -> None:
    lines = apis.clients[1].get("/metrics").text.splitlines()
    wanted = {"sluice_cluster_nodes 3", "sluice_cluster_cells 4", "sluice_cluster_cells_moving 0"}
    assert wanted <= set(lines)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_ranges_for_spark_are_read_through_any_node(apis: ClusterApis, at: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    for queue in QUEUES:
        ends = apis.get(at, f"/bulk/queues/{queue}/offsets")["partitions"]
        rows = []
        for partition in range(len(ends)):
            answer = apis.clients[at].get(
                f"/api/v1/bulk/queues/{queue}/partitions/{partition}/rows",
                params={"start": 0, "end": 9, "lenient": True},
            )
            assert answer.status_code == 200
            rows += arrow.ipc.open_stream(answer.content).read_all().column("value").to_pylist()
        assert rows == [f"to {queue}".encode()]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_batch_for_queues_of_all_nodes_is_committed_once_through_any_node(
    apis: ClusterApis, at: int
) -> None:
    arrow = pytest.importorskip("pyarrow")
    names = [f"batch-{at}-{nth}" for nth in range(6)]
    rows = arrow.table({"value": [b"x"] * 6, "queue": names})
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    kind = {"content-type": "application/vnd.apache.arrow.stream"}
    for attempt in range(2):  # the repetition is recognized
        url = f"/api/v1/bulk/stages/app{at}/1"
        staged = apis.clients[at].post(url, content=sink.getvalue().to_pybytes(), headers=kind)
        assert staged.status_code == 200, staged.text
        done = apis.post(
            at, f"/bulk/stages/app{at}/1/commit", {"stages": [staged.json()["stage"]], "rows": 6}
        )
        assert done == {"committed": True, "rows": 6, "replayed": attempt == 1, "skipped": 0}
    assert [apis.get(at, f"/queues/{name}/stats")["total_messages"] for name in names] == [1] * 6
    assert apis.get((at + 1) % 3, f"/bulk/stages/app{at}") == {"last": 1}


@pytest.mark.parametrize("at", [0, 1, 2])
def test_batch_refused_by_one_node_returns_its_error(apis: ClusterApis, at: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    kind = {"content-type": "application/vnd.apache.arrow.stream"}
    for nth in range(6):  # with its own and other nodes
        name, url = f"small-{at}-{nth}", f"/api/v1/bulk/stages/app-{at}-{nth}/1"
        apis.post(at, "/queues", {"name": name, "limits": {"max_message_size": 10}})
        sink = arrow.BufferOutputStream()
        rows = arrow.table({"value": [b"x" * 11], "queue": [name]})
        with arrow.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        staged = (
            apis.clients[at].post(url, content=sink.getvalue().to_pybytes(), headers=kind).json()
        )
        refused = apis.clients[at].post(f"{url}/commit", json={"stages": [staged["stage"]]})
        assert (refused.status_code, refused.json()["error"]) == (413, "message_too_large"), (
            refused.text
        )
        assert f"queue '{name}' takes" in refused.json()["message"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_grpc_answers_for_all_nodes(apis: ClusterApis, at: int) -> None:
    stub, channel = apis.stub(at)
    with channel:
        listed = stub.ListQueues(pb.ListQueuesRequest(prefix="orders-"), timeout=30)
        assert [one.name for one in listed.queues] == QUEUES
        for queue in QUEUES:
            assert (
                stub.GetQueueStats(pb.GetQueueStatsRequest(name=queue), timeout=30).total_messages
                == 1
            )
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetQueue(pb.GetQueueRequest(name="not-there"), timeout=30)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert ("sluice-error", "unknown_queue") in refused.value.trailing_metadata()
        reported = stub.GetCluster(pb.GetClusterRequest(place_of="$queue/" + QUEUES[0]), timeout=30)
        shown = apis.get(at, "/cluster", queue=QUEUES[0])
        assert (
            [one.name for one in reported.nodes]
            == [one["name"] for one in shown["nodes"]]
            == sorted(NAMES)
        )
        assert (reported.enabled, reported.me, len(reported.cells)) == (
            True,
            NAMES[at],
            len(shown["cells"]),
        )
        assert (reported.place.cell, reported.place.node) == (
            shown["place"]["cell"],
            shown["place"]["node"],
        )


@pytest.mark.parametrize("at", [0, 1, 2])
def test_grpc_shows_and_disconnects_the_clients_of_all_nodes(apis: ClusterApis, at: int) -> None:
    """The session of this client is on its node, not in the cell of its id."""
    name = f"mobile-{at}"
    client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTv5)
    gone = threading.Event()
    client.on_disconnect = lambda *_: gone.set()
    address = apis.nodes.by_name[NAMES[0]].address("mqtt")
    client.connect(address.host, address.port)
    client.loop_start()
    stub, channel = apis.stub(at)
    with channel:
        listed = stub.ListClients(pb.ListClientsRequest(prefix=name), timeout=30)
        assert [one.client for one in listed.clients] == [name]
        found = stub.GetClient(pb.GetClientRequest(client=name), timeout=30)
        assert found.client.connected
        assert stub.KickClient(pb.KickClientRequest(client=name), timeout=30).disconnected
        assert gone.wait(30)
        client.loop_stop()
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetClient(pb.GetClientRequest(client="unknown"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_live_stream_has_the_queues_of_all_nodes(apis: ClusterApis) -> None:
    with apis.clients[0].stream("GET", "/api/v1/live") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                names = [one["name"] for one in json.loads(line[6:])["queues"]]
                break
    assert [name for name in names if name in QUEUES] == QUEUES


def test_command_line_shows_the_cluster(apis: ClusterApis, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        url = f"http://{apis.nodes.by_name['two'].address('http')}"
        done = subprocess.run(
            [sys.executable, "-m", "sluice", "cluster", "status", *arguments, "--url", url],
            env=same_build(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "3 nodes, 12 cells, every cell is where it should be" in " ".join(run().split())
    assert f"queue {QUEUES[0]} is in cell" in run("--queue", QUEUES[0])
    assert json.loads(run("--json"))["me"] == "two"

"""`sluice serve --processes`: real processes that act as one broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from sluice.client import Backoff, Client
from tests.cluster.kit import until
from tests.cluster.real_nodes.node_processes import ClusterLoad
from tests.processes.node_of_processes import CELLS, NodeOfProcesses, clients_everywhere
from tests.support.broker_process import StartBroker

PERSISTENT: dict[str, Any] = {
    "clean_start": False,
    "session_expiry": 600,
    "backoff": Backoff(0.05, 0.2),
}


async def test_clients_of_all_processes_share_topics_queues_and_retained_messages(
    node: NodeOfProcesses,
) -> None:
    node.start(2)
    async with clients_everywhere(node) as clients:
        for client in clients:
            await client.subscribe("news/#", qos=1)
        for nth, client in enumerate(clients):
            await client.publish(f"news/{nth}", b"%d" % nth, qos=1, retain=True)
        for client in clients:
            messages = client.messages()
            received = {(await anext(messages)).topic for _ in clients}
            assert received == {f"news/{nth}" for nth in range(len(clients))}
        async with Client(port=node.port) as late:
            await late.subscribe("news/#", qos=1)
            messages = late.messages()
            retained = sorted([(await anext(messages)).payload for _ in clients])
            assert retained == sorted(b"%d" % nth for nth in range(len(clients)))
        for nth, client in enumerate(clients):
            await client.publish(f"$queue/work/{nth}", b"%d" % nth, qos=1)
        for nth, client in enumerate(reversed(clients)):
            async with client.consumer(f"work/{nth}") as tasks:
                task = await anext(aiter(tasks))
                assert task.payload == b"%d" % nth
                await task.ack()
    assert [one["name"] for one in node.get("/api/v1/nodes").json()] == ["process-1", "process-2"]
    assert len(node.get("/api/v1/queues").json()) == len(clients)


async def test_takeover_will_and_shared_subscription_work_across_processes(
    node: NodeOfProcesses,
) -> None:
    node.start(2)
    async with clients_everywhere(node) as clients:
        watcher, *members = clients
        await watcher.subscribe("gone/#", qos=1)
        for member in members:
            await member.subscribe("$share/s/jobs", qos=1)
        for nth in range(50):
            await watcher.publish("jobs", b"%d" % nth, qos=1)
        received: list[bytes] = []

        async def collect(client: Client) -> None:
            async for message in client.messages():
                received.append(message.payload)

        collecting = [asyncio.create_task(collect(member)) for member in members]
        await until(lambda: len(received) == 50)
        assert len(set(received)) == 50
        for task in collecting:
            task.cancel()
        for nth in range(4):  # some of the pairs are at different processes
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            writer.write(connect_with_will(b"w%d" % nth, b"gone/%d" % nth))
            await reader.readexactly(4)
            _, second = await asyncio.open_connection("127.0.0.1", node.port)
            second.write(connect_with_will(b"w%d" % nth, b"gone/%d" % nth))
            await reader.read()  # the takeover has ended the first connection
            second.close()
            writer.close()
        messages = watcher.messages()
        gone = {(await anext(messages)).topic for _ in range(8)}
        assert gone == {f"gone/{nth}" for nth in range(4)}


def connect_with_will(client_id: bytes, topic: bytes) -> bytes:
    """Return the CONNECT of MQTT 3.1.1 with a clean session and a will."""
    fields = [client_id, topic, b"gone"]
    body = b"\0\4MQTT\4\6\0\0" + b"".join(len(one).to_bytes(2, "big") + one for one in fields)
    return bytes([0x10, len(body)]) + body


async def test_killed_process_is_restarted_and_nothing_acknowledged_is_lost(
    node: NodeOfProcesses,
) -> None:
    node.start(2)
    names = {f"client{nth}": node.port for nth in range(4)}
    async with ClusterLoad(names, tuple(names), queues=4) as work:
        for victim in (2, 1, 2):
            await node.kill(victim)
            await work.more(20)
        await work.check()
    assert work.longest_gap() < 20


async def test_clients_of_other_processes_notice_nothing_when_one_is_killed(
    node: NodeOfProcesses,
) -> None:
    node.start(2)
    queue = node.queue_of(1, "steady")
    async with clients_everywhere(node, 16) as clients:
        await node.kill(2)
        for client in clients:
            await client.publish(f"$queue/{queue}", b"x", qos=1)
        await until(lambda: node.owner_numbers().count(2) == CELLS // 2)
        assert 0 < sum(client.last_loss is None for client in clients) < len(clients)


async def test_hanging_process_is_killed_and_restarted(node: NodeOfProcesses) -> None:
    node.start(2)
    queue = node.queue_of(2, "hung")
    pid = node.pids()[2]
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: node.pids()[2] != pid)
    await until(lambda: node.owner_numbers().count(2) == CELLS // 2)
    async with asyncio.timeout(60), Client(port=node.port) as client:
        await client.publish(f"$queue/{queue}", b"x", qos=1)


async def test_number_of_processes_changes_at_the_next_start_and_nothing_is_lost(
    node: NodeOfProcesses,
) -> None:
    queues = [f"q{nth}" for nth in range(8)]
    for nth, count in enumerate((2, 3, 1)):
        node.start(count)
        assert sorted(set(node.owner_numbers())) == list(range(1, count + 1))
        async with asyncio.timeout(60), Client(port=node.port, client_id="p", **PERSISTENT) as one:
            await one.subscribe("plain/#", qos=1)
            if nth:
                messages = one.messages()
                assert (await anext(messages)).payload == b"%d" % (nth - 1)
            for queue in queues:
                await one.publish(f"$queue/{queue}", b"%d" % nth, qos=1)
        async with asyncio.timeout(60), Client(port=node.port) as other:
            await other.publish("plain/x", b"%d" % nth, qos=1)
            await other.publish(f"kept/{nth}", b"%d" % nth, qos=1, retain=True)
        node.stop()
    node.start(1)
    async with asyncio.timeout(60), Client(port=node.port, client_id="r") as reader:
        for queue in queues:
            async with reader.consumer(queue) as tasks:
                received: list[bytes] = []
                async for task in tasks:
                    received.append(task.payload)
                    await task.ack()
                    if len(received) == 3:
                        break
                assert received == [b"0", b"1", b"2"]
        await reader.subscribe("kept/#", qos=1)
        messages = reader.messages()
        assert {(await anext(messages)).payload for _ in range(3)} == {b"0", b"1", b"2"}


async def test_killed_supervisor_takes_its_processes_with_it(node: NodeOfProcesses) -> None:
    broker = node.start(2)
    pids = node.pids()
    async with Client(port=node.port) as client:
        await client.publish("$queue/q", b"x", qos=1)
    broker.kill()
    await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids.values()))
    node.start(2)
    assert [one["total_messages"] for one in node.get("/api/v1/queues").json()] == [1]


def test_more_processes_than_cells_are_refused_with_a_remedy(node: NodeOfProcesses) -> None:
    node.start(2)
    node.stop()
    with pytest.raises(
        AssertionError, match=r"has 4 cells, too few for 5 processes\. .*--processes 4"
    ):
        node.start(5, cells=0)
    with pytest.raises(AssertionError, match=r"has 4 cells, and processes\.cells is 8\. "):
        node.start(2, cells=8)


def test_second_node_at_the_same_directory_or_port_is_refused(
    node: NodeOfProcesses, tmp_path: Path
) -> None:
    node.start(2)
    with pytest.raises(AssertionError, match="is open in another process"):
        NodeOfProcesses(tmp_path).start(2)
    (tmp_path / "other").mkdir()
    other = NodeOfProcesses(tmp_path / "other")
    with pytest.raises(AssertionError, match=f"the mqtt listener cannot use 127.0.0.1:{node.port}"):
        other.start(2, "--mqtt", f"127.0.0.1:{node.port}")


async def test_sys_topics_count_the_clients_of_all_processes(node: NodeOfProcesses) -> None:
    node.start(2, config='[mqtt]\nsys_interval = "200ms"\n')
    async with clients_everywhere(node) as clients:
        for client in clients:  # at any process
            await client.subscribe("$SYS/broker/clients/connected")
        for client in clients:
            async for message in client.messages():
                if int(message.payload) == len(clients):
                    break


def test_supervisor_notifies_systemd_and_its_watchdog(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        broker = start_broker(flags=["--processes", "2"], environ=environ)
        received: list[bytes] = []
        while not received or not received[-1].startswith(b"READY=1"):
            received.append(systemd.recv(4096))
        assert f"MAINPID={broker.process.pid}".encode() in received[-1]
        assert systemd.recv(4096) == systemd.recv(4096) == b"WATCHDOG=1"

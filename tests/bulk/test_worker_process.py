"""The read worker: a test drives it over its two sockets."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from librt.strings import BytesWriter

from sluice.bulk import worker_protocol
from sluice.bulk.read_worker import serve_reader
from sluice.message import Message, write_message_fields
from sluice.store.embedded.layout import log_name
from sluice.store.protocol import MESSAGE, write_record

PIDS = {4: 40, 7: 70}  # by partition
Place = tuple[int, int, int]


class WorkerDriver:
    """The API's side of a reader, and a log with interleaved messages of two partitions."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.control, control = socket.socketpair()
        self.output, output = socket.socketpair()
        for end in (self.control, self.output):
            end.settimeout(30)
        self._answers = self.control.makefile("rb")
        self.places: dict[int, list[Place]] = {number: [] for number in PIDS}
        log = BytesWriter()
        start = BytesWriter()
        write_message_fields(start, Message(b""))
        for seq in range(rows):
            for number, pid in PIDS.items():
                at = len(log)
                payload = b"%d-%d" % (number, seq)
                write_record(log, MESSAGE, 0, pid, seq, 0, 0, 0, start.getvalue(), payload)
                self.places[number].append((seq, 1 << 32 | at, len(log) - at))
        (folder / log_name(1)).write_bytes(log.getvalue())
        self._thread = threading.Thread(
            target=serve_reader, args=([control.detach(), output.detach()],)
        )
        self._thread.start()
        asked = {
            "directory": str(folder),
            "queue": "q",
            "parts": list(PIDS.items()),
            "columns": ["value", "partition", "sequence"],
            "chunked": False,
        }
        self.control.sendall(
            worker_protocol.encode_command(worker_protocol.REQUEST, json.dumps(asked).encode())
        )

    def send_positions(self, part: int, places: list[Place]) -> None:
        packed = b"".join(worker_protocol.PLACE.pack(*place) for place in places)
        self.control.sendall(
            worker_protocol.encode_part_command(part, worker_protocol.PLACES, packed)
        )

    def send(self, part: int, kind: bytes) -> None:
        self.control.sendall(worker_protocol.encode_part_command(part, kind))

    def receive(self) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self._answers.readline())
        return reported

    def rows(self) -> list[bytes]:
        """Return everything that it sent, to its end."""
        data = b""
        while piece := self.output.recv(1 << 16):
            data += piece
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        found: list[bytes] = table.column("value").to_pylist()
        places = zip(table.column("partition").to_pylist(), table.column("sequence").to_pylist())
        assert [b"%d-%d" % place for place in places] == found
        return found

    def close(self) -> None:
        for one in (self._answers, self.control, self.output):
            one.close()
        self._thread.join(30)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[WorkerDriver]:
    driver = WorkerDriver(tmp_path, 4)
    yield driver
    driver.close()


def test_partitions_are_read_in_log_order(driver: WorkerDriver) -> None:
    driver.send_positions(0, driver.places[4])
    driver.send(0, worker_protocol.END)
    driver.send_positions(1, driver.places[7][1:])
    driver.send(1, worker_protocol.END)
    assert [driver.receive() for _ in range(3)] == [{"done": 0}, {"done": 1}, {"is_ready": True}]
    driver.control.sendall(worker_protocol.encode_command(worker_protocol.START))
    assert driver.receive() == {"is_ended": True}
    assert driver.rows() == [b"4-0", b"4-1", b"7-1", b"4-2", b"7-2", b"4-3", b"7-3"]


def test_missing_message_blocks_only_its_partition_until_it_is_found(driver: WorkerDriver) -> None:
    moved, behind = driver.places[7][2], driver.places[7][3]
    # A place with a message of another partition.
    lost = (
        moved[0],
        driver.places[4][2][1],
        driver.places[4][2][2],
    )
    driver.send_positions(0, driver.places[4])
    driver.send(0, worker_protocol.END)
    driver.send_positions(1, [*driver.places[7][:2], lost])
    driver.send_positions(1, [behind])
    driver.send(1, worker_protocol.END)
    assert [driver.receive() for _ in range(2)] == [{"done": 1}, {"is_ready": True}]
    driver.control.sendall(worker_protocol.encode_command(worker_protocol.START))
    assert driver.receive() == {"missing": 2, "part": 1}
    driver.send_positions(1, [behind])  # it was sent before the report, and is sent again below
    driver.send(1, worker_protocol.RESTART)
    driver.send_positions(1, [moved, behind])
    driver.send(1, worker_protocol.END)
    assert [driver.receive() for _ in range(3)] == [{"done": 0}, {"done": 1}, {"is_ended": True}]
    assert driver.rows() == [b"4-0", b"7-0", b"4-1", b"7-1", b"4-2", b"7-2", b"4-3", b"7-3"]


def test_known_positions_of_a_partition_are_dropped_with_a_missing_message(
    driver: WorkerDriver,
) -> None:
    nowhere = (1, 1 << 32 | 1 << 20, 50)
    driver.send_positions(1, [driver.places[7][0], nowhere])
    driver.send_positions(1, driver.places[7][2:])
    driver.send(1, worker_protocol.END)
    driver.send_positions(0, driver.places[4])
    driver.send(0, worker_protocol.END)
    done = {"done": 1}
    assert [driver.receive() for _ in range(4)] == [{"done": 0}, done, done, {"is_ready": True}]
    driver.control.sendall(worker_protocol.encode_command(worker_protocol.START))
    assert driver.receive() == {"missing": 1, "part": 1}
    driver.send(1, worker_protocol.RESTART)
    driver.send_positions(1, driver.places[7][1:])
    driver.send(1, worker_protocol.END)
    assert [driver.receive() for _ in range(2)] == [done, {"is_ended": True}]
    found = driver.rows()
    assert [row for row in found if row.startswith(b"4")] == [b"4-0", b"4-1", b"4-2", b"4-3"]
    assert [row for row in found if row.startswith(b"7")] == [b"7-0", b"7-1", b"7-2", b"7-3"]


def test_messages_of_a_deleted_log_are_missing(driver: WorkerDriver, tmp_path: Path) -> None:
    os.unlink(tmp_path / log_name(1))
    driver.send_positions(0, driver.places[4])
    driver.send(1, worker_protocol.END)
    driver.send(0, worker_protocol.END)
    assert [driver.receive() for _ in range(2)] == [{"done": 0}, {"missing": 0, "part": 0}]
    driver.send(0, worker_protocol.RESTART)
    driver.send(0, worker_protocol.END)  # the message was deleted meanwhile
    assert driver.receive() == {"is_ready": True}
    driver.control.sendall(worker_protocol.encode_command(worker_protocol.START))
    assert driver.receive() == {"is_ended": True}
    assert driver.rows() == []

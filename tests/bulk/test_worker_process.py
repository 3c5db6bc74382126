"""What the reading process does when it is told of places: played by hand, over the two sockets that it has."""

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
from sluice.bulk.read_worker import serve
from sluice.message import Message, write_start
from sluice.store.embedded.layout import log_name
from sluice.store.protocol import MESSAGE, write_record

PIDS = {4: 40, 7: 70}  # by partition
Place = tuple[int, int, int]


class Hand:
    """The door's side of a reader, and a log with messages of two partitions between one another."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.line, line = socket.socketpair()
        self.way, way = socket.socketpair()
        for end in (self.line, self.way):
            end.settimeout(30)
        self._answers = self.line.makefile("rb")
        self.places: dict[int, list[Place]] = {number: [] for number in PIDS}
        log = BytesWriter()
        start = BytesWriter()
        write_start(start, Message(b""))
        for seq in range(rows):
            for number, pid in PIDS.items():
                at = len(log)
                payload = b"%d-%d" % (number, seq)
                write_record(log, MESSAGE, 0, pid, seq, 0, 0, 0, start.getvalue(), payload)
                self.places[number].append((seq, 1 << 32 | at, len(log) - at))
        (folder / log_name(1)).write_bytes(log.getvalue())
        self._thread = threading.Thread(target=serve, args=([line.detach(), way.detach()],))
        self._thread.start()
        asked = {
            "directory": str(folder),
            "queue": "q",
            "parts": list(PIDS.items()),
            "columns": ["value", "partition", "sequence"],
            "chunked": False,
        }
        self.line.sendall(worker_protocol.said(worker_protocol.REQUEST, json.dumps(asked).encode()))

    def tell(self, part: int, places: list[Place]) -> None:
        packed = b"".join(worker_protocol.PLACE.pack(*place) for place in places)
        self.line.sendall(worker_protocol.said_of(part, worker_protocol.PLACES, packed))

    def say(self, part: int, kind: bytes) -> None:
        self.line.sendall(worker_protocol.said_of(part, kind))

    def answer(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._answers.readline())
        return told

    def rows(self) -> list[bytes]:
        """Whatever it sent, to its end."""
        data = b""
        while piece := self.way.recv(1 << 16):
            data += piece
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        found: list[bytes] = table.column("value").to_pylist()
        places = zip(table.column("partition").to_pylist(), table.column("sequence").to_pylist())
        assert [b"%d-%d" % place for place in places] == found
        return found

    def close(self) -> None:
        for one in (self._answers, self.line, self.way):
            one.close()
        self._thread.join(30)


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    hand = Hand(tmp_path, 4)
    yield hand
    hand.close()


def test_partitions_come_as_they_lie_in_the_log(hand: Hand) -> None:
    hand.tell(0, hand.places[4])
    hand.say(0, worker_protocol.LAST)
    hand.tell(1, hand.places[7][1:])
    hand.say(1, worker_protocol.LAST)
    assert [hand.answer() for _ in range(3)] == [{"done": 0}, {"done": 1}, {"is_ready": True}]
    hand.line.sendall(worker_protocol.said(worker_protocol.GO))
    assert hand.answer() == {"is_ended": True}
    assert hand.rows() == [b"4-0", b"4-1", b"7-1", b"4-2", b"7-2", b"4-3", b"7-3"]


def test_a_message_that_is_missing_holds_up_its_own_partition_until_it_is_found(hand: Hand) -> None:
    moved, behind = hand.places[7][2], hand.places[7][3]
    lost = (moved[0], hand.places[4][2][1], hand.places[4][2][2])  # where somebody else's message is
    hand.tell(0, hand.places[4])
    hand.say(0, worker_protocol.LAST)
    hand.tell(1, [*hand.places[7][:2], lost])
    hand.tell(1, [behind])
    hand.say(1, worker_protocol.LAST)
    assert [hand.answer() for _ in range(2)] == [{"done": 1}, {"is_ready": True}]
    hand.line.sendall(worker_protocol.said(worker_protocol.GO))
    assert hand.answer() == {"missing": 2, "part": 1}
    hand.tell(1, [behind])  # it was on its way already, and is told again
    hand.say(1, worker_protocol.AGAIN)
    hand.tell(1, [moved, behind])
    hand.say(1, worker_protocol.LAST)
    assert [hand.answer() for _ in range(3)] == [{"done": 0}, {"done": 1}, {"is_ended": True}]
    assert hand.rows() == [b"4-0", b"7-0", b"4-1", b"7-1", b"4-2", b"7-2", b"4-3", b"7-3"]


def test_what_was_known_of_a_partition_is_forgotten_with_a_message_that_is_missing(hand: Hand) -> None:
    nowhere = (1, 1 << 32 | 1 << 20, 50)
    hand.tell(1, [hand.places[7][0], nowhere])
    hand.tell(1, hand.places[7][2:])
    hand.say(1, worker_protocol.LAST)
    hand.tell(0, hand.places[4])
    hand.say(0, worker_protocol.LAST)
    done = {"done": 1}
    assert [hand.answer() for _ in range(4)] == [{"done": 0}, done, done, {"is_ready": True}]
    hand.line.sendall(worker_protocol.said(worker_protocol.GO))
    assert hand.answer() == {"missing": 1, "part": 1}
    hand.say(1, worker_protocol.AGAIN)
    hand.tell(1, hand.places[7][1:])
    hand.say(1, worker_protocol.LAST)
    assert [hand.answer() for _ in range(2)] == [done, {"is_ended": True}]
    found = hand.rows()
    assert [row for row in found if row.startswith(b"4")] == [b"4-0", b"4-1", b"4-2", b"4-3"]
    assert [row for row in found if row.startswith(b"7")] == [b"7-0", b"7-1", b"7-2", b"7-3"]


def test_messages_whose_log_is_gone_are_missing(hand: Hand, tmp_path: Path) -> None:
    os.unlink(tmp_path / log_name(1))
    hand.tell(0, hand.places[4])
    hand.say(1, worker_protocol.LAST)
    hand.say(0, worker_protocol.LAST)
    assert [hand.answer() for _ in range(2)] == [{"done": 0}, {"missing": 0, "part": 0}]
    hand.say(0, worker_protocol.AGAIN)
    hand.say(0, worker_protocol.LAST)  # it was let go meanwhile
    assert hand.answer() == {"is_ready": True}
    hand.line.sendall(worker_protocol.said(worker_protocol.GO))
    assert hand.answer() == {"is_ended": True}
    assert hand.rows() == []

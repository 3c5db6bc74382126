"""The reader thread: messages by address and rows by segment, on a connection of its own.

Commits do not wait for reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from librt.strings import BytesWriter

from sluice.store.protocol import MESSAGE, write_row
from sluice.store.redis.connection import RedisChannel
from sluice.store.redis.errors import is_transient, permanent_error
from sluice.store.redis.keys import PartitionKeys, RedisKeys
from sluice.store.redis.log.address_index import AddressIndex
from sluice.store.redis.log.log_entries import read_log_entry
from sluice.store.redis.log.stream_reads import fetch_records, read_frames

_PAUSE_SECONDS = 0.1


class ReadRequest:
    """A read from Redis. The thread calls `read`, and repeats it if there is no reply."""

    def __init__(self, read: Callable[[], object], done: Callable[..., None]) -> None:
        self.read = read
        self.done = done


class LogReader:
    def __init__(
        self,
        channel: RedisChannel,
        keys: RedisKeys,
        index: AddressIndex,
        partition_keys: PartitionKeys,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._keys = keys
        self._index = index
        self._partition_keys = partition_keys
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._is_stopping = False
        self._requests: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-reader", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._requests.put(ReadRequest(lambda: self._read_records(addresses), done))

    def scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._requests.put(ReadRequest(lambda: self._read_rows(segment), done))

    def stop(self) -> None:
        self._is_stopping = True
        self._requests.put(None)
        self._worker.join()
        self._channel.close()

    # -- in the reader thread

    def _run(self) -> None:
        try:
            while (request := self._requests.get()) is not None:
                is_answered, result = self._serve_request(request)
                if is_answered:
                    self._notify(request.done, result)
        except Exception as error:
            failure = permanent_error(error)
            failure.__cause__ = error
            self._notify(self._on_failure, failure)

    def _serve_request(self, request: ReadRequest) -> tuple[bool, object]:
        while True:
            try:
                return True, request.read()
            except Exception as fault:
                if not is_transient(fault):
                    raise
                if self._is_stopping:
                    return False, None
            time.sleep(_PAUSE_SECONDS)

    def _read_records(self, addresses: list[int]) -> list[bytes | None]:
        positions: list[tuple[str, int] | None] = []
        for address in addresses:
            found = self._index.find(address)
            positions.append(
                None if found is None else (self._partition_keys.base_key(found[0]), found[1])
            )
        bodies = fetch_records(
            self._channel, [position for position in positions if position is not None]
        )
        return [None if position is None else bodies.get(position) for position in positions]

    def _read_rows(self, segment: int) -> list[bytes]:
        chunks: list[bytes] = []
        for frames in read_frames(self._channel, self._keys, segment):
            rows = BytesWriter()
            for frame in frames:
                for record in read_log_entry(frame.log_entry, frame.address):
                    if record.kind == MESSAGE:
                        write_row(rows, record.address, record)
            if len(rows):
                chunks.append(rows.getvalue())
        return chunks

    def _notify(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass  # the loop is closed

"""The reader thread: messages by address, rows by segment, on a line of its own: commits do not wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from librt.strings import BytesWriter

from sluice.store.protocol import MESSAGE, write_row
from sluice.store.redis.log.stream_reads import fetch
from sluice.store.redis.errors import final_fault, passes
from sluice.store.redis.log.log_entries import read_log
from sluice.store.redis.log.address_index import Index
from sluice.store.redis.keys import Keys
from sluice.store.redis.connection import Link
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.log_segments import frames_of

_PAUSE_SECONDS = 0.1


class Request:
    """A question for Redis. `ask` is called in the thread, and again if the answer did not come."""

    def __init__(self, ask: Callable[[], object], done: Callable[..., None]) -> None:
        self.ask = ask
        self.done = done


class Reader:
    def __init__(
        self,
        link: Link,
        keys: Keys,
        index: Index,
        places: Places,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._index = index
        self._places = places
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._stopping = False
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-reader", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._requests.put(Request(lambda: self._read(addresses), done))

    def scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._requests.put(Request(lambda: self._rows(segment), done))

    def stop(self) -> None:
        self._stopping = True
        self._requests.put(None)
        self._worker.join()
        self._link.close()

    # -- in the thread

    def _run(self) -> None:
        try:
            while (request := self._requests.get()) is not None:
                answered, answer = self._answer(request)
                if answered:
                    self._tell(request.done, answer)
        except Exception as error:
            fault = final_fault(error)
            fault.__cause__ = error
            self._tell(self._on_failure, fault)

    def _answer(self, request: Request) -> tuple[bool, object]:
        while True:
            try:
                return True, request.ask()
            except Exception as fault:
                if not passes(fault):
                    raise
                if self._stopping:
                    return False, None
            time.sleep(_PAUSE_SECONDS)

    def _read(self, addresses: list[int]) -> list[bytes | None]:
        wanted: list[tuple[str, int] | None] = []
        for address in addresses:
            found = self._index.find(address)
            wanted.append(None if found is None else (self._places.base(found[0]), found[1]))
        bodies = fetch(self._link, [place for place in wanted if place is not None])
        return [None if place is None else bodies.get(place) for place in wanted]

    def _rows(self, segment: int) -> list[bytes]:
        pieces: list[bytes] = []
        for frames in frames_of(self._link, self._keys, segment):
            rows = BytesWriter()
            for frame in frames:
                for record in read_log(frame.log, frame.address):
                    if record.kind == MESSAGE:
                        write_row(rows, record.address, record)
            if len(rows):
                pieces.append(rows.getvalue())
        return pieces

    def _tell(self, callback: Callable[..., object], *facts: object) -> None:
        try:
            self._call_soon_threadsafe(callback, *facts)
        except RuntimeError:
            pass  # the loop is closed

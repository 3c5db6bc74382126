"""The coordination KV of processes of one machine: their supervisor has it, at a socket pair.

Each message is a line of JSON. A request is `[number, operation, arguments...]`, its answer
`[number, result]`. Changes arrive as `["changes", [[key, value], ...]]`, and the request `watch` is
answered with all entries. `["stop"]` asks this process to stop; so does the end of the connection,
because a process without its supervisor would not be restarted. `processes.supervisor` is the other
end.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sluice.cluster.membership.kv import Change, CoordinatorUnavailable, Lease

# A lease ends with its process. This is how long a node may own cells without asking again.
LEASE_SECONDS: Final = 365 * 86400.0
MAX_LINE_BYTES: Final = 1 << 24


class ProcessKv:
    """A `CoordinationKv` at the supervisor. `on_stop` is called when this process must stop."""

    def __init__(self, channel: socket.socket, on_stop: Callable[[], object]) -> None:
        self._channel = channel
        self._on_stop = on_stop
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._on_snapshot: Callable[[dict[str, bytes]], None] = lambda entries: None
        self._on_changes: Callable[[Sequence[Change]], None] = lambda changes: None
        self._watch_number = 0

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        self._on_snapshot = on_snapshot
        self._on_changes = on_changes
        self._opening = asyncio.get_running_loop().create_task(self._start_watch())

    async def _start_watch(self) -> None:
        await self._open()
        self._watch_number = self._send("watch")

    async def close(self) -> None:
        """Close nothing: the supervisor still has to hear how the stop went."""

    def report_ready(self, listeners: Mapping[str, str]) -> None:
        """Report that this process serves, with the addresses of its listeners by name."""
        self._send("ready", dict(listeners))

    async def grant(self, seconds: float) -> Lease:
        return Lease(str(await self._ask("grant")), LEASE_SECONDS)

    async def keep_alive(self, lease: Lease) -> bool:
        return bool(await self._ask("keep", lease.id))

    async def revoke(self, lease: Lease) -> None:
        await self._ask("revoke", lease.id)

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None:
        if not await self._ask("put", key, value.decode(), lease.id):
            raise CoordinatorUnavailable("the lease of this process has ended")

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        found = await self._ask("swap", key, _text(old), _text(new), guard)
        return None if found is None else str(found).encode()

    async def revoke_lease_of(self, key: str) -> None:
        await self._ask("evict", key)

    # ---- the connection

    async def _open(self) -> None:
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(
                sock=self._channel, limit=MAX_LINE_BYTES
            )
            self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    async def _ask(self, operation: str, *arguments: object) -> Any:
        await self._open()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[self._send(operation, *arguments)] = answer
        return await answer

    def _send(self, operation: str, *arguments: object) -> int:
        writer = self._writer
        if writer is None or writer.is_closing():
            raise CoordinatorUnavailable("the supervisor of this process has ended")
        self._last_number += 1
        writer.write(json.dumps([self._last_number, operation, *arguments]).encode() + b"\n")
        return self._last_number

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except OSError:
            pass  # the supervisor was killed
        finally:
            assert self._writer is not None
            self._writer.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(
                        CoordinatorUnavailable("the supervisor of this process has ended")
                    )
            self._answers.clear()
            self._on_stop()

    def _receive(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == "changes":
            self._on_changes([(key, _data(value)) for key, value in message[1]])
        elif kind == "stop":
            self._on_stop()
        elif kind == self._watch_number:
            self._on_snapshot({key: value.encode() for key, value in message[1].items()})
        else:
            answer = self._answers.pop(kind, None)
            if answer is not None and not answer.done():
                answer.set_result(message[1])


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _data(value: str | None) -> bytes | None:
    return None if value is None else value.encode()

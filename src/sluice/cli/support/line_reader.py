"""Read lines of a pipe, a terminal or a file as they arrive, without blocking the event loop.

`tail -f log | sluice publish logs` may be silent for an hour: the connection must stay alive
meanwhile, and Ctrl-C must end it. A thread blocked in a read can be neither notified nor ended, so
the event loop itself waits for the descriptor. A plain file is always readable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

CHUNK_BYTES: Final = 65_536


async def read_lines(source: BinaryIO) -> AsyncIterator[list[bytes]]:
    """Yield the lines that have arrived, without line ends. Closes `source`.

    The last line need not have a line end.
    """
    rest = b""
    with source:
        while data := await _read(source):
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


async def _read(source: BinaryIO) -> bytes:
    try:
        descriptor = source.fileno()
        await _wait_readable(descriptor)
    except (OSError, ValueError):  # a plain file, /dev/null, or no file at all
        return source.read(CHUNK_BYTES)
    return os.read(descriptor, CHUNK_BYTES)


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)

"""Publishes the jobs of `task.send`: over the running worker, or over a connection of its own.

A connection opens with the first job and belongs to the event loop that opened it; `send_sync` has
one for all threads of the process. A process that was forked opens new ones.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from sluice.client import Client
from sluice.client import sync as blocking
from sluice.client.queues import Publisher


class JobSender:
    """The connections by which one worker's tasks send jobs."""

    def __init__(self, name: str, make_client: Callable[..., Client]) -> None:
        self._name = name
        self._make_client = make_client
        self._running: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._own: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._opening: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._blocking: tuple[int, blocking.Client] | None = None  # with its process id
        self._blocking_lock = threading.Lock()
        self._publishers: dict[tuple[int, str], Publisher] = {}

    def use(self, client: Client | None) -> None:
        """Send over the connection of the running worker; None: it has ended."""
        self._running = None if client is None else (asyncio.get_running_loop(), client)
        self._publishers.clear()

    async def send(self, queue: str, payload: object, options: dict[str, Any]) -> str:
        client = await self._client()
        key = (id(client), queue)
        publisher = self._publishers.get(key)
        if publisher is None:
            publisher = self._publishers[key] = client.publisher(queue)
        return await publisher.send(payload, **options)

    def send_sync(self, queue: str, payload: object, options: dict[str, Any]) -> str:
        with self._blocking_lock:
            if self._blocking is None or self._blocking[0] != os.getpid():
                client = blocking.Client.wrap(self._make_client(**self._own_options()))
                client.connect()
                self._blocking = (os.getpid(), client)
                atexit.register(self._close_blocking)
            publisher = self._blocking[1].publisher(queue)
        return publisher.send(payload, **options)

    async def close(self) -> None:
        """Close the connections that were opened here. A later job opens new ones."""
        own, self._own = self._own, None
        self._publishers.clear()
        if own is not None and own[0] is asyncio.get_running_loop():
            await own[1].close()
        await asyncio.to_thread(self._close_blocking)

    async def _client(self) -> Client:
        loop = asyncio.get_running_loop()
        if self._running is not None and self._running[0] is loop:
            return self._running[1]
        if self._own is not None and self._own[0] is loop:
            return self._own[1]
        if self._opening is None or self._opening[0] is not loop:
            self._opening = (loop, asyncio.Lock())
        async with self._opening[1]:
            if self._own is not None and self._own[0] is loop:
                return self._own[1]
            client = self._make_client(**self._own_options())
            await client.connect()
            self._own = (loop, client)
            self._publishers.clear()
            return client

    def _own_options(self) -> dict[str, Any]:
        return {"client_id": f"{self._name}-sender-{secrets.token_hex(4)}", "session_expiry": 0}

    def _close_blocking(self) -> None:
        with self._blocking_lock:
            made, self._blocking = self._blocking, None
        if made is not None and made[0] == os.getpid():
            made[1].close()

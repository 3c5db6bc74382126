"""An event loop in its own thread, for programs without one: takes coroutines, returns results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from sluice.client.errors import ClientClosed, ClientError

P = ParamSpec("P")
R = TypeVar("R")


class Portal:
    """A thread that starts with the first call and ends with `close`.

    It is a daemon thread: a program that ends without closing is not kept alive by it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def wait(self, call: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result. An interrupt (Ctrl-C) cancels the coroutine."""
        try:
            loop = self._running()
            if threading.current_thread() is self._thread:
                raise ClientError(
                    "a callback of the client cannot wait for the client",
                    "Use publish_nowait, or another thread",
                )
        except ClientError:
            call.close()
            raise
        future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a plain function in the loop and return its result."""
        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        outcome: Future[R] = Future()

        def call() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

        self._running().call_soon_threadsafe(call)
        return outcome.result()

    def close(self) -> None:
        """End the loop and the thread. Safe to call twice."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="sluice-client", daemon=True
            )
            self._thread.start()
        if self._loop.is_closed():
            raise ClientClosed("the client is closed", "Make a new Client")
        return self._loop

"""Runs a worker in several processes: starts, restarts and stops them, and reloads changed code.

Each process is the same command without `--processes` and `--reload`, in a session of its own, so
that Ctrl-C reaches it through the supervisor alone. A pipe whose writing end only the supervisor
has tells a process that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from sluice.backoff import Backoff

log = logging.getLogger("sluice.worker")

SUPERVISOR_PIPE: Final = "SLUICE_WORKER_SUPERVISOR"  # the variable with the reading end's number
EXIT_USAGE: Final = 2  # a wrong command or module: a restart cannot help
WATCH_SECONDS: Final = 0.5
STABLE_SECONDS: Final = 30.0  # a process that ran this long starts again without a pause
UNWATCHED: Final = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
RESTART_BACKOFF: Final = Backoff(initial_seconds=0.5, max_seconds=30.0)


class Supervisor:
    """`count` processes of one command. `watch` is the folder whose Python files restart them."""

    def __init__(self, command: Sequence[str], count: int, watch: Path | None = None) -> None:
        self._command = list(command)
        self._count = count
        self._watch = watch
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # by number
        self._stopping = asyncio.Event()
        self._generation = 0  # counts changes of files
        self._exit_code = 0

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, and return the exit code."""
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self.stop)
        reading, writing = os.pipe()
        watcher = None if self._watch is None else asyncio.create_task(self._watch_files())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._count + 1):
                    group.create_task(self._keep_running(number, reading))
        finally:
            if watcher is not None:
                watcher.cancel()
            os.close(writing)
            os.close(reading)
            for one in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(one)
        return self._exit_code

    def stop(self) -> None:
        """Stop all processes gracefully; a second call does not wait for their jobs."""
        self._stopping.set()
        self._terminate()

    def _terminate(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()

    async def _keep_running(self, number: int, pipe: int) -> None:
        """Run one process, and another one when it ends, until the supervisor stops."""
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started, generation = loop.time(), self._generation
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, SUPERVISOR_PIPE: str(pipe)},
                pass_fds=[pipe],
                start_new_session=True,
            )
            self._processes[number] = process
            if self._stopping.is_set() or self._generation != generation:
                process.terminate()
            code = await process.wait()
            if self._stopping.is_set():
                self._exit_code = self._exit_code or max(code, 0)
            elif self._watch is not None:
                await self._wait_for_change(generation, code)
            elif code == EXIT_USAGE:
                self._exit_code = code
                self.stop()
            else:
                log.error("worker process ended", extra={"number": number, "code": code})
                failures = 0 if loop.time() - started > STABLE_SECONDS else failures + 1
                await self._pause(RESTART_BACKOFF.delay(max(failures - 1, 0), 0.5))

    async def _wait_for_change(self, generation: int, code: int) -> None:
        """Wait until files have changed since a process started. It may be what ended it."""
        if self._generation == generation:
            log.info("waiting for a changed file", extra={"code": code})
        while self._generation == generation and not self._stopping.is_set():
            await self._pause(WATCH_SECONDS)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _watch_files(self) -> None:
        assert self._watch is not None
        before = await asyncio.to_thread(read_times, self._watch)
        while not self._stopping.is_set():
            await asyncio.sleep(WATCH_SECONDS)
            now = await asyncio.to_thread(read_times, self._watch)
            if now != before:
                changed = sorted({name for name, _ in now.items() ^ before.items()})
                log.info("files changed, restarting", extra={"first": changed[0]})
                before = now
                self._generation += 1
                self._terminate()


def read_times(folder: Path) -> dict[str, int]:
    """Return the Python files below a folder with their modification times."""
    return dict(_walk(str(folder)))


def _walk(folder: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in UNWATCHED:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:
            continue


def stop_with_supervisor(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """In a process that a supervisor has started: stop when the supervisor is gone."""
    descriptor = os.environ.pop(SUPERVISOR_PIPE, "")
    if not descriptor.isdigit():
        return
    number = int(descriptor)

    def on_readable() -> None:
        loop.remove_reader(number)  # the only event is the end of the pipe
        stop()

    loop.add_reader(number, on_readable)

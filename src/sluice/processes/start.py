"""Composes a node with several processes: settings of each, shared ports, supervisor.

Each process is a node of a cluster on this machine (`cluster_app`), with cells on embedded stores.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from typing import Any, Final

import uvloop

from sluice.app import check_settings, format_ready_line
from sluice.cluster.bootstrap import ProcessSlot, process_name
from sluice.config.settings import Settings
from sluice.errors import ConfigError, SluiceError
from sluice.process.memory_watermark import (
    MIN_LIMIT_BYTES,
    parse_memory_limit,
    read_available_bytes,
)
from sluice.process.systemd import SystemdNotifier
from sluice.processes.cell_directory import CellDirectory, read_cells, record_cells
from sluice.processes.conversion import convert_to_cells
from sluice.processes.shared_ports import SharedPorts
from sluice.processes.supervisor import Supervisor
from sluice.units import Address, parse_address

log = logging.getLogger(__name__)

DEFAULT_CELLS: Final = 8  # at most, unless more processes are asked for
# The supervisor notices the end of a process at once. This is for a process that hangs, and must be
# longer than a busy machine can delay one.
SILENCE_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 1.0
NO_WATCHDOG_SECONDS: Final = 3600.0
# Loaded once, before the processes are forked: they share this memory, and a process that is asked
# by another one answers at once.
HTTP_MODULE: Final = "sluice.admin.rest"
GRPC_MODULE: Final = "sluice.admin.grpc.server"


def serve(settings: Settings, read_settings: Callable[[], Settings]) -> None:
    """Run the processes until SIGTERM or SIGINT."""
    for problem in check_settings(settings):
        raise problem
    count, cells = _choose_numbers(settings)
    directory = CellDirectory(settings.data)
    directory.open()
    ports = SharedPorts()
    try:
        cells = _prepare_cells(settings, directory, cells)
        _check_numbers(settings, count, cells)
        settings = settings.model_copy(update={"listen": ports.reserve(settings.listen)})
        import_module("sluice.cluster_app")
        if settings.http is not None:
            import_module(HTTP_MODULE)
        if settings.grpc is not None:
            import_module(GRPC_MODULE)
        notifier = SystemdNotifier(os.environ)

        def announce(listeners: dict[str, str]) -> None:
            text = format_ready_line(listeners, settings.store)
            print(text, flush=True)
            notifier.notify_ready(text)

        run_process = partial(_run_process, settings, read_settings, directory, count, cells)
        supervisor = Supervisor(
            count,
            run_process,
            announce,
            notifier.notify_watchdog,
            notifier.watchdog_interval or NO_WATCHDOG_SECONDS,
        )
        code = supervisor.run()
    finally:
        ports.close()
        directory.close()
    if code:
        sys.exit(code)


def _choose_numbers(settings: Settings) -> tuple[int, int]:
    """Return how many processes to start, and how many cells a new directory gets."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    cells = settings.processes.cells or max(settings.processes.count, min(cores, DEFAULT_CELLS))
    existing = read_cells(settings.data)
    return settings.processes.count or min(cores, existing or cells), cells


def _prepare_cells(settings: Settings, directory: CellDirectory, cells: int) -> int:
    """Create the cells of a new directory, or of one that one process has written.

    Return the number of cells.
    """
    existing = read_cells(settings.data)
    if not existing and not directory.has_single_store():
        record_cells(settings.data, cells)
    elif not existing:
        log.info("dividing the store of one process", extra={"cells": cells})
        # In a process of its own: a process that has had threads must not fork.
        code = _run_in_child(partial(_run_to_end, partial(convert_to_cells, settings, cells)))
        if code:
            sys.exit(code)
    if directory.has_single_store():  # also after a crash in the middle of its deletion
        directory.delete_single_store()
    return existing or cells


def _run_in_child(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run_to_end(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a coroutine in an event loop; print a refusal, and return the exit code."""
    try:
        uvloop.run(work())
    except SluiceError as refusal:
        print(f"sluice: {refusal}", file=sys.stderr)
        return 2 if isinstance(refusal, ConfigError) else 1
    return 0


def _check_numbers(settings: Settings, count: int, cells: int) -> None:
    """Refuse settings that the existing cells do not permit."""
    data, configured = settings.data, settings.processes.cells
    if cells < count:
        raise ConfigError(
            f"{data} has {cells} cells, too few for {count} processes",
            f"Set processes.count = {cells} or less (--processes {cells}): each process has at "
            "least one cell, and the number of cells is fixed when the directory is created",
        )
    if configured not in (0, cells):
        raise ConfigError(
            f"{data} has {cells} cells, and processes.cells is {configured}",
            f"Leave it out, or set processes.cells = {cells}: the number is fixed when the "
            "directory is created",
        )


def _run_process(
    settings: Settings,
    read_settings: Callable[[], Settings],
    directory: CellDirectory,
    count: int,
    cells: int,
    number: int,
    channel: socket.socket,
    listeners: dict[str, str],
) -> int:
    """Run one process, in itself; return its exit code."""
    from sluice import cluster_app

    slot = ProcessSlot(
        number, count, channel, directory.link_path(number), directory.upload_path(number)
    )
    own = _settings_of_process(settings, number, count, cells, listeners)
    return _run_to_end(partial(cluster_app.run, own, read_settings, slot))


def _settings_of_process(
    settings: Settings, number: int, count: int, cells: int, listeners: dict[str, str]
) -> Settings:
    """Return the settings of a process: a node of the cluster with a share of the memory.

    The first process has the listeners of the admin APIs, at the same ports after a restart. The
    others have listeners on loopback, which only the first one uses.
    """
    cluster = settings.cluster.model_copy(
        update={
            "node": process_name(number),
            "cells": cells,
            "heartbeat": HEARTBEAT_SECONDS,
            "silence": SILENCE_SECONDS,
        }
    )
    changes: dict[str, object] = {"cluster": cluster}
    for name, configured in (("http", settings.http), ("grpc", settings.grpc)):
        if number > 1 and configured is not None:
            changes[name] = Address("127.0.0.1", 0)
        elif name in listeners:
            changes[name] = parse_address(listeners[name])
    if number > 1:
        changes["tls"] = settings.tls.model_copy(update={"http": False, "grpc": False})
    memory = parse_memory_limit(settings.limits.memory, read_available_bytes)
    if memory:
        share = max(memory // count, MIN_LIMIT_BYTES)
        changes["limits"] = settings.limits.model_copy(update={"memory": str(share)})
    return settings.model_copy(update=changes)

"""Converts the store of a node with one process to cells, before several processes open it.

Each cell begins as a copy of the whole store: full segments are never changed again, so they are
hard links, and only the last segment is copied. Then the cell is opened like any other and deletes
what belongs to other cells, as clients and operators would. So nothing here knows a format. The
old store is deleted when all cells are complete; until then, a crash leaves it as it was.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from sluice.app import make_limits
from sluice.broker.acl import AnonymousAccess
from sluice.broker_host import BrokerHost
from sluice.config.settings import Settings
from sluice.errors import StoreError
from sluice.placement import cell_of, cell_of_queue
from sluice.processes.cell_directory import (
    CELLS_DIRECTORY,
    STAGING_DIRECTORY,
    cell_store_path,
    record_cells,
)
from sluice.store.embedded import LOCK_FILE, DirectoryListing, FileSystem, log_name
from sluice.store_opener import CellStore
from sluice.wire.packets import Publish

log = logging.getLogger(__name__)


async def convert_to_cells(settings: Settings, cells: int) -> None:
    """Divide the store in `settings.data` into cells. The caller has locked the directory."""
    data, staging = settings.data, settings.data / STAGING_DIRECTORY
    files = FileSystem()
    listing = DirectoryListing(os.listdir(data))
    shutil.rmtree(staging, ignore_errors=True)
    cluster = settings.cluster.model_copy(update={"cells": cells})
    staged = settings.model_copy(update={"data": staging, "cluster": cluster})
    try:
        for cell in range(cells):
            _copy_store(files, data, cell_store_path(staging, cell), listing)
            await _reduce_to_cell(staged, cell, cells)
            log.info("cell made from the store of one process", extra={"cell": cell})
        record_cells(staging, cells)
        os.rename(staging / CELLS_DIRECTORY, data / CELLS_DIRECTORY)
        files.sync_directory(str(data))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_store(files: FileSystem, source: Path, target: Path, listing: DirectoryListing) -> None:
    """Copy a store; link the files that never change."""
    target.mkdir(mode=0o700, parents=True)
    last = log_name(listing.segments[-1]) if listing.segments else ""
    for name in os.listdir(source):
        path = source / name
        if not path.is_file() or name == LOCK_FILE or name.endswith(".tmp"):
            continue
        if name != last:
            try:
                os.link(path, target / name)
                continue
            except OSError:
                pass  # not every file system has hard links
        shutil.copyfile(path, target / name)
        with (target / name).open("rb") as copied:
            os.fsync(copied.fileno())
    files.sync_directory(str(target))


async def _reduce_to_cell(settings: Settings, cell: int, cells: int) -> None:
    """Open a copy and delete what belongs to other cells."""
    failures: list[str] = []
    host = BrokerHost(
        settings,
        make_limits(settings),
        AnonymousAccess(True),
        lambda: failures.append("the store failed"),
        CellStore(cell),
    )
    await host.open()
    try:
        _delete_others(
            host,
            lambda name: cell_of(name, cells) == cell,
            lambda name: cell_of_queue(name, cells) == cell,
        )
        await host.flush()
    finally:
        host.broker.close()
        await host.close()
    if host.failure is not None:
        raise StoreError(f"cell {cell} could not be written: {host.failure}")


def _delete_others(
    host: BrokerHost, is_here: Callable[[str | bytes], bool], is_queue_here: Callable[[str], bool]
) -> None:
    engine, broker = host.engine, host.broker
    engine.now = now = broker.turn.begin()
    broker.turn.schedule_flush()
    for schedule in list(engine.schedules.by_name.values()):
        if not is_queue_here(schedule.queue):
            engine.schedules.remove(schedule)
    for queue in list(engine.queues.values()):
        if is_queue_here(queue.name):
            host.check_same_cell(queue)
        else:
            engine.lifecycle.delete_queue(queue)
    for owner in list(engine.exclusive.owners.values()):
        if not is_here(owner.client):
            engine.exclusive.delete_owner(owner, now)
    for session in list(broker.registry.sessions.values()):
        if not is_here(session.client_id):
            broker.registry.end_session(session)
    retained = broker.router.retained
    for topic in retained.list_topics():
        if not is_here(topic):
            retained.put(Publish(topic, b"", 0, True), False)

"""A cell whose store is taken over by another node while the cell opens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.broker.acl import AnonymousAccess
from sluice.broker.limits import Limits
from sluice.broker_host import BrokerHost
from sluice.config.settings import Settings
from sluice.errors import StoreError
from sluice.store.memory import MemoryStore
from sluice.store_opener import CellStore
from tests.cluster.kit import until
from tests.cluster.memory_cluster import log_event


async def test_reply_of_a_store_that_failed_meanwhile_is_no_error_of_the_node() -> None:
    answers: list[tuple[Any, ...]] = []
    store = MemoryStore(lambda *answer: answers.append(answer))
    failed: list[str] = []
    host = BrokerHost(
        Settings(store="memory"),
        Limits(),
        AnonymousAccess(True),
        lambda: failed.append("failed"),
        CellStore(0),
        store,
        log=log_event,
    )
    opening = asyncio.create_task(host.open())
    await until(lambda: answers)  # the stored records are read
    host.on_failure(StoreError("another broker has taken it over"))
    for answer, *arguments in answers:
        answer(*arguments)
    with pytest.raises(StoreError, match="taken it over"):
        await opening
    assert failed == ["failed"]
    host.broker.close()

"""Fixtures that run each test on every store: the engine behaves alike on all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.queues.kit import EmbeddedBackend, EngineUnderTest, MemoryBackend, StoreBackend
from tests.queues.redis.redis_backend import RedisBackend


class MakeEngine(Protocol):
    def __call__(self, **settings: Any) -> EngineUnderTest: ...


# The second run of the suite tests the interpreted engine, not Redis.
STORES = [
    "memory",
    "embedded",
    *(["redis"] if os.environ.get("SLUICE_EXPECT") != "interpreted" else []),
]


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBackend:
    if request.param == "memory":
        return MemoryBackend()
    if request.param == "embedded":
        return EmbeddedBackend(tmp_path / "store")
    return RedisBackend(request.getfixturevalue("redis_server"), tmp_path.name)


@pytest.fixture
def make_engine(backend: StoreBackend) -> Iterator[MakeEngine]:
    """Build engines with settings of the test; after the test, their ledgers must balance."""
    made: list[EngineUnderTest] = []

    def build(**settings: Any) -> EngineUnderTest:
        made.append(EngineUnderTest(backend, **settings))
        return made[-1]

    yield build
    for engine in made:
        engine.run_until_idle()
        engine.verify()
        engine.backend.check()
        engine.commit_loop.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> EngineUnderTest:
    return make_engine()

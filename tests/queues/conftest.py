"""One fixture, every store: the engine behaves alike on all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.queues.kit import EmbeddedKeeper, EngineUnderTest, Keeper, MemoryKeeper
from tests.queues.redis.redis_backend import RedisKeeper


class MakeEngine(Protocol):
    def __call__(self, **settings: Any) -> EngineUnderTest: ...


# The second run of the suite is about the engine interpreted, not about Redis.
STORES = ["memory", "embedded", *(["redis"] if os.environ.get("SLUICE_EXPECT") != "interpreted" else [])]


@pytest.fixture(params=STORES)
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Keeper:
    if request.param == "memory":
        return MemoryKeeper()
    if request.param == "embedded":
        return EmbeddedKeeper(tmp_path / "store")
    return RedisKeeper(request.getfixturevalue("redis_server"), tmp_path.name)


@pytest.fixture
def make(keeper: Keeper) -> Iterator[MakeEngine]:
    """An engine with settings of the test's own. Whatever the test did, the books must balance when it is done."""
    made: list[EngineUnderTest] = []

    def build(**settings: Any) -> EngineUnderTest:
        made.append(EngineUnderTest(keeper, **settings))
        return made[-1]

    yield build
    for engine in made:
        engine.settle_down()
        engine.verify()
        engine.keeper.check()
        engine.runner.close()


@pytest.fixture
def engine(make: MakeEngine) -> EngineUnderTest:
    return make()

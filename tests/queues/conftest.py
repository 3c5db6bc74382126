"""One fixture, every store: the engine behaves alike on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.queues.kit import EmbeddedKeeper, EngineUnderTest, Keeper, MemoryKeeper


class MakeEngine(Protocol):
    def __call__(self, **settings: Any) -> EngineUnderTest: ...


@pytest.fixture(params=["memory", "embedded"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Keeper:
    return MemoryKeeper() if request.param == "memory" else EmbeddedKeeper(tmp_path / "store")


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
        engine.runner.close()


@pytest.fixture
def engine(make: MakeEngine) -> EngineUnderTest:
    return make()

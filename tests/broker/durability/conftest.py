"""The house that tests of durable sessions and retained messages live in."""

from __future__ import annotations

import pytest

from tests.broker.namespaces.kit import QueueHouse


@pytest.fixture
def house() -> QueueHouse:
    return QueueHouse()


@pytest.fixture(params=["crash", "kill", "restart"])
def end(request: pytest.FixtureRequest) -> str:
    """How the server ends before it starts again: `getattr(house, end)()`."""
    way: str = request.param
    return way

"""The house that tests of durable sessions and retained messages live in."""

from __future__ import annotations

import pytest

from tests.broker.namespaces.kit import QueueHarness


@pytest.fixture
def harness() -> QueueHarness:
    return QueueHarness()


@pytest.fixture(params=["crash", "kill", "restart"])
def end(request: pytest.FixtureRequest) -> str:
    """How the server ends before it starts again: `getattr(house, end)()`."""
    way: str = request.param
    return way

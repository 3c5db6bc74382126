"""Fixtures for tests of persistent sessions and retained messages."""

from __future__ import annotations

import pytest

from tests.broker.kit import BrokerHarness


@pytest.fixture
def harness() -> BrokerHarness:
    return BrokerHarness()


@pytest.fixture(params=["crash", "kill", "restart"])
def end(request: pytest.FixtureRequest) -> str:
    """How the broker ends before it starts again: `getattr(harness, end)()`."""
    way: str = request.param
    return way

"""Fixtures for tests of the broker's rules."""

from __future__ import annotations

import pytest

from tests.broker.kit import BrokerHarness


@pytest.fixture
def harness() -> BrokerHarness:
    return BrokerHarness()


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5.0"])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number

"""Fixtures for tests of queues over MQTT."""

from __future__ import annotations

import pytest

from tests.broker.kit import BrokerHarness


@pytest.fixture
def harness() -> BrokerHarness:
    return BrokerHarness()

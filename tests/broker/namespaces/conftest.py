"""Fixtures for tests of queues over MQTT."""

from __future__ import annotations

import pytest

from tests.broker.namespaces.kit import QueueHarness


@pytest.fixture
def harness() -> QueueHarness:
    return QueueHarness()

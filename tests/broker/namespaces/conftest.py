"""The house that tests of queues over MQTT live in."""

from __future__ import annotations

import pytest

from tests.broker.namespaces.kit import QueueHarness


@pytest.fixture
def harness() -> QueueHarness:
    return QueueHarness()

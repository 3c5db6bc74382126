"""The house that tests of queues over MQTT live in."""

from __future__ import annotations

import pytest

from tests.mqtt_queues.kit import QueueHouse


@pytest.fixture
def house() -> QueueHouse:
    return QueueHouse()

"""The pytest fixture `sluice_broker`, registered by the package's entry point.

Nothing else of Sluice is imported before the fixture is used. It is a plain fixture: the broker
uses the event loop of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sluice.testing.virtual_broker import VirtualBroker


@pytest.fixture
def sluice_broker(request: pytest.FixtureRequest) -> Iterator[VirtualBroker]:
    """A broker in memory with a clock that the test controls.

    `@pytest.mark.sluice(queues={"jobs": {...}})` configures its queues.
    """
    from sluice.testing.virtual_broker import VirtualBroker

    marker = request.node.get_closest_marker("sluice")
    broker = VirtualBroker(**(marker.kwargs if marker is not None else {}))
    yield broker
    assert broker.faults() == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sluice(queues, seed): options of the fixture `sluice_broker`"
    )

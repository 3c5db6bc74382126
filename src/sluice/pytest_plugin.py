"""The fixture, found by pytest through the package's entry point. Nothing of Sluice is imported before it is asked for.

It is a plain fixture: the broker takes whichever event loop the test runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sluice.testing.virtual_broker import VirtualBroker


@pytest.fixture
def sluice_broker(request: pytest.FixtureRequest) -> Iterator[VirtualBroker]:
    """A broker in memory under a clock that the test moves. `@pytest.mark.sluice(queues={"jobs": {...}})` configures
    its queues."""
    from sluice.testing.virtual_broker import VirtualBroker

    marker = request.node.get_closest_marker("sluice")
    broker = VirtualBroker(**(marker.kwargs if marker is not None else {}))
    yield broker
    assert broker.faults() == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sluice(queues, seed): how the fixture `sluice_broker` is made"
    )

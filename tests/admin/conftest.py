"""Fixtures: the admin service behaves alike on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.broker.backends import Backend, EmbeddedBackend, MemoryBackend
from tests.broker.kit import BrokerHarness


class MakeHarness(Protocol):
    def __call__(
        self, *templates: tuple[str, dict[str, object]], **settings: Any
    ) -> BrokerHarness: ...


@pytest.fixture(params=["memory", "embedded"])
def make_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeHarness]:
    """Build a broker with queue templates of the test; at its end, the ledgers must add up."""
    harnesses: list[BrokerHarness] = []

    def build(*templates: tuple[str, dict[str, object]], **settings: Any) -> BrokerHarness:
        segment_bytes = settings.pop("segment_bytes", 1 << 20)
        backend: Backend = MemoryBackend(segment_bytes)
        if request.param == "embedded":
            backend = EmbeddedBackend(tmp_path / "store", segment_bytes)
        harnesses.append(BrokerHarness(templates, backend=backend, **settings))
        return harnesses[-1]

    yield build
    for harness in harnesses:
        harness.close()


@pytest.fixture
def harness(make_harness: MakeHarness) -> BrokerHarness:
    return make_harness()

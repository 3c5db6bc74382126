"""Fixtures: the admin service behaves alike on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.admin.kit import AdminHarness


class MakeHarness(Protocol):
    def __call__(
        self, *templates: tuple[str, dict[str, object]], **settings: Any
    ) -> AdminHarness: ...


@pytest.fixture(params=["memory", "embedded"])
def make_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeHarness]:
    """Build a broker with queue templates of the test; at its end, the ledgers must add up."""
    harnesses: list[AdminHarness] = []

    def build(*templates: tuple[str, dict[str, object]], **settings: Any) -> AdminHarness:
        harnesses.append(AdminHarness(request.param, tmp_path / "store", templates, **settings))
        return harnesses[-1]

    yield build
    for harness in harnesses:
        harness.close()


@pytest.fixture
def harness(make_harness: MakeHarness) -> AdminHarness:
    return make_harness()

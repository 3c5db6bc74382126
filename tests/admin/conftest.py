"""One house, every store: the admin service answers alike on all of them."""

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
    """A house with queue templates of the test's own. Whatever the test did, the books must balance when it is done."""
    made: list[AdminHarness] = []

    def build(*templates: tuple[str, dict[str, object]], **settings: Any) -> AdminHarness:
        made.append(AdminHarness(request.param, tmp_path / "store", templates, **settings))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


@pytest.fixture
def harness(make_harness: MakeHarness) -> AdminHarness:
    return make_harness()

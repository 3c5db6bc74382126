"""One house, every store: the admin service answers alike on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.admin.kit import AdminHouse


class MakeHouse(Protocol):
    def __call__(self, *templates: tuple[str, dict[str, object]], **settings: Any) -> AdminHouse: ...


@pytest.fixture(params=["memory", "embedded"])
def make_house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeHouse]:
    """A house with queue templates of the test's own. Whatever the test did, the books must balance when it is done."""
    made: list[AdminHouse] = []

    def build(*templates: tuple[str, dict[str, object]], **settings: Any) -> AdminHouse:
        made.append(AdminHouse(request.param, tmp_path / "store", templates, **settings))
        return made[-1]

    yield build
    for house in made:
        house.close()


@pytest.fixture
def house(make_house: MakeHouse) -> AdminHouse:
    return make_house()

"""One fixture for all stores, so that the contract is tested on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kit import StoreUnderTest


@pytest.fixture(params=["memory", "embedded", "redis", "cluster"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    """An open store with segments of 64 KiB."""
    if request.param in ("redis", "cluster"):
        server = request.getfixturevalue(
            "redis_server" if request.param == "redis" else "redis_cluster"
        )
        under_test = StoreUnderTest(None, redis=server.url, prefix=tmp_path.name).open()
    else:
        under_test = StoreUnderTest(
            tmp_path / "store" if request.param == "embedded" else None
        ).open()
    yield under_test
    under_test.store.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[StoreUnderTest]:
    under_test = StoreUnderTest(tmp_path / "store").open()
    yield under_test
    under_test.store.close()

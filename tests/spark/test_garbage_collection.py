"""Garbage collection in Spark's Python processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sluice.spark.runtime.gc_freeze import REUSE_WORKER_VARIABLE, freeze_imports


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record how often the heap is frozen."""
    times: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append("frozen"))
    freeze_imports.cache_clear()
    yield times
    freeze_imports.cache_clear()


def test_spark_process_excludes_its_imports_from_garbage_collection_once(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REUSE_WORKER_VARIABLE, "1")
    freeze_imports()
    freeze_imports()
    assert frozen == ["frozen"]


def test_garbage_collection_of_a_users_program_is_not_changed(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REUSE_WORKER_VARIABLE, raising=False)
    freeze_imports()
    assert frozen == []

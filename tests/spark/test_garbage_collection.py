"""Spark's Python processes and their search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sluice.spark.runtime.gc_freeze import REUSED, leave_out_imports


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How often the heap was frozen."""
    times: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append("frozen"))
    leave_out_imports.cache_clear()
    yield times
    leave_out_imports.cache_clear()


def test_a_process_of_spark_leaves_its_imports_out_of_the_search_once(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REUSED, "1")
    leave_out_imports()
    leave_out_imports()
    assert frozen == ["frozen"]


def test_the_heap_of_a_users_own_program_is_left_alone(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REUSED, raising=False)
    leave_out_imports()
    assert frozen == []

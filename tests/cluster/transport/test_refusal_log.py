"""A refusal that repeats is logged once per interval."""

from __future__ import annotations

import pytest

from sluice.cluster.transport.refusal_log import INTERVAL_SECONDS, MAX_ENTRIES, RefusalLog


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now


def test_repeated_refusal_is_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    refusals = RefusalLog("link refused", time.read)
    for _ in range(100):
        refusals.log("one", "127.0.0.1:1", "no secret")
    refusals.log("two", "127.0.0.1:2", "no secret")
    refusals.log("one", "127.0.0.1:1", "another cluster")
    assert [one.__dict__["node"] for one in caplog.records] == ["one", "two", "one"]
    time.now += INTERVAL_SECONDS
    refusals.log("one", "127.0.0.1:1", "no secret")
    assert len(caplog.records) == 4


def test_callers_with_invented_names_fill_neither_log_nor_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    refusals = RefusalLog("link refused", time.read)
    for nth in range(1000):
        refusals.log(f"node-{nth}" * 100, "127.0.0.1:1", "no secret")
    assert len(caplog.records) == len(refusals._logged_at) == MAX_ENTRIES
    time.now += INTERVAL_SECONDS
    refusals.log("one", "127.0.0.1:1", "no secret")
    assert caplog.records[-1].__dict__["suppressed"] == 1000 - MAX_ENTRIES

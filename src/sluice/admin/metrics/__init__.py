"""Counters of the broker: sampled for charts, and as a page for Prometheus."""

from sluice.admin.metrics.counter_sampling import CounterSample, sample_counters
from sluice.admin.metrics.exposition import render_exposition
from sluice.admin.metrics.merged_pages import merge_pages
from sluice.admin.metrics.metrics_snapshot import MetricsSnapshot, take_snapshot
from sluice.admin.metrics.sample_history import MAX_QUEUES, SampleHistory

__all__ = [
    "MAX_QUEUES",
    "CounterSample",
    "MetricsSnapshot",
    "SampleHistory",
    "merge_pages",
    "render_exposition",
    "sample_counters",
    "take_snapshot",
]

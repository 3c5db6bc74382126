"""/metrics as Prometheus reads it: names, types, labels, histograms and values."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sluice.admin.metrics import metrics_snapshot
from sluice.admin.metrics.exposition import escape_label
from sluice.admin.rest.routes.node_routes import render_metrics
from sluice.metrics import LATENCY_BOUNDS
from sluice.process.memory_watermark import MemoryWatermark
from tests.admin.live_broker import LiveBroker, Worker, live_broker, properties_of, publish

QUICK = [("jobs", {"retry_policy": {"max_retries": 1, "initial_backoff": "1ms"}})]

# Product section 9: exactly these names, with these labels.
PROMISED = {
    "mqtt_queue_depth": ("gauge", {"queue"}),
    "mqtt_queue_enqueue_total": ("counter", {"queue"}),
    "mqtt_queue_dequeue_total": ("counter", {"queue"}),
    "mqtt_queue_ack_total": ("counter", {"queue"}),
    "mqtt_queue_nack_total": ("counter", {"queue"}),
    "mqtt_queue_retry_total": ("counter", {"queue"}),
    "mqtt_queue_dlq_total": ("counter", {"queue", "reason"}),
    "mqtt_queue_active_consumers": ("gauge", {"queue", "group"}),
    "mqtt_queue_lag": ("gauge", {"queue", "group"}),
    "mqtt_queue_delivery_latency_seconds_bucket": ("histogram", {"queue", "le"}),
    "mqtt_queue_delivery_latency_seconds_count": ("histogram", {"queue"}),
    "mqtt_queue_delivery_latency_seconds_sum": ("histogram", {"queue"}),
    "mqtt_queue_process_latency_seconds_bucket": ("histogram", {"queue", "le"}),
    "mqtt_queue_process_latency_seconds_count": ("histogram", {"queue"}),
    "mqtt_queue_process_latency_seconds_sum": ("histogram", {"queue"}),
    "mqtt_queue_delivery_latency_quantile_seconds": ("gauge", {"queue", "quantile"}),
    "mqtt_queue_process_latency_quantile_seconds": ("gauge", {"queue", "quantile"}),
    "mqtt_queue_workers_wanted": ("gauge", {"queue", "group"}),
    "mqtt_queue_paused": ("gauge", {"queue", "group"}),
    "mqtt_queue_breaker_open": ("gauge", {"queue", "group"}),
    "mqtt_queue_limited": ("gauge", {"queue", "group"}),
    "mqtt_queue_held_keys": ("gauge", {"queue", "group"}),
    "mqtt_queue_limited_keys": ("gauge", {"queue", "group"}),
    "mqtt_queue_max_inflight": ("gauge", {"queue"}),
    "mqtt_queue_max_inflight_per_key": ("gauge", {"queue"}),
    "mqtt_queue_max_rate_per_key": ("gauge", {"queue"}),
    "mqtt_queue_max_rate": ("gauge", {"queue"}),
    "sluice_messages": ("gauge", set()),
    "sluice_consumers": ("gauge", set()),
    "sluice_dead_letters": ("gauge", set()),
    "sluice_messages_inflight": ("gauge", set()),
    "sluice_messages_retrying": ("gauge", set()),
}


class Page:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.kinds: dict[str, tuple[str, set[str]]] = {}
        for family in self.families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self._values, f"twice: {key}"
                self._values[key] = sample.value
                self.kinds[sample.name] = (family.type, set(sample.labels))

    def value(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        return (name, frozenset(labels.items())) in self._values

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            key: value
            for key, value in self._values.items()
            if key[0].endswith(("_total", "_count", "_sum", "_bucket"))
        }


async def scrape(harness: LiveBroker) -> Page:
    return Page((await render_metrics(harness.loop_bridge, MemoryWatermark(0))).decode())


async def work(harness: LiveBroker) -> Page:
    """Return the page for one acked message, one dead letter and one message in delivery."""
    async with harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        await publish(client, "jobs", b"good")
        await worker.settle("ack", await worker.next())
        await publish(client, "jobs", b"bad")
        for attempt in ("1", "2"):
            message = await worker.next()
            assert properties_of(message)["attempt"] == attempt
            await worker.settle("nack", message)
        await publish(client, "jobs", b"held")
        await worker.next()
        return await scrape(harness)


async def test_documented_metrics_exist_with_their_types_and_labels() -> None:
    async with live_broker(QUICK) as harness:
        page = await work(harness)
    assert {name: page.kinds.get(name) for name in PROMISED} == PROMISED


async def test_metrics_match_what_happened() -> None:
    async with live_broker(QUICK) as harness:
        page = await work(harness)
    jobs = {
        "mqtt_queue_depth": 1,
        "mqtt_queue_enqueue_total": 3,
        "mqtt_queue_dequeue_total": 4,
        "mqtt_queue_ack_total": 1,
        "mqtt_queue_nack_total": 2,
        "mqtt_queue_retry_total": 1,
        "mqtt_queue_redelivery_total": 1,
        "mqtt_queue_delivery_latency_seconds_count": 3,
        "mqtt_queue_process_latency_seconds_count": 1,
    }
    assert {name: page.value(name, queue="$queue/jobs") for name in jobs} == jobs
    assert page.value("mqtt_queue_dlq_total", queue="$queue/jobs", reason="max_retries") == 1
    # so that its rate has a start
    assert page.value("mqtt_queue_dlq_total", queue="$queue/jobs", reason="expired") == 0
    assert page.value("mqtt_queue_depth", queue="$queue/dlq/jobs") == 1
    assert page.value("mqtt_queue_active_consumers", queue="$queue/jobs", group="team") == 1
    assert page.value("mqtt_queue_lag", queue="$queue/jobs", group="team") == 1
    states = {
        state: page.value(
            "mqtt_queue_group_messages", queue="$queue/jobs", group="team", state=state
        )
        for state in ("waiting", "delivered", "retrying")
    }
    assert states == {"waiting": 0, "delivered": 1, "retrying": 0}
    settled = {
        outcome: page.value(
            "mqtt_queue_group_settled_total", queue="$queue/jobs", group="team", outcome=outcome
        )
        for outcome in ("acked", "dead", "expired", "purged", "cancelled")
    }
    assert settled == {"acked": 1, "dead": 1, "expired": 0, "purged": 0, "cancelled": 0}
    assert page.value("mqtt_queue_group_enqueued_total", queue="$queue/jobs", group="team") == sum(
        [*states.values(), *settled.values()]
    )
    assert page.value("mqtt_broker_connections") == 1
    assert page.value("mqtt_broker_connections_opened_total") == 1
    assert page.value("mqtt_broker_publishes_received_total") >= 6
    assert page.value("mqtt_broker_bytes_received_total") > 100
    assert page.value("sluice_queues") == 2
    assert page.value("sluice_store_segments") >= 1
    assert page.value("process_resident_memory_bytes") > 1 << 20
    assert page.value("process_open_fds") > 3


async def test_page_obeys_the_exposition_format() -> None:
    async with live_broker(QUICK) as harness:
        page = await work(harness)
    heads: dict[str, list[str]] = defaultdict(list)
    last = ""
    for line in page.text.splitlines():
        if line.startswith("# "):
            _, what, name, _ = line.split(" ", 3)
            heads[name].append(what)
            last = name
        else:
            assert re.fullmatch(r'[a-z_]+(\{([a-z_]+="([^"\\]|\\.)*",?)*\})? \S+', line), line
            name = re.match(r"[a-z_]+", line)[0]  # type: ignore[index]
            assert name.startswith(last), f"{name} is listed under {last}"  # families are not mixed
    assert page.text.endswith("\n")
    assert all(whats == ["HELP", "TYPE"] for whats in heads.values()), heads
    for family in page.families:
        assert family.documentation, family.name
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{family.name}_total"}
        for sample in family.samples:
            assert sample.name.startswith(("mqtt_", "sluice_", "process_", "python_")), sample.name
            assert not math.isnan(sample.value)


async def test_histograms_add_up() -> None:
    async with live_broker(QUICK) as harness:
        page = await work(harness)
    for name in ("mqtt_queue_delivery_latency_seconds", "mqtt_queue_process_latency_seconds"):
        buckets = [
            (float(sample.labels["le"]), sample.value)
            for family in page.families
            for sample in family.samples
            if sample.name == f"{name}_bucket" and sample.labels["queue"] == "$queue/jobs"
        ]
        assert [bound for bound, _ in buckets] == [*LATENCY_BOUNDS, math.inf]
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert counts[-1] == page.value(f"{name}_count", queue="$queue/jobs")
        assert page.value(f"{name}_sum", queue="$queue/jobs") >= 0.0


async def test_unused_queue_has_zero_counters_and_no_histogram() -> None:
    async with live_broker() as harness:
        await harness.service.create_queue({"name": "new"})
        page = await scrape(harness)
    assert page.value("mqtt_queue_enqueue_total", queue="$queue/new") == 0
    assert page.value("mqtt_queue_dlq_total", queue="$queue/new", reason="rejected") == 0
    assert not page.has("mqtt_queue_process_latency_seconds_count", queue="$queue/new")


async def test_age_of_the_oldest_message_is_exposed() -> None:
    async with live_broker() as harness, harness.client("worker-1") as client:
        await Worker(client, "jobs").join(consumer_group="team")
        page = await scrape(harness)
        assert page.value("mqtt_queue_oldest_seconds", queue="$queue/jobs", group="team") == 0
        await publish(client, "jobs")
        await asyncio.sleep(0.05)
        page = await scrape(harness)
        assert (
            0.04 <= page.value("mqtt_queue_oldest_seconds", queue="$queue/jobs", group="team") < 60
        )


NAMES = ['say "hello"', "back\\slash", "grün/水", "a,b={c}"]


@pytest.mark.parametrize("name", NAMES)
async def test_queue_and_group_names_are_exposed_unchanged(name: str) -> None:
    async with live_broker() as harness:
        await harness.service.create_queue({"name": name})
        harness.engine.lifecycle.get_or_create_group(
            harness.engine.queues[name], name.replace("/", "-")
        )
        page = await scrape(harness)
    assert page.value("mqtt_queue_depth", queue=f"$queue/{name}") == 0
    assert page.value("mqtt_queue_lag", queue=f"$queue/{name}", group=name.replace("/", "-")) == 0


def test_label_values_are_escaped() -> None:
    assert escape_label('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


async def test_quantiles_lie_in_the_bucket_of_their_rank() -> None:
    async with live_broker() as harness:
        await harness.service.create_queue({"name": "jobs"})
        latency = harness.engine.queues["jobs"].delivery_latency
        for nth in range(100):
            latency.add(0.003 if nth < 98 else 2.0)
        page = await scrape(harness)
    name = "mqtt_queue_delivery_latency_quantile_seconds"
    assert 0.0025 < page.value(name, queue="$queue/jobs", quantile="0.5") <= 0.005
    assert 1.0 < page.value(name, queue="$queue/jobs", quantile="0.99") <= 2.5


async def test_delayed_messages_have_a_state_of_their_own_and_no_age() -> None:
    async with live_broker() as harness, harness.client("maker-1") as client:
        await harness.service.create_queue({"name": "jobs"})
        await harness.service.create_group("jobs", "team")
        for nth in range(3):
            await publish(client, "jobs", b"%d" % nth, delay="2h")
        page = await scrape(harness)
        labels = {"queue": "$queue/jobs", "group": "team"}
        states = {
            state: page.value("mqtt_queue_group_messages", state=state, **labels)
            for state in ("waiting", "delayed")
        }
        assert states == {"waiting": 0, "delayed": 3}
        assert page.value("mqtt_queue_oldest_seconds", **labels) == 0
        assert page.value("mqtt_queue_workers_wanted", **labels) == 0
        await publish(client, "jobs", b"now")
        page = await scrape(harness)
        assert page.value("mqtt_queue_workers_wanted", **labels) == 1


async def test_queue_without_a_group_has_a_lag_and_no_consumer() -> None:
    async with live_broker() as harness, harness.client("maker-1") as client:
        await publish(client, "jobs", b"x")
        page = await scrape(harness)
    assert page.value("mqtt_queue_lag", queue="$queue/jobs", group="") == 1
    assert page.value("mqtt_queue_active_consumers", queue="$queue/jobs", group="") == 0


async def test_metrics_say_what_holds_a_group_back() -> None:
    policies = {
        "limits": {"max_inflight": 1, "max_rate": "50/s"},
        "breaker": {"failures": 1},
        "performance": {"batch_size": 10},
    }
    async with live_broker([("jobs", policies)]) as harness, harness.client("w-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")

        async def held() -> list[float]:
            page = await scrape(harness)
            labels = {"queue": "$queue/jobs", "group": "team"}
            return [
                page.value(f"mqtt_queue_{name}", **labels)
                for name in ("paused", "breaker_open", "limited")
            ]

        assert await held() == [0, 0, 0]
        await publish(client, "jobs", b"1")
        message = await worker.next()
        assert await held() == [0, 0, 1]
        await worker.settle("nack", message)
        assert await held() == [0, 1, 0]
        await harness.service.pause_queue("jobs", "ann", "")
        assert await held() == [1, 1, 0]
        page = await scrape(harness)
        assert page.value("mqtt_queue_max_inflight", queue="$queue/jobs") == 1
        assert page.value("mqtt_queue_max_rate", queue="$queue/jobs") == 50


async def test_metrics_count_the_keys_at_a_limit() -> None:
    limits = {"limits": {"max_inflight_per_key": 1, "max_rate_per_key": "50/s"}}
    config = {**limits, "performance": {"batch_size": 10}}
    async with live_broker([("jobs", config)]) as harness, harness.client("w-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        for key in ("a", "a", "b"):
            await publish(client, "jobs", key.encode(), partition_key=key)
        await worker.next()
        await worker.next()
        page = await scrape(harness)
        labels = {"queue": "$queue/jobs", "group": "team"}
        assert page.value("mqtt_queue_limited_keys", **labels) == 1
        assert page.value("mqtt_queue_limited", **labels) == 0
        assert page.value("mqtt_queue_max_inflight_per_key", queue="$queue/jobs") == 1
        assert page.value("mqtt_queue_max_rate_per_key", queue="$queue/jobs") == 50


async def test_all_messages_and_all_dead_letters_are_counted() -> None:
    async with live_broker(QUICK) as harness:
        page = await work(harness)
    assert (page.value("sluice_messages"), page.value("sluice_dead_letters")) == (1, 1)


async def test_states_of_all_groups_are_summed() -> None:
    async with live_broker([("jobs", {})]) as harness, harness.client("w-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        await publish(client, "jobs", b"1")
        await publish(client, "jobs", b"2")
        await worker.settle("nack", await worker.next(), delay="1h")
        await worker.next()
        page = await scrape(harness)
    assert page.value("sluice_messages_inflight") == 1
    assert page.value("sluice_messages_retrying") == 1
    assert page.value("sluice_consumers") == 1


async def test_counters_never_decrease_when_a_group_is_deleted() -> None:
    async with live_broker(QUICK) as harness:
        before = await work(harness)
        await harness.service.delete_group("jobs", "team")
        after = await scrape(harness)
        again = await scrape(harness)
    groupless = {
        key: value for key, value in before.counters().items() if "group" not in dict(key[1])
    }
    for key, value in groupless.items():
        assert after._values[key] >= value, key
        assert again._values[key] >= after._values[key], key
    assert after.value("mqtt_queue_dequeue_total", queue="$queue/jobs") == 4
    assert not after.has("mqtt_queue_lag", queue="$queue/jobs", group="team")


async def test_deleted_queue_disappears_from_the_page() -> None:
    async with live_broker(QUICK) as harness:
        await work(harness)
        await harness.service.delete_queue("jobs")
        assert 'queue="$queue/jobs"' not in (await scrape(harness)).text


async def test_many_queues_are_copied_in_slices_so_that_the_loop_stays_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # each group and each queue is its own slice
    monkeypatch.setattr(metrics_snapshot, "MAX_SLICE_SECONDS", 0.0)
    async with live_broker() as harness:
        for nth in range(100):
            harness.engine.lifecycle.get_or_create_queue(f"q/{nth}")
        turns = 0
        done = False

        async def count() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        page = await scrape(harness)
        done = True
        await counting
    assert turns >= 100
    assert page.value("sluice_queues") == 100


async def test_queue_deleted_during_the_copy_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_snapshot, "MAX_SLICE_SECONDS", 0.0)
    async with live_broker() as harness:
        for nth in range(10):
            harness.engine.lifecycle.get_or_create_queue(f"q/{nth}")
        scraping = asyncio.create_task(scrape(harness))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        harness.queue_handler.delete_queue(harness.engine.queues["q/9"])
        page = await scraping
    assert page.has("mqtt_queue_depth", queue="$queue/q/0")
    assert not page.has("mqtt_queue_depth", queue="$queue/q/9")

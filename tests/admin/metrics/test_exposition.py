"""/metrics as Prometheus reads it: names, types, labels, histograms, and what the numbers say."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sluice.admin.metrics import metrics_snapshot
from sluice.admin.metrics.exposition import escape, exposition
from sluice.metrics import LATENCY_BOUNDS
from sluice.process.memory_watermark import Watermark
from tests.admin.live_broker import Living, Worker, facts, living, publish

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


async def scrape(house: Living) -> Page:
    return Page((await exposition(house.desk, Watermark(0))).decode())


async def work(house: Living) -> Page:
    """One acked, one that failed, was tried again and died, one with a worker; and the page meanwhile."""
    async with house.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        await publish(client, "jobs", b"good")
        await worker.settle("ack", await worker.next())
        await publish(client, "jobs", b"bad")
        for attempt in ("1", "2"):
            message = await worker.next()
            assert facts(message)["attempt"] == attempt
            await worker.settle("nack", message)
        await publish(client, "jobs", b"held")
        await worker.next()
        return await scrape(house)


async def test_the_promised_names_are_there_with_their_types_and_labels() -> None:
    async with living(QUICK) as house:
        page = await work(house)
    assert {name: page.kinds.get(name) for name in PROMISED} == PROMISED


async def test_the_numbers_are_those_of_what_happened() -> None:
    async with living(QUICK) as house:
        page = await work(house)
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
    assert {name: page.value(name, queue="jobs") for name in jobs} == jobs
    assert page.value("mqtt_queue_dlq_total", queue="jobs", reason="max_retries") == 1
    assert (
        page.value("mqtt_queue_dlq_total", queue="jobs", reason="expired") == 0
    )  # so that its rate has a start
    assert page.value("mqtt_queue_depth", queue="dlq/jobs") == 1
    assert page.value("mqtt_queue_active_consumers", queue="jobs", group="team") == 1
    assert page.value("mqtt_queue_lag", queue="jobs", group="team") == 1
    states = {
        state: page.value("mqtt_queue_group_messages", queue="jobs", group="team", state=state)
        for state in ("waiting", "delivered", "retrying")
    }
    assert states == {"waiting": 0, "delivered": 1, "retrying": 0}
    settled = {
        outcome: page.value("mqtt_queue_group_settled_total", queue="jobs", group="team", outcome=outcome)
        for outcome in ("acked", "dead", "expired", "purged")
    }
    assert settled == {"acked": 1, "dead": 1, "expired": 0, "purged": 0}
    assert page.value("mqtt_queue_group_enqueued_total", queue="jobs", group="team") == sum(
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


async def test_the_page_keeps_the_rules_of_the_format() -> None:
    async with living(QUICK) as house:
        page = await work(house)
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
            assert name.startswith(last), f"{name} stands below {last}"  # families are not mixed
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
    async with living(QUICK) as house:
        page = await work(house)
    for name in ("mqtt_queue_delivery_latency_seconds", "mqtt_queue_process_latency_seconds"):
        buckets = [
            (float(sample.labels["le"]), sample.value)
            for family in page.families
            for sample in family.samples
            if sample.name == f"{name}_bucket" and sample.labels["queue"] == "jobs"
        ]
        assert [bound for bound, _ in buckets] == [*LATENCY_BOUNDS, math.inf]
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert counts[-1] == page.value(f"{name}_count", queue="jobs")
        assert page.value(f"{name}_sum", queue="jobs") >= 0.0


async def test_a_queue_nobody_used_has_counters_at_zero_and_no_histogram() -> None:
    async with living() as house:
        await house.service.create_queue({"name": "new"})
        page = await scrape(house)
    assert page.value("mqtt_queue_enqueue_total", queue="new") == 0
    assert page.value("mqtt_queue_dlq_total", queue="new", reason="rejected") == 0
    assert not page.has("mqtt_queue_process_latency_seconds_count", queue="new")


async def test_the_age_of_the_oldest_message_is_told() -> None:
    async with living() as house, house.client("worker-1") as client:
        await Worker(client, "jobs").join(consumer_group="team")
        page = await scrape(house)
        assert page.value("mqtt_queue_oldest_seconds", queue="jobs", group="team") == 0
        await publish(client, "jobs")
        await asyncio.sleep(0.05)
        page = await scrape(house)
        assert 0.04 <= page.value("mqtt_queue_oldest_seconds", queue="jobs", group="team") < 60


NAMES = ['say "hello"', "back\\slash", "grün/水", "a,b={c}"]


@pytest.mark.parametrize("name", NAMES)
async def test_names_of_queues_and_groups_come_through_whole(name: str) -> None:
    async with living() as house:
        await house.service.create_queue({"name": name})
        house.engine.group(house.engine.queues[name], name.replace("/", "-"))
        page = await scrape(house)
    assert page.value("mqtt_queue_depth", queue=name) == 0
    assert page.value("mqtt_queue_lag", queue=name, group=name.replace("/", "-")) == 0


def test_what_a_label_cannot_hold_is_escaped() -> None:
    assert escape('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


async def test_counters_never_fall_though_a_group_is_deleted() -> None:
    async with living(QUICK) as house:
        before = await work(house)
        await house.service.delete_group("jobs", "team")
        after = await scrape(house)
        again = await scrape(house)
    groupless = {key: value for key, value in before.counters().items() if "group" not in dict(key[1])}
    for key, value in groupless.items():
        assert after._values[key] >= value, key
        assert again._values[key] >= after._values[key], key
    assert after.value("mqtt_queue_dequeue_total", queue="jobs") == 4
    assert not after.has("mqtt_queue_lag", queue="jobs", group="team")


async def test_a_queue_that_is_deleted_leaves_the_page() -> None:
    async with living(QUICK) as house:
        await work(house)
        await house.service.delete_queue("jobs")
        assert 'queue="jobs"' not in (await scrape(house)).text


async def test_many_queues_are_copied_in_slices_that_leave_the_loop_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_snapshot, "SLICE_SECONDS", 0.0)  # each group and each queue is a slice of its own
    async with living() as house:
        for nth in range(100):
            house.engine.ensure(f"q/{nth}")
        turns = 0
        done = False

        async def count() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        page = await scrape(house)
        done = True
        await counting
    assert turns >= 100
    assert page.value("sluice_queues") == 100


async def test_a_queue_deleted_while_the_figures_are_copied_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_snapshot, "SLICE_SECONDS", 0.0)
    async with living() as house:
        for nth in range(10):
            house.engine.ensure(f"q/{nth}")
        scraping = asyncio.create_task(scrape(house))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        house.door.delete(house.engine.queues["q/9"])
        page = await scraping
    assert page.has("mqtt_queue_depth", queue="q/0")
    assert not page.has("mqtt_queue_depth", queue="q/9")

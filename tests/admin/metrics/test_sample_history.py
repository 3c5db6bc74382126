"""Five minutes of samples for charts."""

from __future__ import annotations

import asyncio

import pytest

from sluice.admin.metrics import sample_history
from sluice.admin.metrics.counter_sampling import CounterSample
from sluice.admin.metrics.sample_history import SAMPLES, SampleHistory
from tests.admin.live_broker import publish
from tests.admin.rest.conftest import opened_rest_api


async def take_none() -> CounterSample:
    raise AssertionError


def make_history() -> SampleHistory:
    return SampleHistory(take_none)


def sample(at: float, received: int = 0, **queues: tuple[int, int, int, int]) -> CounterSample:
    return CounterSample(at, received, 0, dict(queues))


def test_rates_are_differences_over_the_time_between_samples() -> None:
    history = make_history()
    history.add(sample(100.0, 50, tasks=(7, 10, 3, 3)))
    history.add(sample(104.0, 90, tasks=(9, 30, 23, 21)))
    found = history.of_queue("tasks")
    assert found["times"] == [100.0, 104.0]
    assert found["total_messages"] == [7, 9]
    assert found["enqueue_rate"] == [None, 5]
    assert (found["dequeue_rate"][1], found["ack_rate"][1]) == (5, 4.5)
    node = history.of_node()
    assert (node["total_messages"], node["publishes_in"]) == ([7, 9], [None, 10])


def test_recreated_queue_and_missing_queue_have_no_rate() -> None:
    history = make_history()
    history.add(sample(100.0, tasks=(7, 10, 0, 0)))
    history.add(sample(105.0, tasks=(1, 1, 0, 0)))
    assert history.of_queue("tasks")["enqueue_rate"] == [None, None]
    history.add(sample(110.0))
    assert history.of_queue("tasks")["total_messages"] == [None] * 3


def test_only_five_minutes_are_remembered_oldest_first() -> None:
    history = make_history()
    for nth in range(SAMPLES + 3):
        history.add(sample(5.0 * nth, tasks=(nth, nth, 0, 0)))
    found = history.of_queue("tasks")
    assert found["total_messages"] == [float(nth) for nth in range(3, SAMPLES + 3)]
    assert len(found["times"]) == SAMPLES


def test_number_of_queues_with_a_history_is_bounded_and_quiet_ones_leave() -> None:
    history = make_history()
    busy = {f"q{nth}": (1, 1, 0, 0) for nth in range(sample_history.MAX_RINGS + 10)}
    history.add(CounterSample(0.0, 0, 0, busy))
    known = [name for name in busy if history.of_queue(name)["total_messages"] != [None]]
    assert len(known) == sample_history.MAX_RINGS
    quiet = dict.fromkeys(busy, (0, 1, 0, 1))
    for nth in range(1, SAMPLES + 2):
        history.add(CounterSample(5.0 * nth, 0, 0, quiet))
    history.add(CounterSample(400.0, 0, 0, {"late": (1, 1, 0, 0)}))
    assert history.of_queue("late")["total_messages"][-1] == 1


async def test_samples_are_taken_without_any_client(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = asyncio.Event()
    loop = asyncio.get_running_loop()
    add = SampleHistory.add

    def add_and_report(history: SampleHistory, sample: CounterSample) -> None:
        add(history, sample)
        if sample.queues:
            loop.call_soon_threadsafe(taken.set)

    monkeypatch.setattr(sample_history, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(SampleHistory, "add", add_and_report)
    async with opened_rest_api() as rest_api:
        async with rest_api.harness.client("c-1") as client:
            await publish(client, "tasks")
        async with asyncio.timeout(30):
            await taken.wait()  # before the first request
        found = await rest_api.ok("GET", "/queues/tasks/samples")
        assert found["total_messages"][-1] == 1
        assert len(found["times"]) == len(found["ack_rate"])
        (node,) = await rest_api.ok("GET", "/samples")
        assert node["node"] == "local" and node["total_messages"][-1] == 1
        await rest_api.refused(404, "GET", "/queues/other/samples")

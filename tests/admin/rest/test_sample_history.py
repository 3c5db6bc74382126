"""Five minutes of samples for charts."""

from __future__ import annotations

import asyncio

import pytest

from sluice.admin.metrics.counter_sampling import CounterSample
from sluice.admin.rest import sample_history
from sluice.admin.rest.sample_history import SAMPLES, SampleHistory
from tests.admin.rest.conftest import OpenRestApi

NO_BRIDGE = None


def make_history() -> SampleHistory:
    return SampleHistory(NO_BRIDGE)  # type: ignore[arg-type]


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


async def test_samples_are_taken_without_any_client(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_history, "INTERVAL_SECONDS", 0.01)
    rest_api = await open_rest_api()
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x"})
    async with asyncio.timeout(30):
        while True:
            found = await rest_api.ok("GET", "/queues/tasks/samples")
            if found["total_messages"] and found["total_messages"][-1] == 1:
                break
            await asyncio.sleep(0.005)
    assert len(found["times"]) == len(found["ack_rate"])
    (node,) = await rest_api.ok("GET", "/samples")
    assert node["node"] == "local" and node["total_messages"][-1] == 1
    await rest_api.refused(404, "GET", "/queues/other/samples")

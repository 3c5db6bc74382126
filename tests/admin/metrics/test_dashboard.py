"""grafana/sluice.json uses existing metrics with existing labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.admin.live_broker import Worker, live_broker, publish
from tests.admin.metrics.test_exposition import Page, scrape

FILE = Path(__file__).parents[3] / "grafana/sluice.json"
METRIC = re.compile(r"\b((?:mqtt|sluice|process|python)_\w+)(?:\{([^}]*)\})?")
ADDED_BY_PROMETHEUS = {"instance", "job"}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return read


def expressions() -> list[str]:
    board = dashboard()
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    found += [
        one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]
    return found


@pytest.fixture
async def page() -> Page:
    """A page with every kind of metric on it."""
    async with live_broker() as harness, harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join()
        await publish(client, "jobs")
        await worker.settle("ack", await worker.next())
        return await scrape(harness)


async def test_every_metric_of_the_dashboard_exists_with_its_labels(page: Page) -> None:
    seen = 0
    for expression in expressions():
        asked = METRIC.findall(expression)
        assert asked, expression
        for name, matchers in asked:
            seen += 1
            assert name in page.kinds, f"{name} in {expression}"
            labels = set(re.findall(r"(\w+)=~", matchers)) - ADDED_BY_PROMETHEUS
            assert labels <= page.kinds[name][1], expression
        by = [
            label
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for label in group.split(", ")
        ]
        if len(asked) == 1:
            assert set(by) - ADDED_BY_PROMETHEUS <= page.kinds[asked[0][0]][1], expression
    assert seen > 40


async def test_every_documented_queue_metric_is_on_the_dashboard(page: Page) -> None:
    shown = " ".join(expressions())
    for family in page.families:
        if family.name.startswith("mqtt_queue_") and "group_enqueued" not in family.name:
            assert family.name in shown, family.name


def test_rate_is_applied_to_counters_only() -> None:
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert name.endswith(("_total", "_bucket")), expression
        for name in re.findall(r"\b(\w+_(?:total|bucket))\b", expression):
            assert re.search(rf"(?:rate|increase)\({name}", expression), expression


def test_datasource_and_queue_are_variables() -> None:
    board = dashboard()
    names = [one["name"] for one in board["templating"]["list"]]
    assert names == ["datasource", "instance", "queue", "group"]
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(
                target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]
            )


def test_panels_do_not_overlap() -> None:
    board = dashboard()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells

"""docs/metrics.md: its tables and alerts match the metrics, its trace example propagates."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from sluice.admin.metrics.exposition import CLUSTER_METRICS
from sluice.client import Client
from tests.admin.live_broker import live_broker
from tests.admin.metrics.test_exposition import QUICK, Page, work

TEXT = (Path(__file__).parents[3] / "docs/metrics.md").read_text("utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
async def page() -> Page:
    async with live_broker(QUICK) as harness:
        return await work(harness)


def described(page: Page) -> dict[str, tuple[str, set[str]]]:
    """Return our metric families by name: type, and labels without `le`."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in page.families:
        if family.name.startswith(("mqtt_", "sluice_")):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (
                family.type,
                {label for one in family.samples for label in one.labels} - {"le"},
            )
    return found


async def test_tables_list_every_metric_with_type_and_labels(page: Page) -> None:
    there = described(page)
    with_labels = re.findall(r"^\| `(mqtt_queue_\w+)` \| (\w+) \| ([\w, ]+) \|", TEXT, re.MULTILINE)
    others = re.findall(
        r"^\| `((?:mqtt_broker|mqtt_ecq|sluice(?!_redis))_\w+)` \| (\w+) \|", TEXT, re.MULTILINE
    )
    reported = {name: (kind, set(labels.split(", "))) for name, kind, labels in with_labels}
    reported |= {
        name: (kind, there[name][1] if name == "sluice_info" else set()) for name, kind in others
    }
    in_a_cluster: dict[str, tuple[str, set[str]]] = {
        name: (kind, set()) for name, kind, _, _ in CLUSTER_METRICS
    }
    assert reported == there | in_a_cluster
    for name in re.findall(r"`(process_\w+)`", TEXT):
        assert name in page.kinds


RULES = Path(__file__).parents[3] / "grafana/sluice-rules.yml"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


async def test_alert_rules_use_existing_metrics(page: Page) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        expression = rule["expr"]
        names = re.findall(r"\b((?:mqtt|sluice)_\w+)", expression)
        assert names or expression.startswith("up{") or set(re.findall(r"sluice:\S+", expression))
        assert all(name in page.kinds for name in names), expression
        assert set(re.findall(r"\bsluice:[\w:]+", expression)) <= recorded, expression


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert re.findall(r"^\| `(Sluice\w+)` \|", TEXT, re.MULTILINE) == [
        alert["alert"] for alert in alerts
    ]
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "action"}
    for rule in rules():
        assert rule.get("record") is None or f"`{rule['record']}`" in TEXT


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_accepts_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True)
    assert checked.returncode == 0, checked.stderr.decode()


async def test_tracing_example_carries_a_trace_from_producer_to_consumer() -> None:
    trace: Any = importlib.import_module("opentelemetry.trace")
    [example] = [text for info, text in BLOCKS if info == "python run"]
    names: dict[str, Any] = {}
    exec(compile(example, "docs/metrics.md", "exec"), names)
    span = trace.SpanContext(
        0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, trace.TraceFlags(1)
    )
    async with live_broker() as harness:
        url = f"mqtt://{harness.mqtt}"
        async with Client.from_url(url, client_id="worker-1") as client:
            await client.subscribe("$queue/orders", qos=1)
            with trace.use_span(trace.NonRecordingSpan(span)):
                await names["order"](client, b"x")
            message = await anext(client.messages())
    assert dict(message.properties.user)["traceparent"].split("-")[1] == f"{span.trace_id:032x}"
    context = names["propagator"].extract(dict(message.properties.user))
    assert trace.get_current_span(context).get_span_context().trace_id == span.trace_id
    await names["work"](message)

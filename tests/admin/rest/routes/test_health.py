"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sluice.errors import NoRoom, StoreFailed
from sluice.process.memory_watermark import MemoryWatermark
from tests.admin.rest.conftest import OpenRestApi, RestApi


async def test_responsive_broker_is_healthy(rest_api: RestApi) -> None:
    answer = await rest_api.web.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["loop_ms"] >= 0


async def test_broker_with_blocked_loop_is_unhealthy(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.node_routes.HEALTH_TIMEOUT_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as executor:
        request = executor.submit(httpx.get, f"http://{rest_api.address}/healthz", timeout=30)
        # this loop is the broker's: it is blocked until the answer arrives
        answer = request.result(30)
    assert answer.status_code == 503
    assert answer.json()["error"] == "busy"
    monkeypatch.setattr("sluice.admin.rest.routes.node_routes.HEALTH_TIMEOUT_SECONDS", 30.0)
    assert (await rest_api.web.get("/healthz")).status_code == 200


async def test_broker_that_accepts_work_is_ready(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues", {"name": "tasks"})
    answer = await rest_api.web.get("/readyz")
    assert answer.json() == {"status": "ready", "store": "memory", "queues": 1, "warnings": []}


async def test_broker_with_failed_store_is_not_ready(open_rest_api: OpenRestApi) -> None:
    rest_api = await open_rest_api(store_fault=lambda: StoreFailed("no space left on device"))
    answer = await rest_api.web.get("/readyz")
    assert (answer.status_code, answer.json()["error"]) == (503, "store_failed")
    assert "the store has stopped: no space left" in answer.json()["message"]
    assert "start again" in answer.json()["do"]
    assert (await rest_api.web.get("/healthz")).status_code == 200


async def test_broker_on_nearly_full_disk_is_not_ready_and_needs_no_restart(
    open_rest_api: OpenRestApi,
) -> None:
    rest_api = await open_rest_api(
        store_fault=lambda: NoRoom("63 MiB are left, and disk.min_free is 64 MiB")
    )
    answer = await rest_api.web.get("/readyz")
    assert (answer.status_code, answer.json()["error"]) == (503, "no_room")
    assert "63 MiB are left" in answer.json()["message"]
    assert "Free space on that disk" in answer.json()["do"]
    assert "start" not in answer.text and "stopped" not in answer.text


async def test_broker_above_memory_limit_is_not_ready_and_says_why(
    open_rest_api: OpenRestApi,
) -> None:
    used = [300 << 20]
    watermark = MemoryWatermark(200 << 20, lambda: used[0], lambda: None)
    watermark.check()
    rest_api = await open_rest_api(watermark=watermark)
    answer = await rest_api.web.get("/readyz")
    assert (answer.status_code, answer.json()["error"]) == (503, "memory_full")
    assert "uses 300 MiB" in answer.json()["message"] and "limits.memory" in answer.json()["do"]
    assert (await rest_api.web.get("/healthz")).status_code == 200
    arrow = {"Content-Type": "application/vnd.apache.arrow.stream"}
    refused = await rest_api.api.post("/bulk/stages/app/0?queue=q", content=b"x", headers=arrow)
    assert (refused.status_code, refused.json()["error"]) == (503, "memory_full")
    page = (await rest_api.web.get("/metrics")).text
    assert f"sluice_memory_bytes {300 << 20}\n" in page
    assert f"sluice_memory_limit_bytes {200 << 20}\n" in page
    assert "sluice_memory_refused_total 1\n" in page
    used[0] = 100 << 20
    watermark.check()
    assert (await rest_api.web.get("/readyz")).status_code == 200


async def test_stopping_broker_is_not_ready(rest_api: RestApi) -> None:
    rest_api.harness.broker.stopping = True
    answer = await rest_api.web.get("/readyz")
    assert (answer.status_code, answer.json()["error"]) == (503, "stopping")


async def test_metrics_are_prometheus_text(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x"})
    answer = await rest_api.web.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'mqtt_queue_depth{queue="$queue/tasks"} 1' in answer.text.replace("1.0", "1")


async def test_with_queues_disabled_node_endpoints_still_answer(open_rest_api: OpenRestApi) -> None:
    rest_api = await open_rest_api(queues_enabled=False)
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/api/v1/node",
        "/api/v1/nodes",
        "/api/v1/whoami",
    ):
        assert (await rest_api.web.get(path)).status_code == 200, path
    for path in (
        "/queues",
        "/queues/tasks",
        "/queues/tasks/messages",
        "/queues/tasks/dlq",
        "/verify",
    ):
        reported = await rest_api.refused(409, "GET", path)
        assert reported["error"] == "queues_disabled"
        assert "queues.enabled = true" in reported["do"]
    await rest_api.refused(409, "POST", "/queues", json={"name": "tasks"})

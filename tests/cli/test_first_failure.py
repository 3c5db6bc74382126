"""A first failure is fixed from the terminal alone, command by command.

tests/admin/console/test_first_failure.py does the same in the browser.
"""

from __future__ import annotations

import asyncio
import json

from sluice.client import Client, Message
from tests.cli.shell import InProcessShell
from tests.support.broker_process import Broker


async def work(broker: Broker, name: str, is_fixed: bool, done: asyncio.Queue[str]) -> None:
    """Run a worker of group `resize` that cannot read its images until it is fixed."""
    async with Client(broker.mqtt.host, broker.mqtt.port, client_id=name) as client:
        await client.subscribe("$queue/images", qos=1, user={"consumer-group": "resize"})
        async for message in client.messages():
            verb = "$ack" if is_fixed else "$nack"
            await client.publish(
                f"$queue/images/{verb}",
                qos=1,
                user={**delivery_ids(message), "description": "not an image"},
            )
            done.put_nowait(f"{verb} {message.payload.decode()}")


def delivery_ids(message: Message) -> dict[str, str]:
    reported = dict(message.properties.user)
    return {name: reported[name] for name in ("message-id", "delivery-token")}


async def test_newcomer_finds_out_why_a_job_failed_and_fixes_it(broker: Broker) -> None:
    sluice = InProcessShell(broker)
    done: asyncio.Queue[str] = asyncio.Queue()

    created = await sluice.run_ok(
        "queue",
        "create",
        "images",
        "--set",
        "retry_policy.max_retries=1",
        "--set",
        "retry_policy.initial_backoff=100ms",
    )
    assert (created.code, created.stderr) == (0, "")
    published = await sluice.run_ok("publish", "images", "broken.png", "--json")
    message_id = json.loads(published.stdout)["message_id"]

    # Nothing happens, because there is no consumer.
    sick = await sluice.run_ok("doctor", "images", "--json")
    assert sick.code == 5
    assert json.loads(sick.stdout)["findings"][0]["code"] == "no-group"

    # A worker connects, fails twice, and the job is dead.
    worker = asyncio.create_task(work(broker, "resize-1", is_fixed=False, done=done))
    async with asyncio.timeout(30):
        assert [await done.get(), await done.get()] == ["$nack broken.png"] * 2
    dead_letters = json.loads((await sluice.run_ok("dlq", "list", "images", "--json")).stdout)
    assert [row["headers"]["dead-description"] for row in dead_letters] == ["not an image"]

    # `doctor` names the reason, and the command that helps.
    sick = await sluice.run_ok("doctor", "images")
    assert sick.code == 5
    assert sick.stdout.startswith("✗ 1 message")
    assert "not an image" in sick.stdout
    assert "sluice dlq list images" in sick.stdout

    # The events of the message.
    reported = (await sluice.run_ok("explain", message_id)).stdout
    steps = [
        "enqueued",
        "delivered to resize-1, attempt 1",
        "nacked by resize-1",
        "attempt 2",
        "✝ dead",
        "What to do",
    ]
    places = [reported.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), reported
    life = json.loads(
        (await sluice.run_ok("explain", message_id, "--queue", "images", "--json")).stdout
    )
    assert [state["state"] for state in life["states"]] == ["dead"]

    # The worker is fixed; the job is put back, after a preview.
    worker.cancel()
    await asyncio.wait([worker])
    worker = asyncio.create_task(work(broker, "resize-2", is_fixed=True, done=done))
    preview = await sluice.run_ok("dlq", "retry", "images", "--reason", "max_retries", "--dry-run")
    assert "1 dead letter in all: max_retries 1" in preview.stdout
    redriven = await sluice.run_ok(
        "dlq", "retry", "images", "--reason", "max_retries", "--yes", "--json"
    )
    assert json.loads(redriven.stdout) == {"retried": 1, "skipped": 0, "left": 0}
    async with asyncio.timeout(30):
        assert await done.get() == "$ack broken.png"

    # Done: acked, nothing dead, the ledgers are right, and `doctor` finds nothing.
    group = json.loads((await sluice.run_ok("group", "show", "images", "resize", "--json")).stdout)
    assert (group["ledger"]["acked"], group["lag"]) == (1, 0)
    assert json.loads((await sluice.run_ok("dlq", "list", "images", "--json")).stdout) == []
    assert (await sluice.run_ok("verify")).code == 0
    assert (await sluice.run_ok("doctor", "images", "--group", "resize")).code == 0
    worker.cancel()
    await asyncio.wait([worker])

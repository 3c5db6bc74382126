"""A new user's first hour: a terminal, a browser, and a worker that fails until it is fixed.

Every command is a process of its own, as in a shell.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open
from tests.admin.console.kit import SECONDS, Peer
from tests.cli.shell import Shell
from tests.support.broker_process import Broker


def test_newcomer_sees_a_worker_fail_finds_the_cause_fixes_it_and_redrives_the_job(
    broker: Broker, open_console: Open, peer: Callable[[Broker, str], Peer]
) -> None:
    sluice = Shell(broker)
    policy = ["--set", "retry_policy.max_retries=1", "--set", "retry_policy.initial_backoff=100ms"]
    assert sluice.run("queue", "create", "images", *policy).code == 0
    message_id = json.loads(sluice.run("publish", "images", "broken.png", "--json").stdout)[
        "message_id"
    ]

    # Nothing happens, because there is no worker yet.
    reported = sluice.run("doctor", "images")
    assert reported.code == 5
    assert "1 message waits, and no consumer has ever subscribed" in reported.stdout

    # A worker connects and fails until the job is a dead letter; the browser shows it.
    console = open_console(broker)
    page = console.page
    console.open_queue("images")
    console.live()
    is_fixed = False
    worker = peer(broker, "resize-1")
    worker.work(
        "images", lambda payload: "$ack" if is_fixed else "$nack", ("consumer-group", "resize")
    )
    assert [worker.taken.get(timeout=SECONDS) for _ in range(2)] == [
        (message_id, b"broken.png")
    ] * 2
    expect(page.get_by_role("link", name="Dead letters 1")).to_be_visible()
    expect(page.get_by_role("row", name="resize-1")).to_contain_text("connected")

    # The doctor names the reason and where to look; explain shows all events.
    reported = sluice.run("doctor", "images")
    assert reported.code == 5
    assert reported.stdout.startswith("✗ 1 message was dead-lettered (1 max_retries)")
    assert "sluice dlq list images" in reported.stdout
    story = sluice.run("explain", message_id).stdout
    steps = [
        "● enqueued",
        "resize-1, attempt 1",
        "nacked by resize-1",
        "attempt 2",
        "✝ dead",
        "What to do",
    ]
    places = [story.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), story

    # The worker is fixed; the job is retried from the console and succeeds.
    is_fixed = True
    page.get_by_role("link", name="Dead letters 1").click()
    page.get_by_role("button", name=message_id, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Retry", exact=True).click()
    console.notice(f"{message_id} is back in images for group resize.").get_by_role("link").click()
    assert worker.taken.get(timeout=SECONDS) == (message_id, b"broken.png")
    expect(page.locator(".state-card .tag")).to_have_text("acked")
    reported = sluice.run("doctor", "images")
    assert (reported.code, reported.stdout[:22]) == (0, "✓ the queue is empty: "), reported.stdout
    assert sluice.run("verify").code == 0

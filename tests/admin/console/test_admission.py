"""Pauses, breakers and limits on the pages of a queue: set by buttons, shown with their reasons."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer, rest
from tests.support.broker_process import Broker

Connect = Callable[[Broker, str], Peer]


def test_queue_is_paused_with_a_reason_and_resumed(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "mailer-1")
    worker.work("mail", lambda payload: "$ack")
    console = open_console(broker)
    page = console.page
    console.open_queue("mail")
    page.get_by_role("button", name="Pause", exact=True).first.click()
    page.get_by_label("Reason, shown to everyone").fill("the mail server is <b>down</b>")
    page.get_by_role("button", name="Pause the queue").click()
    console.notice("mail is paused.")
    expect(page.locator(".page > .held")).to_contain_text("the mail server is <b>down</b>")
    group = page.get_by_role("region", name="Group mailer", exact=True)
    expect(group.locator(".held")).to_contain_text("Paused with its queue")
    peer(broker, "mail-author").publish("mail", b"invoice")
    assert worker.taken.empty()
    console.screenshot("paused")
    page.get_by_role("link", name="Queues", exact=True).first.click()
    row = page.get_by_role("row", name="mail", exact=False)
    expect(row.first).to_contain_text("paused")
    console.open_queue("mail")
    page.get_by_role("button", name="Resume", exact=True).first.click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    assert worker.taken.get(timeout=SECONDS)[1] == b"invoice"
    expect(page.locator(".page > .held")).to_be_hidden()
    expect(group.locator(".held")).to_be_hidden()


def test_group_is_paused_alone(broker: Broker, open_console: Open, peer: Connect) -> None:
    for client in ("one-1", "two-1"):
        peer(broker, client).work("shared", lambda payload: "$ack")
    console = open_console(broker)
    page = console.page
    console.open_queue("shared")
    one = page.get_by_role("region", name="Group one", exact=True)
    one.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause the group").click()
    expect(one.locator(".held")).to_contain_text("Paused")
    two = page.get_by_role("region", name="Group two", exact=True)
    expect(two.locator(".held")).to_be_hidden()
    assert rest(base_of(broker), "/queues/shared/groups/two")["held_by"] == []
    one.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    expect(one.locator(".held")).to_be_hidden()


def test_open_breaker_and_limits_are_explained(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    config = {
        "name": "calls",
        "limits": {"max_inflight": 1, "max_rate": "50/s"},
        "breaker": {"failures": 1, "open_for": "1h"},
    }
    rest(base_of(broker), "/queues", config)
    worker = peer(broker, "caller-1")
    worker.work("calls", lambda payload: "")
    peer(broker, "calls-author").publish("calls", b"x")
    message_id, _ = worker.taken.get(timeout=SECONDS)
    console = open_console(broker)
    page = console.page
    console.open_queue("calls")
    group = page.get_by_role("region", name="Group caller", exact=True)
    expect(group).to_contain_text("Limits: 1 in flight, 50/s, breaker after 1 failure in a row")
    expect(group.locator(".held")).to_contain_text("At its limit")
    worker.settle("$queue/calls", message_id, "caller", "$nack")
    expect(group.locator(".held")).to_contain_text("Breaker open")
    console.screenshot("breaker")

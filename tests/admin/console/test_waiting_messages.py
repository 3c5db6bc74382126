"""Messages that wait: cancelled and moved by buttons of their page."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import rest
from tests.support.broker_process import Broker


def test_delayed_message_is_moved_and_cancelled(broker: Broker, open_console: Open) -> None:
    rest(base_of(broker), "/queues", {"name": "notes"})
    rest(base_of(broker), "/queues/notes/groups", {"name": "team"})
    for message_id in ("note-1", "note-2"):
        message = {"payload": "call", "message_id": message_id, "delay": "2h"}
        rest(base_of(broker), "/queues/notes/messages", message)
    console = open_console(broker)
    page = console.page
    console.open("/queues/notes/messages/note-1")
    state = page.locator(".state-card .tag")
    expect(state).to_have_text("delayed")
    console.screenshot("waiting-message")
    page.get_by_role("button", name="Reschedule", exact=True).click()
    page.get_by_label("Deliver in").fill("1d")
    page.get_by_role("dialog").get_by_role("button", name="Reschedule", exact=True).click()
    console.notice("note-1 is rescheduled.")
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("rescheduled")
    page.get_by_role("button", name="Deliver now").click()
    console.notice("note-1 is delivered now.")
    expect(state).to_have_text("waiting")
    expect(page.get_by_role("button", name="Deliver now")).to_have_count(0)
    console.open("/queues/notes/messages/note-2")
    page.get_by_role("button", name="Cancel message").click()
    page.get_by_role("button", name="Cancel it").click()
    console.notice("note-2 is cancelled.")
    expect(state).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Reschedule", exact=True)).to_have_count(0)

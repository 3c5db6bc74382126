"""Dead letters by error, their message page, and retries with an edited payload."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer, rest
from tests.support.broker_process import Broker

Connect = Callable[[Broker, str], Peer]


def test_message_page_of_a_dead_letter_shows_where_it_is_and_retries_it_edited(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "fixer-1")
    worker.work("fix", lambda payload: "$ack" if b"42" in payload else "$reject")
    peer(broker, "fix-author").publish(
        "fix", b'{"width": null}', ("message-id", "fix-1"), ("tenant", "north")
    )
    worker.taken.get(timeout=SECONDS)
    console = open_console(broker)
    page = console.page
    console.open("/queues/fix/messages/fix-1")
    card = page.get_by_role("region", name="Dead letter")
    expect(card.locator(".payload pre")).to_have_text('{\n  "width": null\n}')
    expect(card.get_by_role("heading", level=2)).to_have_text("Dead letter of group fixer")
    expect(card).to_contain_text("It is in the dead-letter queue dlq/fix")
    expect(card.locator("blockquote")).to_have_text("no width in <b>cat.png</b>")
    expect(page.get_by_text("no longer stored")).to_have_count(0)
    card.get_by_text("Raw message").click()
    expect(card.get_by_role("row", name="tenant")).to_contain_text("north")
    console.screenshot("dead-letter-page")
    page.get_by_role("heading", level=1).click()
    card.get_by_role("button", name="Edit and retry").click()
    dialog = page.get_by_role("dialog", name="Edit and retry fix-1")
    expect(dialog.get_by_label("Payload")).to_have_value('{"width": null}')
    dialog.get_by_label("Payload").fill('{"width": 42}')
    console.screenshot("edit-and-retry", whole=False)
    dialog.get_by_role("button", name="Retry with this payload").click()
    console.notice("fix-1 is back in fix for group fixer.")
    assert worker.taken.get(timeout=SECONDS) == ("fix-1", b'{"width": 42}')
    expect(page.locator(".state-card .tag")).to_have_text("acked")
    expect(card).to_have_count(0)
    assert rest(base_of(broker), "/queues/fix/dlq") == []


def test_dead_letters_are_grouped_by_error_and_retried_by_it(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "sorter-1")
    fixed = False
    worker.work("sort", lambda payload: "$ack" if fixed else "$reject")
    author = peer(broker, "sort-author")
    for nth in range(3):
        author.publish("sort", b"x", ("message-id", f"sort-{nth}"))
        worker.taken.get(timeout=SECONDS)
    rest(base_of(broker), "/queues/sort/config", {"retry_policy": {"max_retries": 0}}, "PUT")
    worker.work("sort", lambda payload: "$ack" if fixed else "$nack")
    author.publish("sort", b"y", ("message-id", "sort-3"))
    worker.taken.get(timeout=SECONDS)
    console = open_console(broker)
    page = console.page
    console.open_queue("sort", "/dead-letters")
    errors = page.get_by_role("region", name="Errors of sort")
    expect(errors.locator("tbody tr")).to_have_count(2)
    frequent = errors.get_by_role("row", name="no width in <b>cat.png</b>")
    expect(frequent).to_contain_text("3")
    console.screenshot("dead-letter-errors")
    frequent.get_by_role("button", name="no width in <b>cat.png</b>", exact=True).click()
    expect(page.locator("[data-dead-letter]")).to_have_count(3)
    page.get_by_role("button", name="Show all errors").click()
    expect(page.locator("[data-dead-letter]")).to_have_count(4)
    fixed = True
    frequent.get_by_role("button", name="Retry all with error").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text('error "no width in <b>cat.png</b>"')
    dialog.get_by_role("button", name="Retry them").click()
    console.notice("3 dead letters put back into sort")
    for _ in range(3):
        assert worker.taken.get(timeout=SECONDS)[1] == b"x"
    expect(page.locator("[data-dead-letter]")).to_have_count(1)
    expect(errors.locator("tbody tr")).to_have_count(1)


def test_phone_shows_the_whole_error_of_a_dead_letter(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "phone-1")
    worker.work("phone", lambda payload: "$reject")
    peer(broker, "phone-author").publish("phone", b"x", ("message-id", "phone-1"))
    worker.taken.get(timeout=SECONDS)
    console = open_console(broker, width=390)
    console.open_queue("phone", "/dead-letters")
    error = console.page.locator(".reason-text")
    expect(error).to_have_text("no width in <b>cat.png</b>")
    assert error.evaluate("e => e.scrollWidth - e.clientWidth") == 0

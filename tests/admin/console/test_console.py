"""Actions in the console, with a real browser, a real broker and real MQTT clients."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer, rest
from tests.support.broker_process import Broker

Connect = Callable[[Broker, str], Peer]


def test_dead_letter_is_opened_redriven_and_acked_by_a_worker(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    fixed = False
    worker = peer(broker, "resizer-1")
    worker.work(
        "images", lambda payload: "$ack" if b"dog" in payload else "" if fixed else "$reject"
    )
    publisher = peer(broker, "uploader")
    publisher.publish("images", b"dog.png", ("message-id", "image-1"))
    publisher.publish(
        "images",
        b'{"file": "cat.png", "width": null}',
        ("message-id", "image-2"),
        ("tenant", "north"),
    )
    worker.taken.get(timeout=SECONDS), worker.taken.get(timeout=SECONDS)

    console = open_console(broker)
    page = console.page
    console.open()
    page.get_by_role("row", name="images").get_by_role("link", name="1", exact=True).click()
    row = page.get_by_role("row", name="image-2")
    expect(row).to_contain_text("rejected")
    expect(row).to_contain_text("resizer")
    console.screenshot("dead-letters")
    row.get_by_role("button", name="image-2", exact=True).click()
    drawer = page.get_by_role("dialog", name="image-2")
    expect(drawer.locator(".payload pre")).to_have_text(
        '{\n  "file": "cat.png",\n  "width": null\n}'
    )
    expect(drawer.locator("blockquote")).to_have_text("no width in <b>cat.png</b>")
    for step in ("Enqueued", "Delivered", "Dead letter"):
        expect(drawer.locator(".timeline")).to_contain_text(step)
    drawer.get_by_role("button", name="Hex").click()
    expect(drawer.locator(".payload pre")).to_contain_text("7b 22 66 69 6c 65")
    console.screenshot("dead-letter", whole=False)

    fixed = True
    drawer.get_by_role("button", name="Retry", exact=True).click()
    note = console.notice("image-2 is back in images for group resizer.")
    assert worker.taken.get(timeout=SECONDS)[0] == "image-2"
    expect(page.get_by_role("heading", name="No dead letters")).to_be_visible()
    note.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("image-2")
    for step in ("Enqueued", "Dead letter", "Redriven", "Delivered"):
        expect(page.locator(".timeline")).to_contain_text(step)
    expect(page.locator(".state-card .tag")).to_have_text("delivered")
    console.screenshot("biography")
    worker.settle("$queue/images", "image-2", "resizer", "$ack")
    expect(page.locator(".state-card .tag")).to_have_text("acked")
    page.get_by_role("link", name="images").click()
    ledger = page.get_by_role("region", name="Ledger of group resizer").locator("tbody td")
    counts: list[str | re.Pattern[str]] = [
        "3",
        "0",
        "0",
        "0",
        "2",
        "1",
        "0",
        "0",
        "0",
        re.compile(r"\d+"),
        "0",
    ]
    expect(ledger).to_have_text(counts)


def test_dead_letters_are_redriven_by_filter_and_deleted_after_confirmation(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "parser-1")
    worker.work("feeds", lambda payload: "" if fixed else "$reject")
    fixed = False
    publisher = peer(broker, "feeder")
    for nth in range(6):
        publisher.publish("feeds", b"red" if nth < 4 else b"blue", ("message-id", f"feed-{nth}"))
    for _ in range(6):
        worker.taken.get(timeout=SECONDS)
    console = open_console(broker)
    page = console.page
    console.open_queue("feeds", "/dead-letters")
    rows = page.locator("[data-dead-letter]")
    expect(rows).to_have_count(6)
    page.get_by_label("Payload contains").fill("red")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(4)
    fixed = True
    page.get_by_role("button", name="Retry all that match").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text(
        'The dead letters of queue feeds that match (payload contains "red")'
    )
    question.get_by_role("button", name="Retry them").click()
    console.notice("4 dead letters put back into feeds")
    for _ in range(4):
        assert worker.taken.get(timeout=SECONDS)[1] == b"red"
    page.get_by_label("Payload contains").fill("")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Delete all that match").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Delete all that match").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete dead letters of feeds").click()
    console.notice("2 dead letters of feeds deleted.")
    expect(page.get_by_role("heading", name="No dead letters")).to_be_visible()


def test_groups_show_lag_ledger_and_the_consumer_of_each_partition(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    first, second = peer(broker, "clerk-1"), peer(broker, "clerk-2")
    for one in (first, second):
        one.work("papers", lambda payload: "")
    publisher = peer(broker, "office")
    for nth in range(8):
        publisher.publish("papers", b"sign", ("partition-key", f"k{nth}"))
    console = open_console(broker)
    console.open_queue("papers")
    card = console.page.get_by_role("region", name="Group clerk", exact=True)
    expect(card.locator(".lag")).to_have_text("lag 8")
    expect(card.get_by_role("row", name="clerk-1")).to_contain_text("connected")
    strip = card.locator("svg.strip")
    expect(strip.locator("rect")).to_have_count(10)
    tones = strip.locator("rect").evaluate_all(
        "cells => cells.map(cell => cell.getAttribute('class'))"
    )
    assert sorted(tones) == ["cell-0"] * 5 + ["cell-1"] * 5
    second.stop()
    expect(card.get_by_role("row", name="clerk-2")).to_have_count(0)
    expect(strip.locator("rect.cell-0")).to_have_count(10)


def test_doctor_shows_causes_and_remedies(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    peer(broker, "lonely").publish("alone", b"hello?")
    console = open_console(broker)
    console.open_queue("alone")
    card = console.page.get_by_role("region", name="Doctor")
    reported = rest(base_of(broker), "/queues/alone/diagnosis")["findings"][0]
    expect(card.locator(".tag")).to_have_text(reported["code"])
    text = card.locator(".finding").first.inner_text().lower()
    assert reported["what"].lower().rstrip(".") in text


def test_refused_value_is_shown_at_its_field_and_a_good_one_is_saved(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    peer(broker, "tuner").publish("tuned", b"x")
    console = open_console(broker)
    console.allow("status of 400")
    page = console.page
    console.open_queue("tuned", "/config")
    depth = page.get_by_label("Depth", exact=True)
    expect(depth).to_have_value("100000")
    depth.fill("-5")
    page.get_by_label("First backoff").fill("soon")
    page.get_by_role("button", name="Save").click()
    expect(depth).to_have_attribute("aria-invalid", "true")
    fault = page.locator(f"#{depth.get_attribute('id')}-fault")
    expect(fault).to_contain_text("must be from 1 to")
    backoff = page.get_by_label("First backoff")
    expect(backoff).to_have_attribute("aria-invalid", "true")
    expect(backoff).to_be_focused()
    reported = page.locator(f"#{backoff.get_attribute('id')}-fault").bounding_box()
    bar = page.locator(".config .sticky").bounding_box()
    assert reported and bar and reported["y"] + reported["height"] <= bar["y"], (
        "the error is not hidden by the bar"
    )
    console.screenshot("config-refused", whole=False)
    depth.fill("500")
    page.get_by_label("First backoff").fill("2s")
    page.get_by_label("Overflow").select_option("drop-oldest")
    page.get_by_role("button", name="Save").click()
    console.notice("The configuration of tuned is changed")
    stored = rest(base_of(broker), "/queues/tuned/config")
    assert (
        stored["limits"]["max_queue_depth"] == 500 and stored["limits"]["overflow"] == "drop-oldest"
    )
    assert stored["retry_policy"]["initial_backoff"] == "2s"


def test_publish_purge_and_seek_ask_for_confirmation_with_the_queue_name(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "reader-1")
    rest(base_of(broker), "/queues", {"name": "books", "limits": {"retention": "1h"}})
    worker.work("books", lambda payload: "$ack")
    console = open_console(broker)
    page = console.page
    console.open_queue("books")
    page.get_by_role("button", name="Publish a message").click()
    form = page.get_by_role("dialog", name="Publish to books")
    form.get_by_label("Payload").fill("chapter one")
    form.get_by_text("Key, priority, delay, properties").click()
    form.get_by_label("Message id").fill("book-1")
    form.get_by_label("User properties").fill("author: me\nyear: 2030")
    form.get_by_role("button", name="Publish").click()
    console.notice("Published to books as book-1.")
    assert worker.taken.get(timeout=SECONDS) == ("book-1", b"chapter one")

    group = page.get_by_role("region", name="Group reader", exact=True)
    group.get_by_role("button", name="Seek").click()
    seek = page.get_by_role("dialog", name="Seek group reader")
    expect(seek).to_contain_text("Group reader of queue books")
    seek.get_by_role("button", name="Seek").click()
    console.notice("Group reader of books was moved")
    assert worker.taken.get(timeout=SECONDS)[0] == "book-1"

    worker.stop()
    peer(broker, "author").publish("books", b"chapter two")
    expect(page.locator(".facts.strip dd").first).to_have_text("1 / 100k")
    page.get_by_role("button", name="Purge", exact=True).click()
    purge = page.get_by_role("dialog", name="Purge books?")
    expect(purge).to_contain_text("Every message in queue books that no consumer")
    expect(purge.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    assert rest(base_of(broker), "/queues/books/stats")["total_messages"] == 1
    page.get_by_role("button", name="Purge", exact=True).click()
    purge.get_by_role("button", name="Purge books").click()
    console.notice("removed from books")
    assert rest(base_of(broker), "/queues/books/stats")["total_messages"] == 0


def test_message_is_found_by_id_from_every_page(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    sender = peer(broker, "finder")
    sender.publish("lost/and/found", b"umbrella", ("message-id", "thing/7 #?"))
    console = open_console(broker)
    page = console.page
    console.open("/nodes")
    expect(page.get_by_role("region", name="Node local")).to_contain_text("Retained messages")
    console.screenshot("nodes")
    page.keyboard.press("/")
    page.keyboard.type("thing/7 #?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("thing/7 #?")
    expect(page.locator(".timeline")).to_contain_text("Enqueued")
    expect(page.locator(".payload pre")).to_have_text("umbrella")
    page.get_by_role("searchbox", name="Find message by ID").fill("unknown-id")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="No queue knows a message")).to_be_visible()


def test_every_action_is_possible_by_keyboard(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    peer(broker, "typist").publish("aaa-keys", b"one", ("message-id", "key-1"))
    console = open_console(broker)
    page = console.page
    console.open()
    page.get_by_role("row", name="aaa-keys").wait_for()
    page.keyboard.press("Tab")
    assert console.focused() == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    console.tab_to("aaa-keys")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    assert page.title().startswith("aaa-keys")
    console.tab_to("Publish a message")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Payload")).to_be_focused()
    for _ in range(12):  # the focus does not leave the dialog for the page
        page.keyboard.press("Tab")
        assert page.evaluate("!document.activeElement.closest('main')")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert console.focused() == "Publish a message"
    console.tab_to("Messages")
    page.keyboard.press("Enter")
    expect(page.get_by_role("row", name="key-1")).to_be_visible()
    assert console.focused() == "Messages"
    console.tab_to("key-1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="key-1")).to_be_visible()
    page.keyboard.press("Escape")
    assert console.focused() == "key-1"


def test_owner_of_many_keys_shows_how_many_are_listed(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    writer = peer(broker, "writer")
    for number in range(203):
        writer.publish_to(f"$ECQ/w/full car/{number}", b"x")
    console = open_console(broker)
    page = console.page
    console.open("/ecq/full%20car")
    expect(page.get_by_text("The oldest 200 of 203 values.")).to_be_visible()
    expect(page.get_by_text("sluice ecq peek 'full car' --start 201 --limit 1000")).to_be_visible()
    expect(page.get_by_role("row")).to_have_count(201)
    console.screenshot("owner of many keys", whole=False)


def test_unknown_owner_cannot_be_purged(broker: Broker, open_console: Open) -> None:
    console = open_console(broker)
    page = console.page
    console.allow("status of 404")
    console.open("/ecq/unknown-client")
    expect(page.get_by_text("there is no exclusive queue")).to_be_visible()
    expect(page.get_by_role("button", name="Purge")).to_have_count(0)
    console.screenshot("unknown owner")


def test_owners_of_exclusive_queues_show_their_last_values(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    writer = peer(broker, "writer")
    for key, value in (("speed", b"80"), ("brakes/left", b"open"), ("speed", b"95")):
        writer.publish_to(f"$ECQ/w/console-car/{key}", value)
    console = open_console(broker)
    page = console.page
    console.open()
    page.get_by_role("link", name="Last-value queues").click()
    row = page.get_by_role("row", name="console-car")
    expect(row).to_contain_text("away")
    expect(row).to_contain_text("never")
    console.screenshot("owners")
    row.get_by_role("link", name="console-car").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("console-car")
    speed = page.get_by_role("row", name="speed")
    expect(speed).to_contain_text("95")
    console.screenshot("owner")
    speed.get_by_role("button", name="speed").click()
    drawer = page.get_by_role("dialog", name="speed")
    expect(drawer.locator(".payload pre")).to_have_text("95")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Purge", exact=True).click()
    page.get_by_role("button", name="Purge console-car").click()
    console.notice("2 values of console-car removed.")
    expect(page.get_by_role("heading", name="No values are stored for this owner")).to_be_visible()

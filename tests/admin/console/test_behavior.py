"""What the console must not get wrong: navigation, rates, commands to paste, live regions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer, rest
from tests.support.broker_process import Broker, same_build

Connect = Callable[[Broker, str], Peer]


def make_dead_letter(broker: Broker, peer: Connect, queue: str, message_id: str) -> None:
    worker = peer(broker, f"{queue}-worker-1")
    worker.work(queue, lambda payload: "$reject")
    peer(broker, f"{queue}-author").publish(queue, b"bad", ("message-id", message_id))
    worker.taken.get(timeout=SECONDS)


def test_back_closes_what_is_open_over_the_page(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    make_dead_letter(broker, peer, "orders", "order-1")
    console = open_console(broker)
    page = console.page
    console.open()
    page.get_by_role("link", name="orders", exact=True).click()
    page.get_by_role("link", name="Dead letters").click()
    page.get_by_role("button", name="order-1", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("link", name="Overview")).to_have_attribute("aria-current", "page")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Purge", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Queues")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_purge_dialog_says_that_deliveries_in_flight_stay(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "holder-1")
    worker.work("held", lambda payload: "", ("prefetch", "1"))
    author = peer(broker, "held-author")
    for _ in range(3):
        author.publish("held", b"x")
    worker.taken.get(timeout=SECONDS)
    console = open_console(broker)
    page = console.page
    console.open_queue("held")
    page.get_by_role("button", name="Purge", exact=True).click()
    dialog = page.get_by_role("dialog", name="Purge held?")
    expect(dialog).to_contain_text("that no consumer is working on is removed")
    expect(dialog).to_contain_text("Deliveries in flight stay")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Purge held").click()
    console.notice("2 messages removed from held.")


def test_rates_are_computed_from_the_clock_of_the_samples(
    broker: Broker, open_console: Open
) -> None:
    console = open_console(broker)
    console.open()
    drawn = console.page.evaluate(
        """async () => {
          const { History } = await import('/console/api/history.js');
          const history = new History();
          const at = (second, count) => ({
            name: 'local',
            now: new Date(1e12 + second * 1000).toISOString(),
            publishes_received: count,
            publishes_sent: 0,
          });
          // All arrive at the same moment, as after a pause of the browser; one arrives twice.
          const samples = [at(0, 100), at(1, 195), at(1, 195), at(2, 290)];
          for (const sample of samples) history.add(sample, []);
          return history.of(null, 'publishes_in').map(([time, rate]) => [time - 1e12, rate]);
        }"""
    )
    assert drawn == [[1000, 95], [2000, 95]]


def test_commands_of_the_doctor_can_be_pasted_one_by_one(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    make_dead_letter(broker, peer, "failing", "fail-1")
    console = open_console(broker)
    console.open_queue("failing")
    commands = console.page.get_by_role("region", name="Doctor").locator(".command code")
    expect(commands).to_have_count(2)
    environ = {**os.environ, **same_build()}
    environ = {name: value for name, value in environ.items() if not name.startswith("SLUICE_U")}
    for line, wanted in zip(commands.all_inner_texts(), ("fail-1", "back into failing")):
        assert "\n" not in line and line.startswith("sluice dlq ")
        program = f"{sys.executable} -m sluice{line.removeprefix('sluice')}"
        if "retry" in line:
            program += " --yes"
        done = subprocess.run(
            ["bash", "-c", program], env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        if "retry" in line:
            assert wanted in done.stdout
        else:
            assert "rejected" in done.stdout


def test_numbers_that_change_each_second_are_not_announced(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    worker = peer(broker, "steady-1")
    worker.work("steady", lambda payload: "$ack")
    author = peer(broker, "steady-author")
    console = open_console(broker)
    page = console.page
    console.open_queue("steady")
    console.live()
    page.evaluate(
        """() => {
          window.announced = [];
          const live = 'output, [role=status], [role=alert], [aria-live]';
          new MutationObserver((changes) => {
            for (const { target } of changes) {
              const element = target.nodeType === 1 ? target : target.parentElement;
              const region = element?.closest(live);
              if (region && !region.closest('[aria-label=Doctor]'))
                window.announced.push(region.outerHTML);
            }
          }).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )
    enqueued = page.get_by_role("region", name="Ledger of group steady").locator("tbody td").first
    for nth in range(1, 4):
        author.publish("steady", b"x")
        expect(enqueued).to_have_text(str(nth))
    assert page.evaluate("window.announced") == []


def test_bulk_retry_has_the_focus_on_cancel(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    make_dead_letter(broker, peer, "many", "many-1")
    console = open_console(broker)
    page = console.page
    console.open_queue("many", "/dead-letters")
    page.get_by_role("button", name="Retry all that match").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()


def test_depth_is_shown_with_its_limit_and_dead_letters_are_not_a_verdict(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    rest(base_of(broker), "/queues", {"name": "small", "limits": {"max_queue_depth": 12}})
    make_dead_letter(broker, peer, "small", "small-1")
    console = open_console(broker)
    page = console.page
    console.open_queue("small")
    figures = page.locator(".facts.strip dd")
    expect(figures.first).to_have_text("0 / 12")
    healthy = rest(base_of(broker), "/queues/small/diagnosis")["healthy"]
    verdict = page.get_by_role("region", name="Doctor").locator(".card-head .tag")
    expect(verdict).to_be_visible()
    assert ("good" in (verdict.get_attribute("class") or "")) == healthy, json.dumps(healthy)
    assert page.locator(".facts.strip .is-bad").count() == 0

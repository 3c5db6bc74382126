"""The page of clients, and `sluice clients`."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open
from tests.admin.console.kit import Peer
from tests.cli.shell import Shell
from tests.support.broker_process import Broker, StartBroker


def test_client_is_found_and_disconnected(
    start_broker: StartBroker, open_console: Open, peer: Callable[[Broker, str], Peer]
) -> None:
    broker = start_broker(flags=["--store", "memory"])
    worker = peer(broker, "worker-1")
    worker.work("jobs", lambda payload: "$ack")
    peer(broker, "visitor")
    console = open_console(broker)
    console.allow("status of 404")
    page = console.page
    console.open()
    page.get_by_role("navigation", name="Console").get_by_role("link", name="Clients").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    console.screenshot("clients")
    page.get_by_label("Client ID begins with").fill("work")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="worker-1").click()
    expect(page.get_by_role("region", name="Subscriptions")).to_contain_text("$queue/jobs")
    expect(page.get_by_role("region", name="Queues that it consumes")).to_contain_text("worker")
    console.screenshot("client")
    page.get_by_role("button", name="Disconnect").click()
    dialog = page.get_by_role("dialog", name="Disconnect worker-1?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    worker.reconnects(False)
    dialog.get_by_role("button", name="Disconnect").click()
    console.notice("Client worker-1 is disconnected and has no session any more.")


def test_clients_on_the_command_line(
    start_broker: StartBroker, peer: Callable[[Broker, str], Peer]
) -> None:
    broker = start_broker(flags=["--store", "memory"])
    sluice = Shell(broker)
    assert sluice.run("clients", "list").stdout == "No clients.\n"
    worker = peer(broker, "worker-1")
    worker.work("jobs", lambda payload: "$ack")
    worker.reconnects(False)
    listed = sluice.run("clients", "list").stdout
    assert "worker-1" in listed and "connected" in listed and "5.0" in listed
    assert "$queue/jobs" in sluice.run("clients", "show", "worker-1").stdout
    (row,) = json.loads(sluice.run("clients", "list", "--json").stdout)
    assert row["client"] == "worker-1"
    refused = sluice.run("clients", "kick", "worker-1")
    assert refused.code == 2 and "--yes" in refused.stderr
    done = sluice.run("clients", "kick", "worker-1", "--yes").stdout
    assert done == "worker-1: disconnected, session deleted.\n"
    assert sluice.run("clients", "show", "worker-1").code == 3

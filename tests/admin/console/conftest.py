"""A browser for each module, a tab for each test.

Playwright's synchronous API keeps an event loop in this thread while it is open. It is opened per
module, so that it is gone before the asynchronous tests of the next module, and nothing in here is
asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.admin.console.kit import Console, Peer
from tests.support.broker_process import Broker
from tests.support.external_programs import need_program

Open = Callable[..., Console]

# Milliseconds: a guard for a busy machine, not reached otherwise.
TIMEOUT_MS = 30_000.0
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = need_program("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def base_of(broker: Broker) -> str:
    return f"http://{broker.facts['http']}"


@pytest.fixture
def open_console(browser: Browser) -> Iterator[Open]:
    """`open_console(broker, width=..., ...)`: open a tab, which is checked when the test ends."""
    with ExitStack() as opened:
        tabs: list[Console] = []

        def open_tab(
            broker: Broker, width: int = 1280, height: int = 860, **options: object
        ) -> Console:
            context = browser.new_context(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
            context.set_default_timeout(TIMEOUT_MS)
            opened.callback(context.close)
            tabs.append(Console(context, base_of(broker)))
            return tabs[-1]

        yield open_tab
        for tab in tabs:
            tab.check()


@pytest.fixture
def peer() -> Iterator[Callable[[Broker, str], Peer]]:
    """`peer(broker, "worker-1")`: connect an MQTT client, closed when the test ends."""
    with ExitStack() as running:

        def connect(broker: Broker, client_id: str) -> Peer:
            one = Peer(broker, client_id)
            running.callback(one.stop)
            return one

        yield connect

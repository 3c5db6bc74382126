"""Appearance and safety of the console: markup in data, other hosts, contrast, scrolling."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from sluice.access.api_tokens import make_token, write_tokens
from sluice.access.identity import Role
from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer
from tests.support.broker_process import Broker, StartBroker
from tests.support.external_programs import need_node_package

Connect = Callable[[Broker, str], Peer]

EVIL = "<img src=x onerror=window.taken=1>"
PAGES = ["", "/messages", "/dead-letters", "/config"]

# The WCAG contrast of the text of each element with its background.
CONTRAST = """() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(channel)
    .reduce((sum, c, nth) => sum + c * [0.2126, 0.7152, 0.0722][nth], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const texts = 'h1,h2,h3,dt,dd,th,td,a,button,label,p,code,.tag,.soft,.badge,summary';
  for (const element of document.querySelectorAll(texts)) {
    const isText = (node) => node.nodeType === 3 && node.textContent.trim();
    if (![...element.childNodes].some(isText)) continue;
    if (!element.checkVisibility() || element.disabled || element.closest('[disabled]')) continue;
    const style = getComputedStyle(element);
    if (style.color.startsWith('color(') || style.backgroundColor.startsWith('color(')) continue;
    const [a, b] = [light(parts(style.color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = element.textContent.trim().slice(0, 30);
    const name = `${element.tagName}.${element.className} ${text}`;
    if (ratio < 4.5) poor.push(`${name} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.fixture(scope="module")
def populated_broker(broker: Broker) -> Iterator[Broker]:
    """A broker with odd names, dead letters, binary payloads and a busy queue."""
    publisher = Peer(broker, "furnisher")
    worker = Peer(broker, EVIL + "-1")
    worker.work(
        EVIL, lambda payload: "$reject" if b"dead" in payload else "", ("consumer-group", "g<b>1")
    )
    pairs = [(EVIL, EVIL), ("message-id", EVIL + "1"), ("partition-key", EVIL)]
    publisher.publish(EVIL, EVIL.encode(), *pairs)
    publisher.publish(EVIL, b'{"dead": "%s"}' % EVIL.encode(), ("message-id", EVIL + "2"))
    publisher.publish(EVIL, bytes(range(256)), ("message-id", "binary"))
    for _ in range(3):
        worker.taken.get(timeout=SECONDS)
    long = "/".join(["a-very-long-level-that-no-user-would-type"] * 4)
    publisher.publish(long, b"x" * 3000, ("message-id", "m" * 200))
    yield broker
    worker.stop()
    publisher.stop()


def test_html_in_data_is_shown_as_text(populated_broker: Broker, open_console: Open) -> None:
    console = open_console(populated_broker)
    page = console.page
    console.open()
    expect(page.get_by_role("link", name=EVIL, exact=True)).to_be_visible()
    console.open_queue(EVIL)
    expect(page.get_by_role("row", name=EVIL + "-1")).to_be_visible()  # the client id
    expect(page.get_by_role("region", name="Group g<b>1", exact=True)).to_be_visible()
    console.open_queue(EVIL, "/messages")
    page.get_by_role("button", name=EVIL + "1", exact=True).click()
    drawer = page.get_by_role("dialog")
    expect(drawer.locator(".payload pre")).to_have_text(EVIL)
    expect(drawer.locator(".pairs").first).to_contain_text(EVIL)
    console.screenshot("odd-names", whole=False)
    page.keyboard.press("Escape")
    console.open_queue(EVIL, "/dead-letters")
    page.get_by_role("button", name=EVIL + "2", exact=True).click()
    expect(drawer.locator("blockquote")).to_have_text("no width in <b>cat.png</b>")
    page.keyboard.press("Escape")
    console.open(f"/queues/{quote(EVIL, safe='')}/messages/{quote(EVIL + '1', safe='')}")
    expect(page.get_by_role("heading", level=1)).to_have_text(EVIL + "1")
    expect(page.locator(".payload pre")).to_have_text(EVIL)
    assert page.locator("img, main b, dialog b").count() == 0
    assert page.evaluate("window.taken") is None


def test_page_loads_from_its_own_host_only_and_has_no_inline_code(broker: Broker) -> None:
    with urllib.request.urlopen(f"{base_of(broker)}/", timeout=SECONDS) as answer:
        policy = answer.headers["Content-Security-Policy"]
        html = answer.read().decode()
    assert "'unsafe" not in policy and "http" not in policy and "*" not in policy
    assert " style=" not in html and " onclick=" not in html and "<style" not in html
    folder = Path(__file__).parents[3] / "src/sluice/admin/console"
    for file in folder.rglob("*.*"):
        text = file.read_text()
        assert (
            "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
        ), file
        assert "://" not in text.replace("http://www.w3.org/", ""), file


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_sufficient_contrast(
    populated_broker: Broker, open_console: Open, theme: str
) -> None:
    console = open_console(populated_broker, color_scheme=theme)
    page = console.page
    console.open()
    console.live()
    page.get_by_role("link", name=EVIL, exact=True).wait_for()
    poor = page.evaluate(CONTRAST)
    console.screenshot(f"overview-{theme}")
    for tab in PAGES:
        console.open_queue(EVIL, tab)
        page.locator(".loading").first.wait_for(state="detached")
        poor += page.evaluate(CONTRAST)
        console.screenshot(f"queue{tab.replace('/', '-')}-{theme}")
    assert not poor, "\n".join(poor)


def test_theme_follows_the_system_until_chosen_and_the_choice_is_stored(
    broker: Broker, open_console: Open
) -> None:
    console = open_console(broker, color_scheme="dark")
    page = console.page
    console.open()
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert dark != light
    switch = page.get_by_role("button", name="Theme")
    switch.click()
    switch.click()
    expect(switch).to_have_text("Theme: dark")
    assert page.evaluate(paper) == dark
    page.reload()
    assert page.evaluate(paper) == dark
    switch.click()
    assert page.evaluate(paper) == light


def test_phone_needs_no_horizontal_scrolling(populated_broker: Broker, open_console: Open) -> None:
    console = open_console(populated_broker, width=360, height=740, is_mobile=True, has_touch=True)
    page = console.page
    console.open()
    page.get_by_role("link", name=EVIL, exact=True).wait_for()
    assert console.horizontal_overflow() == 0
    console.screenshot("phone-overview")
    long = "/".join(["a-very-long-level-that-no-user-would-type"] * 4)
    for name in (EVIL, long):
        for tab in PAGES:
            console.open_queue(name, tab)
            page.locator(".loading").first.wait_for(state="detached")
            assert console.horizontal_overflow() == 0, (name, tab)
            console.screenshot(f"phone-queue{tab.replace('/', '-')}")
    page.goto(f"{console.base}/#/queues/{quote(long, safe='')}/messages/{'m' * 200}")
    page.locator(".timeline").wait_for()
    assert console.horizontal_overflow() == 0
    console.screenshot("phone-biography")
    console.open("/nodes")
    page.get_by_role("region", name="Node").wait_for()
    assert console.horizontal_overflow() == 0


def test_token_is_stored_in_the_tab_only_and_decides_what_is_allowed(
    start_broker: StartBroker, open_console: Open, tmp_path: Path
) -> None:
    viewer, text = make_token("watcher", Role.VIEWER, None)
    file = tmp_path / "tokens.toml"
    write_tokens(file, {viewer.sha256: viewer})
    broker = start_broker(f'[auth]\ntokens = "{file}"\n', ["--store", "memory"])
    console = open_console(broker)
    console.allow("status of 401")
    page = console.page
    page.goto(console.base)
    dialog = page.get_by_role("dialog", name="Sign in")
    dialog.get_by_role("button", name="Token").click()
    dialog.get_by_label("Token").fill("slu_wrong")
    dialog.get_by_role("button", name="Sign in").click()
    dialog.get_by_label("Token").fill(text)
    console.screenshot("sign-in", whole=False)
    dialog.get_by_role("button", name="Sign in").click()
    console.live()
    expect(page.locator("[data-who]")).to_contain_text("watcher (viewer)")
    expect(page.get_by_role("button", name="Create a queue")).to_be_disabled()
    assert (
        page.evaluate("Object.values(localStorage).join() + document.cookie + location.href").find(
            text
        )
        < 0
    )
    assert text in page.evaluate("Object.values(sessionStorage).join()")
    page.reload()
    console.live()
    page.get_by_role("button", name="Sign out").click()
    expect(dialog).to_be_visible()


def test_phone_shows_every_column_and_a_header_of_two_rows(
    populated_broker: Broker, open_console: Open
) -> None:
    console = open_console(populated_broker, width=390, height=800, is_mobile=True, has_touch=True)
    page = console.page
    console.open()
    console.live()
    row = page.locator("table.queues tbody tr", has_text=EVIL)
    for label in ("Depth", "Consumers", "Retrying", "Dead letters"):
        box = row.locator(f"[data-label='{label}']").bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390, label
    header = page.locator("header.bar").bounding_box()
    assert header and header["height"] <= 96
    expect(page.get_by_role("button", name="Theme")).to_have_text("Theme: auto")
    for place in ("Queues", "Clients", "Last-value queues", "Nodes"):
        box = page.get_by_role("link", name=place, exact=True).first.bounding_box()
        assert box and box["x"] + box["width"] <= 390, place
    console.screenshot("phone-queues-390")
    for tab in PAGES:
        console.open_queue(EVIL, tab)
        page.locator(".loading").first.wait_for(state="detached")
        for name in ("Overview", "Messages", "Dead letters", "Configuration"):
            link = page.get_by_role("navigation", name="Queue").get_by_role("link", name=name)
            box = link.bounding_box()
            assert box and box["x"] + box["width"] <= 390, name
        for table in page.locator(".table-box").all():
            wider = table.evaluate("box => box.scrollWidth - box.clientWidth")
            assert wider <= 1, (tab, table.get_attribute("aria-label"))
        console.screenshot(f"phone-390{tab.replace('/', '-')}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_no_accessibility_violation(
    populated_broker: Broker, open_console: Open, theme: str
) -> None:
    script = need_node_package("axe-core") / "axe.min.js"
    console = open_console(populated_broker, color_scheme=theme)
    page = console.page
    addresses = ["/", "/clients", "/ecq", "/nodes"]
    addresses += [f"/queues/{quote(EVIL, safe='')}{tab}" for tab in PAGES]
    addresses.append(f"/queues/{quote(EVIL, safe='')}/messages/{quote(EVIL + '2', safe='')}")
    found = []
    for address in addresses:
        console.open(address)
        console.live()
        page.locator(".loading").first.wait_for(state="detached")
        page.evaluate(script.read_text("utf-8"))
        violations = page.evaluate(
            "axe.run().then(({ violations }) => violations.flatMap((one) =>"
            " one.nodes.map((node) => `${one.id}: ${node.target} ${node.html.slice(0, 120)}`)))"
        )
        found += [f"{address} {one}" for one in violations]
    assert not found, "\n".join(found)

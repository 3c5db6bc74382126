"""The console in a real browser, and the MQTT clients that it shows."""

from __future__ import annotations

import json
import queue
import re
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Locator, Page, Request

from tests.support.broker_process import Broker

SCREENSHOTS = Path(__file__).parents[3] / "build" / "console"
SECONDS = 30.0


def user_properties(kind: int, pairs: Sequence[tuple[str, str]]) -> Properties:
    properties = Properties(kind)
    if pairs:
        properties.UserProperty = list(pairs)
    return properties


class Peer:
    """An MQTT 5 client in its own thread: publishes, and settles deliveries by `judge(message)`."""

    def __init__(self, broker: Broker, client_id: str) -> None:
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5
        )
        self.taken: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self._decide: Callable[[bytes], str] = lambda payload: "$ack"
        self._subscribed: queue.Queue[None] = queue.Queue()
        connected: queue.Queue[None] = queue.Queue()
        self._client.on_connect = lambda *_: connected.put(None)
        self._client.on_subscribe = lambda *_: self._subscribed.put(None)
        self._client.on_message = self._work
        self._client.connect_timeout = SECONDS
        self._client.connect(*_place(broker))
        self._client.loop_start()
        connected.get(timeout=SECONDS)

    def publish(self, name: str, payload: bytes, *pairs: tuple[str, str]) -> None:
        """Publish to a queue and return when the broker has answered."""
        properties = user_properties(PacketTypes.PUBLISH, pairs)
        self._client.publish(f"$queue/{name}", payload, 1, properties=properties).wait_for_publish(
            SECONDS
        )

    def publish_to(self, topic: str, payload: bytes) -> None:
        """Publish to any topic and return when the broker has answered."""
        self._client.publish(topic, payload, 1).wait_for_publish(SECONDS)

    def publish_many(self, names: Sequence[str], payload: bytes) -> None:
        sent = [self._client.publish(f"$queue/{name}", payload, 1) for name in names]
        for one in sent:
            one.wait_for_publish(SECONDS)

    def work(self, name: str, judge: Callable[[bytes], str], *pairs: tuple[str, str]) -> None:
        """Consume and settle each message as `judge` says: $ack, $nack, $reject; "" leaves it."""
        self._decide = judge
        self._client.subscribe(
            f"$queue/{name}", 1, properties=user_properties(PacketTypes.SUBSCRIBE, pairs)
        )
        self._subscribed.get(timeout=SECONDS)

    def _work(self, client: paho.Client, data: Any, message: paho.MQTTMessage) -> None:
        reported = dict(message.properties.UserProperty)  # type: ignore[union-attr]
        payload = bytes(message.payload)
        verdict = self._decide(payload)
        if verdict:
            self.settle(message.topic, reported["message-id"], reported["consumer-group"], verdict)
        self.taken.put((reported["message-id"], payload))

    def settle(self, topic: str, message_id: str, group: str, verdict: str) -> None:
        pairs = [("message-id", message_id), ("consumer-group", group)]
        if verdict == "$reject":
            pairs.append(("description", "no width in <b>cat.png</b>"))
        properties = user_properties(PacketTypes.PUBLISH, pairs)
        self._client.publish(f"{topic}/{verdict}", b"", 1, properties=properties)

    def reconnects(self, wanted: bool) -> None:
        """Whether the client connects again after its connection has ended."""
        if not wanted:
            self._client.on_disconnect = lambda client, *_: client.loop_stop()

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def _place(broker: Broker) -> tuple[str, int]:
    return broker.mqtt.host, broker.mqtt.port


class Console:
    """One tab. It records what a page must never do; `check` fails the test for it."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.base = base
        self.host = urlsplit(base).netloc
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self._allowed: list[str] = []
        self.page.on("console", self._on_console_message)
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("dialog", self._alerted)
        self.page.on("request", self._requested)

    def _on_console_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # includes Content-Security-Policy violations
            self.faults.append(message.text)

    def _alerted(self, dialog: Dialog) -> None:
        self.faults.append(f"alert: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: Request) -> None:
        place = urlsplit(request.url)
        if place.netloc != self.host and place.scheme not in ("data", "blob"):
            self.faults.append(f"asked another host: {request.url}")

    def allow(self, pattern: str) -> None:
        """Allow texts in the browser's log: a refused request, a stopped broker."""
        self._allowed.append(pattern)

    def check(self) -> None:
        left = [
            fault
            for fault in self.faults
            if not any(re.search(one, fault) for one in self._allowed)
        ]
        assert not left, "\n".join(left)

    def open(self, path: str = "/") -> None:
        self.page.goto(f"{self.base}/#{path}")
        self.page.locator("h1").wait_for()

    def open_queue(self, name: str, tab: str = "") -> None:
        self.open(f"/queues/{quote(name, safe='')}{tab}")
        self.page.get_by_role("navigation", name=f"Queue {name}").wait_for()

    def live(self) -> None:
        self.page.locator("[data-link][data-state=live]").wait_for()

    def focused(self) -> str:
        """Return the text or the label of the focused element."""
        text = self.page.evaluate(
            "(() => { const e = document.activeElement;"
            " return e.innerText || e.getAttribute('aria-label')"
            " || e.labels?.[0]?.innerText || e.tagName; })()"
        )
        return str(text)

    def tab_to(self, text: str, max_steps: int = 60) -> None:
        """Press Tab until the element has the focus; fail if the keyboard cannot reach it."""
        for _ in range(max_steps):
            self.page.keyboard.press("Tab")
            if self.focused().strip() == text:
                return
        raise AssertionError(
            f"{text!r} was not reached by {max_steps} steps of Tab; now at {self.focused()!r}"
        )

    def notice(self, text: str) -> Locator:
        note = self.page.locator(".notice", has_text=text)
        note.wait_for()
        return note

    def screenshot(self, name: str, whole: bool = True) -> None:
        """Save a screenshot for people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)

    def horizontal_overflow(self) -> int:
        """Return the pixels by which the page is wider than its window."""
        return int(
            self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )


def rest(base: str, path: str, body: object = None, method: str = "") -> Any:
    """Call the REST API once, for what a test needs to know or create."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{base}/api/v1{path}", data, {"Content-Type": "application/json"}
    )
    if method:
        request.method = method
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read() or b"null")

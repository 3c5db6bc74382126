"""Make images of the console: of a broker with queues, failures, dead letters and clients."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, async_playwright

from sluice.client import Client, Consumer

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
DEAD_LETTERS: Final = "/queues/shop%2Forders/dead-letters"

# The pages of the documentation, by the name of their image.
PAGES: Final = {
    "console-overview": "/",
    "console-queue": "/queues/shop%2Forders",
    "console-dead-letters": DEAD_LETTERS,
    "console-dead-letter": f"{DEAD_LETTERS}?open=ID",
    "console-clients": "/clients",
}
OTHER_PAGES: Final = {
    "messages": "/queues/shop%2Forders/messages",
    "message": "/queues/shop%2Forders/messages/order-3",
    "config": "/queues/shop%2Forders/config",
    "mail": "/queues/mail",
    "owners": "/ecq",
    "owner": "/ecq/car-1",
    "client": "/clients/billing-1",
    "nodes": "/nodes",
    "find": "/find/order-3",
    "unknown": "/nothing/here",
}
WIDE, NARROW = 1280, 390
SECONDS_OF_LOAD: Final = 70.0


def call(base: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{base}/api/v1{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


async def process(consumer: Consumer) -> None:
    """Acknowledge most deliveries, fail some, and reject a few."""
    async for delivery in consumer:
        number = int(delivery.headers.get("order", "1"))
        if number % 40 == 3:
            await delivery.reject(description=f"ValueError: no price for item {number}")
        elif number % 55 == 9:
            await delivery.reject("unacceptable", "KeyError: 'customer'")
        elif number % 17 == 5 and delivery.attempt == 1:
            await delivery.nack("15s", "the payment service does not answer")
        else:
            await asyncio.sleep(0.005)
            await delivery.ack()


async def publish_orders(client: Client) -> None:
    publisher = client.publisher("shop/orders")
    number = 0
    while True:
        number += 1
        order = {"order": number, "item": f"item-{number % 7}", "customer": f"c-{number % 997}"}
        await publisher.send(
            order, key=order["customer"], id=f"order-{number}", headers={"order": str(number)}
        )
        await asyncio.sleep(0.02)


async def populate(stack: AsyncExitStack, base: str, mqtt: str) -> None:
    """Connect the clients, and let them work until the charts show something."""

    async def connect(client_id: str, **options: Any) -> Client:
        return await stack.enter_async_context(
            Client.from_url(f"mqtt://{mqtt}", client_id=client_id, **options)
        )

    call(base, "/queues", {"name": "mail", "limits": {"max_queue_depth": 200}})
    call(base, "/queues", {"name": "prices", "type": "compacted"})
    shop = await connect("shop-1")
    for number in range(150):
        await shop.publisher("mail").send(f"mail {number}")
    for number in range(12):
        await shop.publisher("prices").send(str(number), key=f"item-{number % 7}")
    await shop.publisher("reports").send("tonight", delay="2h")
    for key in ("speed", "fuel", "lights/left"):
        await shop.publish(f"$ECQ/w/car-1/{key}", "80", qos=1)
    car = await connect("car-1", session_expiry=3600)
    await car.subscribe("$ECQ/car-1/#", qos=1)
    await car.subscribe("cars/+/commands", qos=1)
    tasks = []
    for client_id in ("billing-1", "billing-2", "archive-1"):
        client = await connect(client_id)
        consumer = client.consumer("shop/orders", prefetch=20)
        tasks.append(asyncio.create_task(process(consumer)))
    tasks.append(asyncio.create_task(publish_orders(shop)))
    for task in tasks:
        stack.callback(task.cancel)
    await asyncio.sleep(SECONDS_OF_LOAD)


class Photographer:
    def __init__(self, browser: Browser, base: str, folder: Path) -> None:
        self._browser: Browser = browser
        self._base: str = base
        self._folder: Path = folder

    async def take(
        self, pages: dict[str, str], width: int, scheme: str, suffix: str, whole: bool
    ) -> None:
        context = await self._browser.new_context(
            viewport={"width": width, "height": 860},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
        )
        page = await context.new_page()
        dead_letter = call(self._base, "/queues/shop%2Forders/dlq")[0]["message_id"]
        for name, path in pages.items():
            await page.goto(f"{self._base}/#{path.replace('ID', dead_letter)}")
            await page.locator("h1").wait_for()
            await page.locator("[data-link][data-state=live]").wait_for()
            if "open=" in path:
                await page.locator("dialog[open]").wait_for()
            await page.wait_for_timeout(1500)
            await page.screenshot(
                path=self._folder / f"{name}{suffix}.png", full_page=whole and "open=" not in path
            )
            print(f"{name}{suffix}.png")
        await context.close()


async def take_images(base: str, mqtt: str, every_page_to: Path | None) -> None:
    async with AsyncExitStack() as stack:
        await populate(stack, base, mqtt)
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        stack.push_async_callback(browser.close)
        if every_page_to is None:
            await Photographer(browser, base, IMAGES).take(PAGES, WIDE, "light", "", False)
            return
        photographer = Photographer(browser, base, every_page_to)
        for width in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                suffix = f"-{width}-{scheme}"
                await photographer.take({**PAGES, **OTHER_PAGES}, width, scheme, suffix, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="DIR", help="every page, into this directory")
    arguments = parser.parse_args()
    if arguments.all is not None:
        arguments.all.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sluice", "serve", "--data", f"{folder}/data"]
        for listener in ("--mqtt", "--http", "--grpc"):
            command += [listener, "127.0.0.1:0"]
        broker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert broker.stdout is not None
            ready = broker.stdout.readline().split()
            facts = dict(fact.split("=", 1) for fact in ready if "=" in fact)
            asyncio.run(take_images(f"http://{facts['http']}", facts["mqtt"], arguments.all))
        finally:
            broker.terminate()
            broker.wait()


if __name__ == "__main__":
    main()

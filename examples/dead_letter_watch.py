"""Get notified of dead letters by webhook, inspect them, fix the cause, put them back.

`python examples/dead_letter_watch.py [mqtt://localhost:1883 [http://localhost:8080]]` (or
SLUICE_MQTT, SLUICE_URL). The receiver of the webhook is in this program, on loopback, which the
broker must allow:

    SLUICE_WEBHOOKS__ALLOW='["127.0.0.0/8"]' sluice serve
"""

import asyncio
import json
import logging
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.parse import quote
from urllib.request import Request, urlopen

from sluice.client import Client
from sluice.worker import Reject, Worker

QUEUE = "examples/invoices"

logging.getLogger("sluice.worker").setLevel(logging.CRITICAL)


def receive_webhooks(
    alerts: asyncio.Queue[dict[str, str]], loop: asyncio.AbstractEventLoop
) -> HTTPServer:
    """Start a server that puts each alert into a queue, in place of a chat bot or a pager."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            alert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            loop.call_soon_threadsafe(alerts.put_nowait, alert)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def put_back(api: str, message_id: str) -> None:
    """Put a dead letter back, like `sluice dlq retry examples/invoices MESSAGE-ID`."""
    url = f"{api}/api/v1/queues/{quote(QUEUE, safe='')}/dlq/{quote(message_id, safe='')}/retry"
    urlopen(Request(url, method="POST"), timeout=10).close()


async def main(url: str, api: str) -> None:
    app = Worker(url, name="billing")
    printer = {"works": False}
    printed: asyncio.Queue[str] = asyncio.Queue()
    alerts: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    hook = receive_webhooks(alerts, asyncio.get_running_loop())

    @app.task(QUEUE)
    async def print_invoice(invoice: str) -> None:
        if not printer["works"]:
            raise Reject("the printer is broken")
        printed.put_nowait(invoice)

    async with Client.from_url(url, client_id="shop-1") as client, asyncio.timeout(30):
        address = f"http://127.0.0.1:{hook.server_port}/alerts"
        await client.declare_queue(QUEUE, dlq_config={"alert_webhook": address})
        serving = asyncio.create_task(app.serve())
        await client.publisher(QUEUE).send("invoice 17")
        alert = await alerts.get()
        print(f"alert: {alert['queue']}: {alert['failure_reason']}")
        printer["works"] = True
        await asyncio.to_thread(put_back, api, alert["message_id"])
        print(f"printed: {await printed.get()}")
        app.stop()
        await serving
    hook.shutdown()
    hook.server_close()


arguments = sys.argv[1:]
asyncio.run(
    main(
        arguments[0] if arguments else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883"),
        arguments[1]
        if len(arguments) > 1
        else os.environ.get("SLUICE_URL", "http://localhost:8080"),
    )
)

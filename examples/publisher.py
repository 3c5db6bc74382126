"""A program that only publishes: each call returns when the broker has the message on disk.

`python examples/publisher.py [mqtt://localhost:1883]` (or SLUICE_MQTT). It ends by itself; `sluice
peek examples/orders` shows what it published.
"""

import os
import sys

from sluice.client import OutgoingMessage, PublishRefused
from sluice.client.sync import Client

QUEUE = "examples/orders"

url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
with Client.from_url(url) as client:
    orders = client.publisher(QUEUE)
    orders.send({"order": 1, "item": "apple"}, key="ann")  # JSON, in order for ann
    # A second publish with the same id within two minutes is stored once.
    for _ in range(2):
        orders.send({"order": 2, "item": "pear"}, key="ann", id="order-2")
    orders.send({"order": 3, "item": "plum"}, delay="1h", priority=9)
    ids = orders.send_many(OutgoingMessage({"order": n}, key="bob") for n in range(4, 8))
    print(f"published {3 + len(ids)} orders")
    try:
        client.declare_queue(f"{QUEUE}/small", limits={"max_queue_depth": 1})
        for _ in range(2):
            client.publisher(f"{QUEUE}/small").send("one too many")
    except PublishRefused as refusal:
        print(f"{refusal.what}; {refusal.remedy}")

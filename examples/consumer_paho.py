"""A consumer with paho-mqtt alone, without Sluice's library: take a job, do it, acknowledge it.

`python examples/consumer_paho.py [localhost:1883 [COUNT]]` (or SLUICE_MQTT). It first publishes two
jobs to itself, and ends after COUNT jobs, by default 2. `pip install paho-mqtt`.
"""

import os
import sys

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

QUEUE = "$queue/examples/paho"


def with_user(kind: int, *pairs: tuple[str, str]) -> Properties:
    properties = Properties(kind)
    properties.UserProperty = list(pairs)
    return properties


def on_connect(client: Client, *_: object) -> None:
    # All consumers that name this group share it; up to ten jobs are prefetched.
    options = with_user(PacketTypes.SUBSCRIBE, ("consumer-group", "paho"), ("prefetch", "10"))
    client.subscribe(QUEUE, 1, properties=options)
    for job in ("resize cat.png", "resize dog.png"):
        client.publish(QUEUE, job, 1)


def on_message(client: Client, left: list[int], message: MQTTMessage) -> None:
    received = dict(message.properties.UserProperty)
    delivery = [(name, received[name]) for name in ("message-id", "delivery-token")]
    try:
        print(f"{message.payload.decode()}, attempt {received['attempt']}", flush=True)
    except ValueError as fault:  # a permanent failure is rejected, any other is a $nack
        verb, more = "$reject", [("reason", "unacceptable"), ("description", str(fault))]
    else:
        verb, more = "$ack", []
    settled = with_user(PacketTypes.PUBLISH, *delivery, *more)
    client.publish(f"{message.topic}/{verb}", b"", 1, properties=settled)
    left[0] -= 1


def on_publish(client: Client, left: list[int], *_: object) -> None:
    if left[0] == 0 and not client.want_write():
        client.disconnect()


arguments = sys.argv[1:]
address = (
    arguments[0] if arguments else os.environ.get("SLUICE_MQTT", "localhost:1883")
).removeprefix("mqtt://")
host, _, port = address.partition(":")
client = Client(CallbackAPIVersion.VERSION2, "paho-1", protocol=MQTTProtocolVersion.MQTTv5)
client.user_data_set([int(arguments[1]) if len(arguments) > 1 else 2])
client.on_connect, client.on_message, client.on_publish = on_connect, on_message, on_publish
client.connect(host, int(port or 1883))
client.loop_forever()

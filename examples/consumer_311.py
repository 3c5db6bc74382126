"""A consumer that speaks MQTT 3.1.1, with paho-mqtt: topics name its group, and settle.

`python examples/consumer_311.py [localhost:1883]` (or SLUICE_MQTT). It first publishes three jobs
to itself, and ends after them. `pip install paho-mqtt`.
"""

import os
import sys

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

QUEUE = "$queue/examples/311"
JOBS = ("resize cat.png", "locked.png", "nonsense")
attempts: dict[str, int] = {}
left = set(JOBS)


def on_connect(client: Client, *_: object) -> None:
    # `$explicit`: the PUBACK, which paho sends by itself, does not settle the job.
    client.subscribe(f"{QUEUE}/$group/workers/$explicit", 1)
    for job in JOBS:
        client.publish(QUEUE, job, 1)


def on_message(client: Client, _: object, message: MQTTMessage) -> None:
    job = message.payload.decode()
    message_id = message.topic.partition("/$msg/")[2]  # the delivery's topic has the id
    attempts[job] = attempts.get(job, 0) + 1
    if job == "nonsense":
        verb = "$reject"  # never again: a dead letter
    elif job == "locked.png" and attempts[job] == 1:
        verb = "$nack"  # failed: again after the queue's backoff
    else:
        verb = "$ack"
    print(f"{job}, attempt {attempts[job]}: {verb}", flush=True)
    client.publish(f"{QUEUE}/{verb}/{message_id}", b"", 1)
    if verb != "$nack":
        left.discard(job)


def on_publish(client: Client, *_: object) -> None:
    if not left:  # the broker has acknowledged the last settlement
        client.disconnect()


arguments = sys.argv[1:]
address = (
    arguments[0] if arguments else os.environ.get("SLUICE_MQTT", "localhost:1883")
).removeprefix("mqtt://")
host, _, port = address.partition(":")
client = Client(CallbackAPIVersion.VERSION2, "paho-311", protocol=MQTTProtocolVersion.MQTTv311)
client.on_connect, client.on_message, client.on_publish = on_connect, on_message, on_publish
client.connect(host, int(port or 1883))
client.loop_forever()

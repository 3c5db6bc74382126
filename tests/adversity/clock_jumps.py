"""A wall clock that jumps, while the broker runs and while it is stopped."""

from __future__ import annotations

import asyncio
import time

from sluice.client import Client, Message
from tests.adversity.kit import SECONDS, Trial, connected_client, stats

HOUR = 3600
CONFIG = """
[[queues.templates]]
match = "jobs"
[queues.templates.config.retry_policy]
initial_backoff = "1s"
max_backoff = "2s"
[queues.templates.config.performance]
delivery_timeout = "2s"
"""


def user_properties(message: Message) -> dict[str, str]:
    return dict(message.properties.user)


async def settle(mqtt_client: Client, message: Message, verb: str) -> None:
    user = [
        ("message-id", user_properties(message)["message-id"]),
        ("delivery-token", user_properties(message)["delivery-token"]),
    ]
    await mqtt_client.publish(f"$queue/jobs/${verb}", qos=1, user=user)


async def join(mqtt_client: Client) -> None:
    await mqtt_client.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "g")])


async def clock_jumps(trial: Trial) -> None:
    """Set the clock hours forward and back: waiting times do not change. Then over a restart."""
    shim = trial.shim()
    broker = trial.start(CONFIG, environ=shim.environ)
    jumps = [-12 * HOUR, 6 * HOUR, *(trial.draw.randrange(-50, 50) * HOUR for _ in range(6))]
    jumps = jumps[: trial.size(1, len(jumps))]
    for jump in jumps:
        async with connected_client(broker, "worker-1", keep_alive=5) as line:
            await line.publish("$queue/jobs", b"delayed", qos=1, user=[("delay", "2s")])
            await line.publish(
                "$queue/jobs", b"lives long", qos=1, user=[("delay", "1h")], expiry_seconds=2 * HOUR
            )
            await line.publish("$queue/jobs", b"fails", qos=1)
            await line.publish("$queue/jobs", b"is forgotten", qos=1)
            await join(line)
            messages = line.messages()
            for _ in range(2):
                message = await anext(messages)
                if message.payload == b"fails":
                    await settle(line, message, "nack")
            began = time.monotonic()
            shim.order(wall_offset=shim.counter("wall_offset") + jump)
            waited: dict[bytes, float] = {}
            async with asyncio.timeout(SECONDS):
                while len(waited) < 3:
                    message = await anext(messages)
                    waited[message.payload] = time.monotonic() - began
                    await settle(line, message, "ack")
        jumped = f"the clock was set by {jump // HOUR} hours"
        trial.expect(
            set(waited) == {b"delayed", b"fails", b"is forgotten"}, f"{jumped}: {waited} came"
        )
        trial.expect(
            waited[b"fails"] > 0.9, f"{jumped}: a retry came after {waited[b'fails']:.1f} s"
        )
    depth = (await stats(broker, "jobs"))["total_messages"]
    trial.expect(depth == len(jumps), f"{depth} of the long-lived messages are left")
    trial.note(
        "retries, delays, deadlines and times to live keep their duration when the clock jumps"
    )
    async with connected_client(broker, "worker-1") as line:
        await join(line)
        await line.publish("$queue/jobs", b"again", qos=1)
        await settle(line, await anext(line.messages()), "nack")
    broker.kill()
    shim.order(wall_offset=shim.counter("wall_offset") - 3 * HOUR)
    broker = trial.start(CONFIG, environ=shim.environ)
    async with connected_client(broker, "worker-1") as mqtt_client:
        await join(mqtt_client)
        try:
            async with asyncio.timeout(SECONDS / 2):
                message = await anext(mqtt_client.messages())
            trial.expect(message.payload == b"again", f"{message.payload!r} came")
            trial.note("a retry whose clock is set back over a restart continues from the start")
        except TimeoutError:
            trial.expect(
                False, "a retry waits for hours after the clock was set back over a restart"
            )
    broker.stop()

"""From devices to a table and back: Spark archives, explains and repairs orders that fail.

`python examples/spark_pipeline.py [mqtt://localhost:1883 http://localhost:8080]` (or SLUICE_MQTT
and SLUICE_URL). Without an address it starts its own broker. Needs `pip install 'sluice[spark]'`
and Java 17. It ends by itself.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from pyspark.sql import DataFrame

from sluice.client import Client, Message, PublishRefused
from sluice.report import page
from sluice.spark import BulkClient, Endpoint, session
from sluice.spark.pipelines import archive, audit, dead_letters, redrive
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.support import stream_runner
from sluice.spark.pipelines.tables import open_table

ORDERS = "examples/orders"
SHIPPED = "examples/shipped"
CONFIG = {
    "name": ORDERS,
    "partitions": 4,
    "retry_policy": {"max_retries": 1, "initial_backoff": "50ms"},
}
DEVICES, EACH = 3, 20
RUN = f"run{time.time():.0f}"  # tells orders of this run from those of earlier ones


# ---- devices and workers: plain MQTT


def order_of(device: int, number: int) -> tuple[str, str]:
    """Return an order; every tenth has an invalid weight."""
    weight = "NaN" if number % 10 == 9 else f"{number}.5"
    return f"{RUN}-{device}-{number}", f'{{"device": {device}, "weight": {weight}}}'


async def device(url: str, number: int) -> None:
    async with Client.from_url(url, client_id=f"device-{number}") as client:
        for nth in range(EACH):
            name, order = order_of(number, nth)
            # Returns when the order is on disk.
            await client.publish(
                f"$queue/{ORDERS}",
                order,
                qos=1,
                user={"message-id": name, "partition-key": f"d{number}"},
            )


def ship(order: bytes) -> None:
    if "NaN" in order.decode():
        raise ValueError("weight is not a number")


async def work(url: str, name: str, ended: asyncio.Queue[str]) -> None:
    """Ship each order and acknowledge it; one that fails twice becomes a dead letter."""
    async with Client.from_url(url, client_id=name) as client:
        await client.subscribe(f"$queue/{ORDERS}", qos=1, user={"consumer-group": "shipping"})
        async for message in client.messages():
            received = dict(message.properties.user)
            try:
                ship(message.payload)
            except ValueError as fault:
                await settle(client, "$nack", message, description=str(fault))
                if received["attempt"] == "2":
                    ended.put_nowait("dead")
            else:
                order = received["message-id"]
                await client.publish(f"$queue/{SHIPPED}", order, qos=1, user={"message-id": order})
                await settle(client, "$ack", message)
                ended.put_nowait("shipped")


async def settle(client: Client, verb: str, message: Message, **more: str) -> None:
    received = dict(message.properties.user)
    named = {name: received[name] for name in ("message-id", "delivery-token")}
    await client.publish(f"$queue/{ORDERS}/{verb}", qos=1, user={**named, **more})


async def run_workers(url: str, count: int, publishing: bool) -> list[str]:
    """Run two workers until `count` orders are shipped or dead."""
    ended: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(60), asyncio.TaskGroup() as team:
        workers = [team.create_task(work(url, f"shipping-{nth}", ended)) for nth in (1, 2)]
        for number in range(DEVICES if publishing else 0):
            team.create_task(device(url, number))
        ends = [await ended.get() for _ in range(count)]
        for worker in workers:
            worker.cancel()
    return ends


async def create_queue(url: str) -> None:
    async with Client.from_url(url, client_id="orders-office") as client:
        try:
            await client.publish("$admin/queue/create", json.dumps(CONFIG), qos=1)
        except PublishRefused:  # it exists from an earlier run
            pass


# ---- Spark


def main(mqtt: str, where: Endpoint, folder: Path) -> None:
    queues = Queues(where)
    asyncio.run(create_queue(mqtt))
    with BulkClient(where) as client:
        # From now on orders are stored until Spark has read them.
        client.advance(ORDERS, "archive", {}, create=True)
    ends = asyncio.run(run_workers(mqtt, DEVICES * EACH, publishing=True))
    print(
        f"{DEVICES} devices published {len(ends)} orders:"
        f" {ends.count('shipped')} shipped, {ends.count('dead')} dead"
    )

    print("starting Spark, which takes a moment ...", flush=True)
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.log.level": "ERROR",
    }
    spark = session("example", **settings)
    table = folder / "orders"

    # Every message once, after any number of restarts and crashes.
    done = stream_runner.run(
        lambda: archive.start(spark, queues, ORDERS, table, once=True), once=True
    )
    print(f"archived {done.rows} messages")

    found = dead_letters.summarize(queues.read(spark, f"dlq/{ORDERS}"))
    for cause in found.causes:
        print(f"{cause[dead_letters.COUNT_COLUMN]} dead letters: {cause['cause']} ({cause['why']})")
    page.save(dead_letters.report(found, ORDERS), folder / "dead-letters.html")
    print(f"the report is {folder / 'dead-letters.html'}")

    put_back = redrive.run(
        spark,
        queues,
        ORDERS,
        where="text LIKE '%NaN%'",
        changes=["value = replace(text, 'NaN', '1.0')"],
    )
    ends = asyncio.run(run_workers(mqtt, put_back.redriven, publishing=False))
    print(f"repaired and put back {put_back.redriven}: {ends.count('shipped')} shipped")

    def ids(rows: DataFrame) -> DataFrame:
        return audit.select_ids(rows).where(f"id LIKE '{RUN}-%'")

    orders = [(order_of(number, nth)[0],) for number in range(DEVICES) for nth in range(EACH)]
    result = audit.compare_sides(
        {
            "published": ids(spark.createDataFrame(orders, "id string")),
            "acked": ids(queues.read(spark, SHIPPED)),
            "dead": ids(queues.read(spark, f"dlq/{ORDERS}")),
            "archived": ids(open_table(table).read(spark)),
        }
    )
    print(", ".join(f"{name} {count}" for name, count in result.ids.items()))
    print(
        "nothing is missing, nothing is double"
        if result.is_good
        else f"something is wrong: {result.faults}"
    )
    spark.stop()


def start_broker(stack: ExitStack, folder: Path) -> tuple[str, str]:
    command = [
        sys.executable,
        "-m",
        "sluice",
        "serve",
        "--data",
        str(folder / "data"),
        "--grpc",
        "off",
    ]
    for listener in ("--mqtt", "--http"):
        command += [listener, "127.0.0.1:0"]
    log = stack.enter_context((folder / "broker.log").open("w"))
    broker = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    )
    stack.callback(broker.terminate)
    assert broker.stdout is not None
    ready = dict(re.findall(r"(\w+)=(\S+)", broker.stdout.readline()))
    return f"mqtt://{ready['mqtt']}", f"http://{ready['http']}"


with ExitStack() as stack:
    # Not removed: the user may want to see the table and the report.
    folder = Path(tempfile.mkdtemp(prefix="sluice-example-"))
    if len(sys.argv) == 3:
        mqtt, url = sys.argv[1:]
    elif os.environ.get("SLUICE_MQTT") and os.environ.get("SLUICE_URL"):
        mqtt, url = os.environ["SLUICE_MQTT"], os.environ["SLUICE_URL"]
    else:
        mqtt, url = start_broker(stack, folder)
    main(mqtt, Endpoint(url), folder)

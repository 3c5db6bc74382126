"""Measure no-op jobs of a worker of the client library: per second and per CPU-second of the
worker.

    sluice serve &
    python bench/worker.py [mqtt://127.0.0.1:1883] [--jobs 50000] [--kind async|thread]
                           [--concurrency 8] [--prefetch N]

A separate process first enqueues all jobs (100 bytes each). Then one worker runs them; time counts
from its first job until its last PUBACK.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time

import uvloop

from sluice.client import Client
from sluice.worker import Worker


def cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system


async def enqueue(url: str, queue: str, jobs: int) -> None:
    async with Client.from_url(url, client_id="bench-producer") as client:
        await client.publish(
            "$admin/queue/create",
            json.dumps({"name": queue, "limits": {"max_queue_depth": max(jobs, 100_000)}}),
            qos=1,
        )
        wall, cpu = time.perf_counter(), cpu_seconds()
        await client.publisher(queue).send_many(b"x" * 100 for _ in range(jobs))
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    print(json.dumps({"enqueue_per_s": round(jobs / wall), "enqueue_per_cpu_s": round(jobs / cpu)}))


async def work(
    url: str, queue: str, jobs: int, kind: str, concurrency: int, prefetch: int | None
) -> None:
    app = Worker(url, name="bench")
    done = 0
    wall = cpu = 0.0
    loop = asyncio.get_running_loop()
    finished = asyncio.Event()

    def count() -> None:
        nonlocal done, wall, cpu
        if not done:
            wall, cpu = time.perf_counter(), cpu_seconds()
        done += 1
        if done == jobs:
            loop.call_soon_threadsafe(finished.set)

    async def job(payload: bytes) -> None:
        count()

    def job_in_thread(payload: bytes) -> None:
        count()

    task = app.task(queue, concurrency=concurrency, prefetch=prefetch)
    task(job if kind == "async" else job_in_thread)
    async with app.make_client() as client:
        running = await app.start(client)
        await finished.wait()
        await client.drain()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        await running.stop(0)
    print(
        json.dumps(
            {
                "kind": kind,
                "concurrency": concurrency,
                "jobs": jobs,
                "processed_per_s": round(jobs / wall),
            }
            | {"jobs_per_worker_cpu_s": round(jobs / cpu), "us_per_job": round(cpu / jobs * 1e6, 1)}
        )
    )


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("url", nargs="?", default="mqtt://127.0.0.1:1883")
    args.add_argument("--jobs", type=int, default=50_000)
    args.add_argument("--kind", choices=["async", "thread"], default="async")
    args.add_argument("--concurrency", type=int, default=8)
    args.add_argument("--prefetch", type=int)
    args.add_argument("--queue", default=f"bench/worker/{os.getpid()}", help=argparse.SUPPRESS)
    args.add_argument("--enqueue", action="store_true", help=argparse.SUPPRESS)
    given = args.parse_args()
    if given.enqueue:
        asyncio.run(enqueue(given.url, given.queue, given.jobs))
        return
    more = ["--jobs", str(given.jobs), "--queue", given.queue, "--enqueue"]
    subprocess.run([sys.executable, __file__, given.url, *more], check=True)
    working = work(
        given.url, given.queue, given.jobs, given.kind, given.concurrency, given.prefetch
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in `sluice worker`
        runner.run(working)


if __name__ == "__main__":
    main()

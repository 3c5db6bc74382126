"""Command line of the simulator: run worlds until the steps are done or a check fails.

scripts/simulate --steps 1000000 --seed 1
scripts/simulate --compacted              compacted queues, exclusive and shared
scripts/simulate --redis [--compacted]    queues in a real Redis, behind a faulty connection
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import types
from contextlib import ExitStack
from pathlib import Path

# An installed package may also be called "tests": use the one beside this file.
_tests = types.ModuleType("tests")
_tests.__path__ = [str(Path(__file__).parent.parent)]
sys.modules["tests"] = _tests

from tests.simulator import compacted_world, redis_world
from tests.simulator.oracle import Violation
from tests.simulator.world import World, run
from tests.support.redis_process import RedisProcess


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate queues with random actions and faults.")
    parser.add_argument("--steps", type=int, default=100_000, help="total number of steps")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first world; the next ones follow"
    )
    parser.add_argument("--world", type=int, default=6000, help="steps per world")
    parser.add_argument(
        "--compacted", action="store_true", help="compacted queues instead of work queues"
    )
    parser.add_argument("--redis", action="store_true", help="store the queues in a separate Redis")
    options = parser.parse_args()
    with ExitStack() as stack:
        return simulate(options, start_redis(stack) if options.redis else None)


def start_redis(stack: ExitStack) -> RedisProcess:
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="sluice-redis-", dir=shared_memory)
    )
    server = RedisProcess(Path(folder)).start()
    stack.callback(server.stop)
    return server


def simulate(options: argparse.Namespace, redis: RedisProcess | None) -> int:
    started = time.monotonic()
    counts: dict[str, int] = {}
    done = 0
    seed = options.seed
    while done < options.steps:
        length = min(options.world, options.steps - done)
        print(f"\r{done:,} steps, seed {seed}", end="", file=sys.stderr, flush=True)
        try:
            world: World | compacted_world.CompactedWorld
            if redis is not None:
                world = redis_world.run(seed, length, redis, f"world-{seed}", options.compacted)
            else:
                world = (
                    compacted_world.run(seed, length) if options.compacted else run(seed, length)
                )
        except Violation as error:
            print(f"\n{error}")
            kind = ("--redis " if options.redis else "") + (
                "--compacted " if options.compacted else ""
            )
            print(
                f"\nRepeat with: scripts/simulate {kind}--seed {seed} "
                f"--steps {length} --world {length}"
            )
            return 1
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
        done += length
        seed += 1
    print(
        f"\r{done:,} steps in {seed - options.seed} worlds, "
        f"{time.monotonic() - started:.0f} s, no violation"
    )
    for what, count in sorted(counts.items()):
        print(f"  {count:>9,} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

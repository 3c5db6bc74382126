"""The simulator by command: many worlds, each a number of steps long, until the time is up or something is wrong.

scripts/simulate --steps 1000000 --seed 1
scripts/simulate --compacted                  the same for compacted queues, exclusive and shared
scripts/simulate --redis [--compacted]        with the queues in a real Redis, behind a line that is held, cut and torn
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

# Some package that the tests need may bring a package of this name: ours is the one beside this file.
_tests = types.ModuleType("tests")
_tests.__path__ = [str(Path(__file__).parent.parent)]
sys.modules["tests"] = _tests

from tests.simulator import compacted_world, redis_world
from tests.simulator.oracle import Violation
from tests.simulator.world import World, run
from tests.support.redis_process import RedisProcess


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run queues through everything that can happen to them."
    )
    parser.add_argument("--steps", type=int, default=100_000, help="steps in all")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first world; the others count on from it"
    )
    parser.add_argument("--world", type=int, default=6000, help="steps of each world")
    parser.add_argument(
        "--compacted", action="store_true", help="compacted queues in place of work queues"
    )
    parser.add_argument(
        "--redis", action="store_true", help="keep the queues in a Redis of its own"
    )
    reported = parser.parse_args()
    with ExitStack() as ends:
        return simulate(reported, start_redis(ends) if reported.redis else None)


def start_redis(ends: ExitStack) -> RedisProcess:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="sluice-redis-", dir=memory))
    server = RedisProcess(Path(folder)).start()
    ends.callback(server.stop)
    return server


def simulate(reported: argparse.Namespace, redis: RedisProcess | None) -> int:
    started = time.monotonic()
    counts: dict[str, int] = {}
    done = 0
    seed = reported.seed
    while done < reported.steps:
        length = min(reported.world, reported.steps - done)
        print(f"\r{done:,} steps, seed {seed}", end="", file=sys.stderr, flush=True)
        try:
            world: World | compacted_world.CompactedWorld
            if redis is not None:
                world = redis_world.run(seed, length, redis, f"world-{seed}", reported.compacted)
            else:
                world = (
                    compacted_world.run(seed, length) if reported.compacted else run(seed, length)
                )
        except Violation as fault:
            print(f"\n{fault}")
            kind = ("--redis " if reported.redis else "") + (
                "--compacted " if reported.compacted else ""
            )
            print(
                f"\nAgain with: scripts/simulate {kind}--seed {seed} --steps {length} --world {length}"
            )
            return 1
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
        done += length
        seed += 1
    print(
        f"\r{done:,} steps in {seed - reported.seed} worlds, {time.monotonic() - started:.0f} s, no violation"
    )
    for what, count in sorted(counts.items()):
        print(f"  {count:>9,} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

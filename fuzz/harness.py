"""The loop shared by the fuzzers of Arrow uploads and of configurations.

    python fuzz/fuzz_NAME.py --inputs 1000000 --seed 1    number of inputs
    python fuzz/fuzz_NAME.py --seconds 60                 time limit
    python fuzz/fuzz_NAME.py --replay HEX                 repeat one input, as a failure printed it

A fuzzer has seeds, a function that changes an input, and a check, which returns a short text for
each kind of outcome and raises for an outcome that must not happen. An input with a new outcome
joins the pool from which further inputs are made.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import monotonic
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
POOL_LIMIT = 2000
POOL_BYTES = 8192  # larger inputs do not join the pool
MEMORY_BYTES = 8 << 30  # a decompression bomb ends the fuzzer, not the machine


def find_sources() -> None:
    """Make `sluice` importable if it is not installed, and our package `tests`."""
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]
    if find_spec("sluice") is None:
        sys.path.insert(0, str(ROOT / "src"))


def main(
    description: str,
    seeds: list[bytes],
    change: Callable[[bytes, Random], bytes],
    check: Callable[[bytes], str],
) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs")
    parser.add_argument("--seconds", type=float, help="time limit")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random generator")
    parser.add_argument("--replay", metavar="HEX", help="run this input")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if options.replay is not None:
        print(check(bytes.fromhex(options.replay)))
        return
    run(seeds, change, check, options.inputs, options.seconds, options.seed)


def run(
    seeds: list[bytes],
    change: Callable[[bytes, Random], bytes],
    check: Callable[[bytes], str],
    inputs: int,
    seconds: float | None,
    seed: int,
) -> int:
    """Try inputs up to the limits; return their number. Raises the error of the first failure."""
    draw = Random(seed)
    pool = list(seeds)
    seen = {check(data) for data in pool}
    started = monotonic()
    count = 0
    while count < inputs and (seconds is None or monotonic() - started < seconds):
        data = change(draw.choice(pool), draw)
        try:
            outcome = check(data)
        except BaseException:
            print(
                f"failed after {count} inputs; repeat with --replay {data.hex()}", file=sys.stderr
            )
            raise
        count += 1
        if outcome not in seen and len(pool) < POOL_LIMIT and len(data) <= POOL_BYTES:
            seen.add(outcome)
            pool.append(data)
    print(f"{count} inputs, {len(seen)} different outcomes, seed {seed}: no failure")
    return count


def changed_bytes(data: bytes, draw: Random, tokens: list[bytes]) -> bytes:
    """Apply a few small changes: flip bits, delete and double bytes, insert or overwrite tokens."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        size = draw.choice((1, 2, 4, 8, 64))
        match draw.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(out):
                out[at] = draw.randrange(256)
            case 2:
                out[at:at] = draw.choice(tokens)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size]
            case _:
                token = draw.choice(tokens)
                out[at : at + len(token)] = token
    return bytes(out)

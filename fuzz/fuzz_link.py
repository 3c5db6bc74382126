"""Feed bytes to the links between nodes: the result must be frames or a protocol error.

    python fuzz/fuzz_link.py --inputs 1000000 --seed 1   random changes, number of inputs
    python fuzz/fuzz_link.py --seconds 60 --seed 1       random changes with a time limit
    python fuzz/fuzz_link.py [libFuzzer's options]       guided by coverage, needs atheris
    python fuzz/fuzz_link.py --replay 00050100...        repeat one input, as a failure printed it

An input is a byte for its reader, a byte for where the stream is cut, and the stream. The
properties that must hold are in `tests/cluster/transport/link_corpus.py`, beside the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from re import sub
from tempfile import mkdtemp
from time import monotonic
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# Other libraries install a package of this name.
sys.modules["tests"] = ModuleType("tests")
sys.modules["tests"].__path__ = [str(ROOT / "tests")]
if find_spec("sluice") is None:  # not installed: use the sources, interpreted
    sys.path.insert(0, str(ROOT / "src"))

from tests.cluster.transport import link_corpus as corpus

POOL_LIMIT = 2000
INPUTS_PER_TARGET = 5000  # a target keeps what it accepts


def packed(reader: int, cut: int, stream: bytes) -> bytes:
    return bytes([reader, cut]) + stream


async def run_input(target: corpus.LinkFuzzTarget, data: bytes) -> str:
    if len(data) < 2:
        return ""
    return await target.check(data[0] % len(corpus.READERS), data[1], data[2:])


def seeds() -> list[bytes]:
    return [packed(reader, 3, data) for reader, data in corpus.ALL_SEEDS]


def changed_input(pool: list[bytes], draw: Random) -> bytes:
    data = draw.choice(pool)
    reader = data[0] % len(corpus.READERS)
    stream = corpus.mutated(reader, data[2:], draw)
    if draw.random() < 0.1:
        stream += draw.choice([one for one in pool if one[0] % len(corpus.READERS) == reader])[2:]
    return packed(reader, draw.randrange(256), stream)


async def run_for(seconds: float, inputs: int, seed: int) -> None:
    """Change inputs at random; an input with a new outcome joins the pool for further inputs."""
    draw = Random(seed)
    pool = seeds()
    seen: set[str] = set()
    count = 0
    until = monotonic() + seconds
    while count < inputs and monotonic() < until:
        target = await corpus.LinkFuzzTarget().open()
        for nth in range(min(INPUTS_PER_TARGET, inputs - count)):
            data = pool[nth] if count < len(corpus.ALL_SEEDS) else changed_input(pool, draw)
            try:
                # Names and numbers do not make a new outcome.
                outcome = sub(r"'[^']*'|\d+", "n", await run_input(target, data))
            except BaseException:
                print(
                    f"failed after {count} inputs; repeat with --replay {data.hex()}",
                    file=sys.stderr,
                )
                raise
            count += 1
            if outcome not in seen and len(pool) < POOL_LIMIT and len(data) < 4096:
                seen.add(outcome)
                pool.append(data)
        await target.close()
    build = "compiled" if corpus.COMPILED else "interpreted"
    print(f"{count} inputs, {len(seen)} different outcomes, seed {seed}, {build}: no failure")


async def replay(data: bytes) -> None:
    target = await corpus.LinkFuzzTarget().open()
    print(await run_input(target, data))
    await target.close()


def run_guided(arguments: list[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --inputs")
    if corpus.COMPILED:
        sys.exit(
            "atheris cannot instrument compiled code: "
            "use PYTHONPATH=src without a compiled build in it"
        )
    atheris.instrument_all()
    # The last directory: atheris stores new inputs in the first one, the caller's.
    directory = Path(mkdtemp(prefix="sluice-fuzz-"))
    for nth, data in enumerate(seeds()):
        (directory / f"seed-{nth:02}").write_bytes(data)
    loop = asyncio.new_event_loop()
    target = loop.run_until_complete(corpus.LinkFuzzTarget().open())
    atheris.Setup(
        [sys.argv[0], *arguments, str(directory)],
        lambda data: loop.run_until_complete(run_input(target, data)) and None,
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the links between the nodes of Sluice.")
    parser.add_argument("--inputs", type=int, help="number of inputs of the random loop")
    parser.add_argument("--seconds", type=float, help="time limit of the random loop")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random loop")
    parser.add_argument("--replay", metavar="HEX", help="run this input")
    options, rest = parser.parse_known_args()
    logging.disable(logging.WARNING)
    if options.replay is not None:
        asyncio.run(replay(bytes.fromhex(options.replay)))
    elif options.seconds is not None or options.inputs is not None:
        seconds = options.seconds if options.seconds is not None else float("inf")
        inputs = options.inputs if options.inputs is not None else sys.maxsize
        asyncio.run(run_for(seconds, inputs, options.seed))
    else:
        run_guided(rest)


if __name__ == "__main__":
    main()

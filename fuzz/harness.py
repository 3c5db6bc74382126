"""The loop shared by all fuzzers.

    python fuzz/fuzz_NAME.py --inputs 1000000 --seed 1     number of inputs
    python fuzz/fuzz_NAME.py --seconds 60                  time limit
    python fuzz/fuzz_NAME.py --guided [libFuzzer options]  guided by coverage, needs atheris
    python fuzz/fuzz_NAME.py --replay HEX                  repeat an input that a failure printed

A fuzzer has seeds, a function that makes an input from a pool of inputs, and a check, which returns
a short text for each kind of outcome and raises for an outcome that must not happen. An input with
a new outcome joins the pool.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from time import monotonic
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
POOL_LIMIT = 2000
MEMORY_BYTES = 8 << 30  # a decompression bomb ends the fuzzer, not the machine


@dataclass(frozen=True)
class Fuzzer:
    seeds: Callable[[], list[bytes]]
    change: Callable[[list[bytes], Random], bytes]
    check: Callable[[bytes], str]
    pool_bytes: int = 8192  # larger inputs do not join the pool


def find_sources() -> None:
    """Make `sluice` importable if it is not installed, and our package `tests`."""
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]
    if find_spec("sluice") is None:
        sys.path.insert(0, str(ROOT / "src"))


def is_compiled() -> bool:
    from sluice.wire import decode

    return not (decode.__file__ or "").endswith(".py")


def main(description: str, fuzzers: Fuzzer | Mapping[str, Fuzzer]) -> None:
    """Run a fuzzer; of several, the first argument names it."""
    parser = argparse.ArgumentParser(description=description)
    if not isinstance(fuzzers, Fuzzer):
        parser.add_argument("target", choices=sorted(fuzzers))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random generator")
    parser.add_argument("--replay", metavar="HEX", help="run this input")
    parser.add_argument("--guided", action="store_true", help="guided by coverage, with atheris")
    options, rest = parser.parse_known_args()
    fuzzer = fuzzers if isinstance(fuzzers, Fuzzer) else fuzzers[options.target]
    if options.guided:
        run_guided(fuzzer, rest)
        return
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if options.replay is not None:
        print(fuzzer.check(bytes.fromhex(options.replay)))
    else:
        run(fuzzer, options.inputs, options.seconds, options.seed)


def run(fuzzer: Fuzzer, inputs: int, seconds: float, seed: int) -> None:
    """Try inputs up to the limits. Raises the error of the first failure."""
    draw = Random(seed)
    pool = fuzzer.seeds()
    seen = {fuzzer.check(data) for data in pool}
    until = monotonic() + seconds
    count = 0
    while count < inputs and monotonic() < until:
        data = fuzzer.change(pool, draw)
        try:
            outcome = fuzzer.check(data)
        except BaseException:
            print(
                f"failed after {count} inputs; repeat with --replay {data.hex()}", file=sys.stderr
            )
            raise
        count += 1
        if outcome not in seen and len(pool) < POOL_LIMIT and len(data) <= fuzzer.pool_bytes:
            seen.add(outcome)
            pool.append(data)
    build = "compiled" if is_compiled() else "interpreted"
    print(f"{count} inputs, {len(seen)} different outcomes, seed {seed}, {build}: no failure")


def run_guided(fuzzer: Fuzzer, arguments: list[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --inputs or --seconds")
    if is_compiled():
        sys.exit(
            "atheris cannot instrument compiled code: "
            "use PYTHONPATH=src without a compiled build in it"
        )
    atheris.instrument_all()
    # The last directory: atheris stores new inputs in the first one, the caller's.
    directory = Path(mkdtemp(prefix="sluice-fuzz-"))
    for nth, data in enumerate(fuzzer.seeds()):
        (directory / f"seed-{nth:02}").write_bytes(data)
    atheris.Setup(
        [sys.argv[0], *arguments, str(directory)], lambda data: fuzzer.check(data) and None
    )
    atheris.Fuzz()


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

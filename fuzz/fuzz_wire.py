"""Throw bytes at the wire code until something other than a packet, "not yet" or a protocol violation comes out.

    python fuzz/fuzz_wire.py --seconds 60 --seed 1      a bounded loop of random accidents, nothing to install
    python fuzz/fuzz_wire.py [libFuzzer's options]      guided by coverage, with atheris installed
    python fuzz/fuzz_wire.py --replay 05003002...       one input again, as a failure printed it

An input is a byte for the version, a byte for where the stream is cut, and the stream. What must hold for it stands in
`tests/wire/corpus.py` (`scrutinise`), beside the seeds that both this and the tests start from.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from re import sub
from tempfile import mkdtemp
from time import monotonic
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.modules["tests"] = ModuleType("tests")  # ours: some libraries install a package of this name
sys.modules["tests"].__path__ = [str(ROOT / "tests")]
if find_spec("sluice") is None:  # not installed: the sources, interpreted
    sys.path.insert(0, str(ROOT / "src"))

from tests.wire import corpus

POOL_LIMIT = 2000


def packed(version: int, cut: int, stream: bytes) -> bytes:
    return bytes([version, cut]) + stream


def TestOneInput(data: bytes) -> str:  # the name libFuzzer's harnesses go by  # noqa: N802
    if len(data) < 2:
        return ""
    stream = data[2:]
    cuts = [data[1], data[1] * 7 + 3, len(stream) - 1]
    return corpus.check_input(stream, 5 if data[0] & 1 else 4, cuts)


def seeds() -> list[bytes]:
    return [packed(version, 3, data) for version, data in corpus.SEEDS]


def run_for(seconds: float, seed: int) -> None:
    """Accidents upon accidents: an input with an outcome not seen before joins the pool that the next grow from."""
    draw = Random(seed)
    pool = seeds()
    seen = {TestOneInput(data) for data in pool}
    count = 0
    until = monotonic() + seconds
    while monotonic() < until:
        for _ in range(500):
            data = draw.choice(pool)
            stream = corpus.mutated(data[2:], draw)
            if draw.random() < 0.1:
                stream += draw.choice(pool)[2:]
            data = packed(
                data[0] if draw.random() < 0.95 else draw.randrange(256),
                draw.randrange(256),
                stream,
            )
            try:
                outcome = sub(
                    r"(?<!0x)\b\d+", "n", TestOneInput(data)
                )  # a number makes no new kind
            except BaseException:
                print(
                    f"failed after {count} inputs; again with --replay {data.hex()}",
                    file=sys.stderr,
                )
                raise
            count += 1
            if outcome not in seen and len(pool) < POOL_LIMIT and len(data) < 4096:
                seen.add(outcome)
                pool.append(data)
    build = "compiled" if corpus.COMPILED else "interpreted"
    print(f"{count} inputs, {len(seen)} different outcomes, seed {seed}, {build}: nothing found")


def run_guided(arguments: list[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        sys.exit(
            "atheris is not installed: pip install atheris, or give --seconds to do without it"
        )
    if corpus.COMPILED:
        sys.exit(
            "atheris sees nothing of compiled code: run it with PYTHONPATH=src and no compiled build there"
        )
    atheris.instrument_all()
    directory = Path(
        mkdtemp(prefix="sluice-fuzz-")
    )  # behind the caller's own, which then gets what is found
    for nth, data in enumerate(seeds()):
        (directory / f"seed-{nth:02}").write_bytes(data)
    atheris.Setup(
        [sys.argv[0], *arguments, str(directory)], lambda data: TestOneInput(data) and None
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the wire code of Sluice.")
    parser.add_argument("--seconds", type=float, help="run the bounded loop for so long")
    parser.add_argument("--seed", type=int, default=1, help="where the loop's chance begins")
    parser.add_argument("--replay", metavar="HEX", help="try this one input")
    options, rest = parser.parse_known_args()
    if options.replay is not None:
        print(TestOneInput(bytes.fromhex(options.replay)))
    elif options.seconds is not None:
        run_for(options.seconds, options.seed)
    else:
        run_guided(rest)


if __name__ == "__main__":
    main()

"""Feed bytes to the wire code: the result must be packets, "not yet" or a protocol violation.

    python fuzz/fuzz_wire.py --seconds 60 --seed 1      random changes with a time limit
    python fuzz/fuzz_wire.py [libFuzzer's options]      guided by coverage, needs atheris
    python fuzz/fuzz_wire.py --replay 05003002...       repeat one input, as a failure printed it

An input is a byte for the version, a byte for where the stream is cut, and the stream. The
properties that must hold are in `tests/wire/corpus.py` (`check_input`), beside the seeds that both
this program and the tests start from.
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
# Other libraries install a package of this name.
sys.modules["tests"] = ModuleType("tests")
sys.modules["tests"].__path__ = [str(ROOT / "tests")]
if find_spec("sluice") is None:  # not installed: use the sources, interpreted
    sys.path.insert(0, str(ROOT / "src"))

from tests.wire import corpus

POOL_LIMIT = 2000


def packed(version: int, cut: int, stream: bytes) -> bytes:
    return bytes([version, cut]) + stream


def TestOneInput(data: bytes) -> str:  # libFuzzer's name  # noqa: N802
    if len(data) < 2:
        return ""
    stream = data[2:]
    cuts = [data[1], data[1] * 7 + 3, len(stream) - 1]
    return corpus.check_input(stream, 5 if data[0] & 1 else 4, cuts)


def seeds() -> list[bytes]:
    return [packed(version, 3, data) for version, data in corpus.SEEDS]


def run_for(seconds: float, seed: int) -> None:
    """Change inputs at random; an input with a new outcome joins the pool for further inputs."""
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
                # Numbers do not make a new outcome.
                outcome = sub(r"(?<!0x)\b\d+", "n", TestOneInput(data))
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
    build = "compiled" if corpus.COMPILED else "interpreted"
    print(f"{count} inputs, {len(seen)} different outcomes, seed {seed}, {build}: no failure")


def run_guided(arguments: list[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --seconds")
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
    atheris.Setup(
        [sys.argv[0], *arguments, str(directory)], lambda data: TestOneInput(data) and None
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the wire code of Sluice.")
    parser.add_argument("--seconds", type=float, help="time limit of the random loop")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random loop")
    parser.add_argument("--replay", metavar="HEX", help="run this input")
    options, rest = parser.parse_known_args()
    if options.replay is not None:
        print(TestOneInput(bytes.fromhex(options.replay)))
    elif options.seconds is not None:
        run_for(options.seconds, options.seed)
    else:
        run_guided(rest)


if __name__ == "__main__":
    main()

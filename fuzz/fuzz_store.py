"""Read logs and snapshots with valid checksums and invalid contents: a start must end with a clear
error.

    python fuzz/fuzz_store.py notes --inputs 1000000 --seed 1   records of the log; or --seconds 60
    python fuzz/fuzz_store.py snapshots --inputs 1000000        the snapshot file
    python fuzz/fuzz_store.py notes --replay 0700e803...        repeat an input of a failure
    python fuzz/fuzz_store.py notes [libFuzzer's options]       guided by coverage, needs atheris

An input of `notes` is two bytes that choose a frame of the history, and the contents of that frame.
An input of `snapshots` is the contents of the file after its checksum. The properties that must
hold are in `tests/store/embedded/log_corpus.py`.
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

from sluice.queues.compacted import owner_lookup, slab
from sluice.queues.log import frame_builder
from tests.store.embedded import log_corpus

POOL_LIMIT = 2000
COMPILED = not (frame_builder.__file__ or "").endswith(".py")
# An engine is created for each input: smaller tables take less time.
if not COMPILED:
    vars(slab).update(FIRST_CHUNK_BITS=4)
    vars(owner_lookup).update(SHARDS=1, SHARD_BITS=0)


def check_notes(data: bytes) -> str:
    return (
        log_corpus.open_notes(int.from_bytes(data[:2], "little"), data[2:]) if len(data) > 2 else ""
    )


def check_snapshot(data: bytes) -> str:
    return log_corpus.open_snapshot(data)


TARGETS = {"notes": check_notes, "snapshots": check_snapshot}


def seeds(target: str) -> list[bytes]:
    history = log_corpus.history()
    if target == "snapshots":
        return [history.snapshot]
    return [nth.to_bytes(2, "little") + body for nth, body in enumerate(history.frames)]


def run(target: str, inputs: int, seconds: float, seed: int) -> None:
    """Change inputs at random; an input with a new outcome joins the pool for further inputs."""
    draw = Random(seed)
    test = TARGETS[target]
    pool = seeds(target)
    parts = [*log_corpus.history().frames, log_corpus.history().snapshot]
    prefix = 2 if target == "notes" else 0
    seen = {test(data) for data in pool}
    count = 0
    until = monotonic() + seconds
    while count < inputs and monotonic() < until:
        data = draw.choice(pool)
        data = data[:prefix] + log_corpus.mutated(data[prefix:], draw, parts)
        try:
            outcome = sub(r"\d+", "n", test(data))  # numbers do not make a new outcome
        except BaseException:
            print(
                f"failed after {count} inputs; repeat with {target} --replay {data.hex()}",
                file=sys.stderr,
            )
            raise
        count += 1
        if outcome not in seen and len(pool) < POOL_LIMIT and len(data) < 65_536:
            seen.add(outcome)
            pool.append(data)
    build = "compiled" if COMPILED else "interpreted"
    print(
        f"{target}: {count} inputs, {len(seen)} different outcomes, "
        f"seed {seed}, {build}: no failure"
    )


def run_guided(target: str, arguments: list[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --inputs or --seconds")
    if COMPILED:
        sys.exit(
            "atheris cannot instrument compiled code: "
            "use PYTHONPATH=src without a compiled build in it"
        )
    atheris.instrument_all()
    # The last directory: atheris stores new inputs in the first one, the caller's.
    directory = Path(mkdtemp(prefix="sluice-fuzz-"))
    for nth, data in enumerate(seeds(target)):
        (directory / f"seed-{nth:02}").write_bytes(data)
    test = TARGETS[target]
    atheris.Setup([sys.argv[0], *arguments, str(directory)], lambda data: test(data) and None)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the recovery of Sluice's store.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--inputs", type=int, help="number of inputs of the random loop")
    parser.add_argument("--seconds", type=float, help="time limit of the random loop")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random loop")
    parser.add_argument("--replay", metavar="HEX", help="run this input")
    options, rest = parser.parse_known_args()
    if options.replay is not None:
        print(TARGETS[options.target](bytes.fromhex(options.replay)))
    elif options.inputs is not None or options.seconds is not None:
        run(options.target, options.inputs or 1 << 62, options.seconds or 1e9, options.seed)
    else:
        run_guided(options.target, rest)


if __name__ == "__main__":
    main()

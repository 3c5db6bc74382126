"""Runs adversities from the command line: each injects a fault and checks the guarantees.

    scripts/adversity                             all of them, the long form: about ten minutes
    scripts/adversity --minutes 2 slow-disk full-disk
    scripts/adversity --seed 7 kills

docs/reliability.md states the guarantee for each of them. Exit code 1 if one is broken.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

import uvloop

from tests.adversity.registry import ADVERSITIES, run_trial

LONG_MINUTES = 10.0  # duration of the long form of all of them


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Inject faults into a broker and check its guarantees."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(ADVERSITIES)}; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=LONG_MINUTES, help="about how long all of them take"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in ADVERSITIES]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(ADVERSITIES)}")
    logging.disable(logging.ERROR)  # workers are expected to fail
    failed = 0
    for name in arguments.names or ADVERSITIES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sluice-adversity-") as folder:
            try:
                trial = uvloop.run(
                    run_trial(name, Path(folder), arguments.seed, arguments.minutes / LONG_MINUTES)
                )
                faults, seen = trial.faults, trial.seen
            except Exception:
                faults, seen = [traceback.format_exc()], []
            took = time.monotonic() - began
            print(
                f"{'FAULT' if faults else 'ok':<6}{name} ({took:.0f} s, seed {arguments.seed})",
                flush=True,
            )
            for note in seen:
                print(f"      {note}", flush=True)
            for fault in faults[:20]:
                print(f"      FAULT: {fault}", flush=True)
            failed += bool(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

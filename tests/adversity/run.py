"""Adversities by command: each does something bad to a real broker, and sees that the promises hold.

    scripts/adversity                             all of them, the long form: about ten minutes
    scripts/adversity --minutes 2 slow-disk full-disk
    scripts/adversity --seed 7 kills

What each of them promises is in docs/reliability.md. Ends with 1 if something was not as promised.
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

LONG_MINUTES = 10.0  # what the long form of all of them takes


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Do bad things to a broker, and see that its promises hold."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(ADVERSITIES)}; all unless given"
    )
    parser.add_argument(
        "--minutes", type=float, default=LONG_MINUTES, help="about how long all of them take"
    )
    parser.add_argument("--seed", type=int, default=1, help="of every choice that is made by lot")
    reported = parser.parse_args()
    unknown = [name for name in reported.names if name not in ADVERSITIES]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(ADVERSITIES)}")
    logging.disable(logging.ERROR)  # of workers that fail as they should
    failed = 0
    for name in reported.names or ADVERSITIES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sluice-adversity-") as folder:
            try:
                trial = uvloop.run(
                    run_trial(name, Path(folder), reported.seed, reported.minutes / LONG_MINUTES)
                )
                faults, seen = trial.faults, trial.seen
            except Exception:
                faults, seen = [traceback.format_exc()], []
            took = time.monotonic() - began
            print(
                f"{'FAULT' if faults else 'ok':<6}{name} ({took:.0f} s, seed {reported.seed})",
                flush=True,
            )
            for mqtt_client in seen:
                print(f"      {mqtt_client}", flush=True)
            for mqtt_client in faults[:20]:
                print(f"      FAULT: {mqtt_client}", flush=True)
            failed += bool(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

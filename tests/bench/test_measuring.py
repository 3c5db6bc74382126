"""What a broker has used of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

from sluice.bench.measuring import cpu_of

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_what_a_process_below_it_has_used_counts_after_that_has_ended() -> None:
    before = cpu_of(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert cpu_of(os.getpid()) - before > 0.25

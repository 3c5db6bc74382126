"""CPU time and memory of a broker."""

from __future__ import annotations

import os
import subprocess
import sys

from sluice.bench.procfs import cpu_of

BURN = "import time\nwhile time.process_time() < 0.3: pass"
# Starts a child, lets it end on command, and starts another.
WAIT = """
import subprocess, sys
for _ in range(20):
    work = "i=0; while [ $i -lt 3000 ]; do i=$((i + 1)); done; echo; read word"
    below = subprocess.Popen(["sh", "-c", work],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    below.stdout.readline()
    print("begun", flush=True)
    sys.stdin.readline()
    below.communicate(b"word\\n")
    print("ended", flush=True)
"""


def test_cpu_of_an_ended_child_process_still_counts() -> None:
    before = cpu_of(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert cpu_of(os.getpid()) - before > 0.25


def test_counted_cpu_never_decreases_when_a_child_ends() -> None:
    """This process is idle meanwhile, so that CPU time lost at the child's end would show."""
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as middle:
        assert middle.stdin is not None and middle.stdout is not None
        for _ in range(20):
            assert middle.stdout.readline() == "begun\n"
            before = cpu_of(middle.pid)
            print("end", file=middle.stdin, flush=True)
            assert middle.stdout.readline() == "ended\n"
            assert cpu_of(middle.pid) >= before

"""What a broker has used of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

from sluice.bench.procfs import cpu_of

BURN = "import time\nwhile time.process_time() < 0.3: pass"
# Starts one below it, lets it end when told, and begins again.
WAIT = """
import subprocess, sys
for _ in range(20):
    below = subprocess.Popen(["sh", "-c", "i=0; while [ $i -lt 3000 ]; do i=$((i + 1)); done; echo; read word"],
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
    """This one does nothing meanwhile, so that whatever the other has lost at its end would show."""
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

"""Every message counts once through crashes: a few rounds here, many by scripts/spark-crash."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from tests.spark.crashes.crash_run import BROKER, DRIVER, WORKER, crash
from tests.spark.crashes.os_processes import Watch
from tests.support.external_programs import need_program


@pytest.mark.spark
@pytest.mark.own_java
@pytest.mark.timeout(420)
def test_every_message_is_once_in_queue_and_table_whatever_process_is_killed(
    tmp_path: Path,
) -> None:
    need_program("java")
    outcome = crash(tmp_path, [WORKER, BROKER, DRIVER], "local[2,3]", seed=1)
    assert outcome.faults() == []
    assert outcome.fed > 0


def test_hanging_crash_run_is_ended_with_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    ended = Event()
    watch = Watch(ended.set, 0.01)
    watch.start()
    assert ended.wait(30)
    watch.end()
    output = capfd.readouterr().out
    assert "nothing has moved" in output
    assert "test_hanging_crash_run_is_ended_with_its_stacks" in output

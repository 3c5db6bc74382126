"""Every message counts once, whoever is killed: a few rounds here, many by scripts/spark-crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services import need_program
from tests.spark.crash import BROKER, DRIVER, WORKER, crash


@pytest.mark.spark
@pytest.mark.timeout(420)
def test_every_message_is_once_in_the_queue_and_once_in_the_table_whoever_is_killed(tmp_path: Path) -> None:
    need_program("java")
    outcome = crash(tmp_path, [WORKER, BROKER, DRIVER], "local[2,3]", seed=1)
    assert outcome.faults() == []
    assert outcome.fed > 0

"""Runs all adversities in their short form; scripts/adversity runs the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversity.registry import ADVERSITIES, run_trial

PROMISES = {
    "full-disk": "full_disk_refuses_publishes_and_loses_nothing_confirmed",
    "read-only-disk": "read_only_disk_ends_the_broker_and_loses_nothing_confirmed",
    "unreadable-disk": "unreadable_disk_loses_no_message",
    "slow-disk": "slow_disk_delays_only_clients_that_need_it",
    "clock": "clock_jump_does_not_change_waiting_times",
    "churn": "vanished_clients_leave_nothing_behind",
    "connection-flood": "more_connections_than_descriptors_do_not_stop_the_log",
    "slow-consumers": "slow_consumers_cost_queue_depth_and_not_memory",
    "malformed": "malformed_packets_end_only_their_connection",
    "backlog": "backlog_needs_little_memory_and_is_recovered",
    "poison": "poisoned_messages_are_dead_lettered_and_others_delivered",
    "memory": "memory_limit_holds_or_loses_nothing_confirmed",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROMISES, ids=PROMISES.values())
async def test(name: str, tmp_path: Path) -> None:
    trial = await run_trial(name, tmp_path)
    assert trial.faults == []


def test_every_adversity_has_a_test() -> None:
    # kills: tests/adversity/crashes/test_queue_crash.py
    assert {*PROMISES, "kills"} == set(ADVERSITIES)

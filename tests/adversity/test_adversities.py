"""Everything bad that can happen to a broker, in its short form; scripts/adversity has the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversity.registry import ADVERSITIES, run_trial

PROMISES = {
    "full-disk": "what_cannot_be_kept_is_refused_and_a_disk_that_is_full_all_the_same_costs_nothing_confirmed",
    "read-only-disk": "a_disk_that_takes_no_writes_ends_the_broker_and_costs_nothing_confirmed",
    "unreadable-disk": "a_disk_that_cannot_be_read_costs_no_message",
    "slow-disk": "a_slow_disk_holds_up_those_who_need_it_and_nobody_else",
    "clock": "a_clock_that_jumps_changes_nothing_of_what_waits",
    "churn": "clients_that_come_and_vanish_leave_nothing_behind",
    "crowd": "more_connections_than_descriptors_do_not_stop_the_log",
    "slow-consumers": "consumers_that_do_not_read_cost_depth_and_not_memory",
    "malformed": "rubbish_ends_its_connection_and_nothing_else",
    "backlog": "a_backlog_costs_little_memory_and_comes_back_whole",
    "poison": "poisoned_messages_die_and_the_others_flow",
    "memory": "a_ceiling_on_memory_is_kept_or_costs_nothing_confirmed",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROMISES, ids=PROMISES.values())
async def test(name: str, tmp_path: Path) -> None:
    trial = await run_trial(name, tmp_path)
    assert trial.faults == []


def test_every_adversity_has_a_test() -> None:
    assert {*PROMISES, "kills"} == set(
        ADVERSITIES
    )  # kills: tests/adversity/crashes/test_queue_crash.py

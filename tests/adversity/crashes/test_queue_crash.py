"""`kill -9` of a real server under load. Many more rounds: `scripts/crash --rounds 50`."""

from __future__ import annotations

from pathlib import Path

from tests.adversity.crashes.queue_crash import Ledger, crash


async def test_nothing_confirmed_is_lost_or_done_twice_when_the_server_is_killed_under_load(
    tmp_path: Path,
) -> None:
    ledger = await crash(tmp_path, rounds=3, seconds=0.7, seed=3)
    assert ledger.faults == []
    assert len(ledger.confirmed) > 100
    assert ledger.plain_confirmed


def test_the_ledger_finds_what_was_lost() -> None:
    ledger = Ledger()
    ledger.confirmed = {"k/0", "k/1"}
    ledger.plain_confirmed = {"p/0"}
    ledger.deliver("k/0")
    ledger.judge_end()
    assert len(ledger.faults) == 2
    assert not ledger.is_drained()


def test_the_ledger_finds_what_was_delivered_after_it_was_done() -> None:
    ledger = Ledger()
    ledger.deliver("k/0")
    ledger.deliver("k/0")
    assert ledger.faults == []
    ledger.settled.add("k/0")
    ledger.deliver("k/0")
    assert len(ledger.faults) == 1


def test_the_ledger_finds_what_was_overtaken() -> None:
    ledger = Ledger()
    ledger.confirmed = {"k/0", "k/1", "j/0"}
    ledger.deliver("j/0")
    ledger.deliver("k/1")
    assert ledger.faults == ["k/1 overtook k/0"]

"""`kill -9` of a real server under load. Many more rounds: `scripts/crash --rounds 50`."""

from __future__ import annotations

from pathlib import Path

from tests.adversity.crashes.queue_crash import Ledger, crash


async def test_confirmed_messages_are_neither_lost_nor_done_twice_when_killed_under_load(
    tmp_path: Path,
) -> None:
    ledger = await crash(tmp_path, rounds=3, seconds=0.7, seed=3)
    assert ledger.faults == []
    assert len(ledger.confirmed) > 100
    assert ledger.plain_confirmed


def test_ledger_detects_lost_messages() -> None:
    ledger = Ledger()
    ledger.confirmed = {"k/0", "k/1"}
    ledger.plain_confirmed = {"p/0"}
    ledger.deliver("k/0")
    ledger.check_end()
    assert len(ledger.faults) == 2
    assert not ledger.is_drained()


def test_ledger_detects_deliveries_after_acknowledgement() -> None:
    ledger = Ledger()
    ledger.deliver("k/0")
    ledger.deliver("k/0")
    assert ledger.faults == []
    ledger.settled.add("k/0")
    ledger.deliver("k/0")
    assert len(ledger.faults) == 1


def test_ledger_detects_reordered_messages() -> None:
    ledger = Ledger()
    ledger.confirmed = {"k/0", "k/1", "j/0"}
    ledger.deliver("j/0")
    ledger.deliver("k/1")
    assert ledger.faults == ["k/1 overtook k/0"]

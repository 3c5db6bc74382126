"""`kill -9` again and again: the long form of tests/adversity/crashes/queue_crash.py."""

from __future__ import annotations

from tests.adversity.crashes.queue_crash import KILLED_STARTS, crash
from tests.adversity.kit import Trial


async def kills(trial: Trial) -> None:
    """Publishers, consumers that ack and nack, a persistent session, and random kills."""
    rounds = trial.size(3, 50)
    ledger = await crash(
        trial.folder, rounds=rounds, seconds=0.7, seed=trial.seed, killed_starts=KILLED_STARTS
    )
    trial.faults += ledger.faults
    trial.note(
        f"{rounds} kills under load: {len(ledger.confirmed):,} messages confirmed, "
        f"{len(ledger.settled):,} acks confirmed, {len(ledger.plain_confirmed):,} for a persistent "
        f"session; {ledger.redelivered:,} redelivered, none lost, none after its ack was "
        "confirmed, "
        "none before an earlier one of its key"
    )

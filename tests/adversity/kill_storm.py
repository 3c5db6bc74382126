"""`kill -9`, again and again: the storm of tests/adversity/crashes/queue_crash.py; test_crashes.py beside that is its short form."""

from __future__ import annotations

from tests.adversity.crashes.queue_crash import KILLED_STARTS, crash
from tests.adversity.kit import Trial


async def kills(trial: Trial) -> None:
    """Publishers with confirms, consumers that ack and nack, a lasting session, and kills at random moments."""
    rounds = trial.size(3, 50)
    ledger = await crash(
        trial.folder, rounds=rounds, seconds=0.7, seed=trial.seed, killed_starts=KILLED_STARTS
    )
    trial.faults += ledger.faults
    trial.note(
        f"{rounds} kills under load: {len(ledger.confirmed):,} messages confirmed, "
        f"{len(ledger.settled):,} acks answered, {len(ledger.plain_confirmed):,} for a lasting session; "
        f"{ledger.redelivered:,} delivered again, "
        f"none lost, none after its ack was answered, none before an earlier one of its key"
    )

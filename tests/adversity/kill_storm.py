"""`kill -9`, again and again: the storm of tests/adversity/crashes/queue_crash.py; test_crashes.py beside that is its short form."""

from __future__ import annotations

from tests.adversity.kit import Ground
from tests.adversity.crashes.queue_crash import KILLED_STARTS, crash


async def kills(ground: Ground) -> None:
    """Publishers with confirms, consumers that ack and nack, a lasting session, and kills at random moments."""
    rounds = ground.size(3, 50)
    ledger = await crash(
        ground.folder, rounds=rounds, seconds=0.7, seed=ground.seed, killed_starts=KILLED_STARTS
    )
    ground.faults += ledger.faults
    ground.note(
        f"{rounds} kills under load: {len(ledger.confirmed):,} messages confirmed, "
        f"{len(ledger.settled):,} acks answered, {len(ledger.plain_confirmed):,} for a lasting session; "
        f"{ledger.redelivered:,} delivered again, "
        f"none lost, none after its ack was answered, none before an earlier one of its key"
    )

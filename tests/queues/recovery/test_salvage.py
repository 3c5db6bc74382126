"""The engine after a salvage of a damaged store: the ledger balances, and work goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import StoreDamaged
from sluice.queues.model.queue_rules import STRICT
from tests.queues.kit import EmbeddedBackend, EngineUnderTest

KINDS: dict[str, dict[str, Any]] = {
    "work": {"partitions": 2},
    "retained": {"partitions": 2, "retention": 3600.0},
    "compacted": {"partitions": 2, "is_compacted": True, "message_ttl": 0.0},
    "ordered": {"ordering": STRICT},
}


class DamagedStore:
    """A broker with data in several segments, whose files a test damages while it is down."""

    def __init__(self, directory: Path, seed: int, settings: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        self.backend = EmbeddedBackend(directory, segment_bytes=12_000, snapshot_bytes=9_000)
        self.engine_under_test = EngineUnderTest(self.backend, **settings)
        self.sent = 0

    def work(self, steps: int) -> None:
        """Two groups publish, ack, fail, reject and keep some deliveries unsettled."""
        rng, under_test = self.rng, self.engine_under_test
        workers = [under_test.worker(group=name, prefetch=8) for name in ("one", "two")]
        for _ in range(steps):
            for _ in range(rng.randint(1, 6)):
                self.sent += 1
                under_test.publish(
                    b"%d" % self.sent * rng.randint(1, 90), key=b"key %d" % rng.randrange(40)
                )
            for worker in workers:
                for delivery in worker.lease_all():
                    number = rng.random()
                    if delivery.lease.state == 0 or number < 0.15:
                        continue  # left unsettled
                    if number < 0.75:
                        under_test.engine.settlement.ack(delivery.lease)
                    elif number < 0.95:
                        under_test.engine.settlement.nack(delivery.lease, -1.0, "failed")
                    else:
                        under_test.engine.settlement.dead_letter(
                            delivery.lease, "rejected", "", True
                        )
            if rng.random() < 0.2:
                workers[1].leave()
                workers[1] = under_test.worker(group="two", prefetch=8)
            under_test.advance(seconds=rng.choice((0.1, 5.0, 40.0)))
        under_test.verify()

    def logs(self) -> list[Path]:
        return sorted(self.backend.directory.glob("*.log"))

    def start(self, salvage: bool) -> None:
        self.backend.salvage = salvage
        self.engine_under_test.reopen()


def damage_files(damaged: DamagedStore, damage_kind: str) -> None:
    logs = damaged.logs()
    if damage_kind == "first segment lost":
        logs[0].unlink()
    elif damage_kind == "last segment lost":
        logs[-1].unlink()
    elif damage_kind == "some segment lost":
        damaged.rng.choice(logs).unlink()
    elif damage_kind == "half of a segment lost":
        victim = damaged.rng.choice(logs[:-1])
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    elif damage_kind == "bytes flipped":
        victim = damaged.rng.choice(logs)
        data = bytearray(victim.read_bytes())
        for _ in range(3):
            data[damaged.rng.randrange(len(data))] ^= 0x10
        victim.write_bytes(data)
    else:
        for snapshot in damaged.backend.directory.glob("*.state"):
            snapshot.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "damage_kind",
    [
        "first segment lost",
        "last segment lost",
        "some segment lost",
        "half of a segment lost",
        "bytes flipped",
        "snapshot lost",
    ],
)
def test_ledger_is_right_after_a_salvage(tmp_path: Path, damage_kind: str, kind: str) -> None:
    for seed in range(3):
        damaged = DamagedStore(tmp_path / str(seed), seed, KINDS[kind])
        damaged.work(25)
        while len(damaged.logs()) < 2:
            damaged.work(3)  # one segment is too little
        damaged.backend.crash()
        damage_files(damaged, damage_kind)
        try:
            damaged.start(salvage=False)
        except StoreDamaged:
            damaged.start(salvage=True)
        damaged.engine_under_test.verify()
        damaged.work(10)
        damaged.engine_under_test.crash_and_restart()
        damaged.engine_under_test.verify()
        for group in ("one", "two"):
            worker = damaged.engine_under_test.worker(group=group)
            damaged.engine_under_test.advance(hours=1)
            worker.ack_all()
        damaged.engine_under_test.verify()
        damaged.engine_under_test.commit_loop.close()

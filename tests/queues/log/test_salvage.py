"""The engine on a store that lost files and was opened with `salvage`: the books add up, and work
goes on."""

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
    "kept": {"partitions": 2, "retention": 3600.0},
    "compacted": {"partitions": 2, "is_compacted": True, "message_ttl": 0.0},
    "ordered": {"ordering": STRICT},
}


class DamagedStore:
    """A broker with a history in several segments, whose files a test damages while it is down."""

    def __init__(self, directory: Path, seed: int, settings: dict[str, Any]) -> None:
        self.draw = random.Random(seed)
        self.keeper = EmbeddedBackend(directory, segment_bytes=12_000, snapshot_bytes=9_000)
        self.engine_under_test = EngineUnderTest(self.keeper, **settings)
        self.sent = 0

    def work(self, steps: int) -> None:
        """Two groups publish, ack, fail, reject and leave things in hand."""
        draw, under_test = self.draw, self.engine_under_test
        workers = [under_test.worker(group=name, prefetch=8) for name in ("one", "two")]
        for _ in range(steps):
            for _ in range(draw.randint(1, 6)):
                self.sent += 1
                under_test.publish(
                    b"%d" % self.sent * draw.randint(1, 90), key=b"key %d" % draw.randrange(40)
                )
            for worker in workers:
                for delivery in worker.lease_all():
                    lot = draw.random()
                    if delivery.lease.state == 0 or lot < 0.15:
                        continue  # left in hand
                    if lot < 0.75:
                        under_test.engine.ack(delivery.lease)
                    elif lot < 0.95:
                        under_test.engine.nack(delivery.lease, -1.0, "failed")
                    else:
                        under_test.engine.dead_letter(delivery.lease, "rejected", "")
            if draw.random() < 0.2:
                workers[1].leave()
                workers[1] = under_test.worker(group="two", prefetch=8)
            under_test.advance(seconds=draw.choice((0.1, 5.0, 40.0)))
        under_test.verify()

    def logs(self) -> list[Path]:
        return sorted(self.keeper.directory.glob("*.log"))

    def start(self, salvage: bool) -> None:
        self.keeper.salvage = salvage
        self.engine_under_test.reopen()


def damage(worn: DamagedStore, harm: str) -> None:
    logs = worn.logs()
    if harm == "first segment lost":
        logs[0].unlink()
    elif harm == "last segment lost":
        logs[-1].unlink()
    elif harm == "some segment lost":
        worn.draw.choice(logs).unlink()
    elif harm == "half of a segment lost":
        victim = worn.draw.choice(logs[:-1])
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    elif harm == "bytes flipped":
        victim = worn.draw.choice(logs)
        data = bytearray(victim.read_bytes())
        for _ in range(3):
            data[worn.draw.randrange(len(data))] ^= 0x10
        victim.write_bytes(data)
    else:
        for snapshot in worn.keeper.directory.glob("*.state"):
            snapshot.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "harm",
    [
        "first segment lost",
        "last segment lost",
        "some segment lost",
        "half of a segment lost",
        "bytes flipped",
        "snapshot lost",
    ],
)
def test_ledger_is_right_after_a_salvage(tmp_path: Path, harm: str, kind: str) -> None:
    for seed in range(3):
        worn = DamagedStore(tmp_path / str(seed), seed, KINDS[kind])
        worn.work(25)
        while len(worn.logs()) < 2:
            worn.work(3)  # one segment says little
        worn.keeper.crash()
        damage(worn, harm)
        try:
            worn.start(salvage=False)
        except StoreDamaged:
            worn.start(salvage=True)
        worn.engine_under_test.verify()
        worn.work(10)
        worn.engine_under_test.crash_and_restart()
        worn.engine_under_test.verify()
        for group in ("one", "two"):
            worker = worn.engine_under_test.worker(group=group)
            worn.engine_under_test.advance(hours=1)
            worker.ack_all()
        worn.engine_under_test.verify()
        worn.engine_under_test.runner.close()

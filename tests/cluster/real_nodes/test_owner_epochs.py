"""Check that the owner epoch check detects violations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.log.write_plan import make_stamp
from sluice.store.redis.scripts import FORCE_ACQUIRE, WRITE
from tests.cluster.real_nodes.owner_epochs import OwnerEpochs, refused
from tests.support.redis_process import RedisProcess

KEYS = RedisKeys("epochs", "log:c1")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RedisProcess]:
    found = RedisProcess(tmp_path / "redis").start()
    yield found
    found.stop()


def take(client: redis.Redis, owner: str) -> int:
    answer = client.eval(FORCE_ACQUIRE.source, 2, KEYS.lease, KEYS.fence, owner, 60_000, "")
    return int(answer[0])


def write(client: redis.Redis, token: int, turn: int) -> None:
    dedup_id = make_stamp(token, turn)
    client.eval(
        WRITE.source,
        3,
        KEYS.fence,
        KEYS.log,
        "stream",
        token,
        dedup_id,
        "",
        5,
        "XADD",
        "stream",
        "*",
        "a",
        turn,
    )


def write_without_fence(client: redis.Redis, token: int, turn: int) -> None:
    """Change the same keys as a write, in one step, without checking the owner."""
    with client.pipeline(transaction=True) as commands:
        commands.xadd("stream", {"a": turn})
        commands.hset(KEYS.log, "stamp", make_stamp(token, turn))
        commands.execute()


def test_successive_owners_are_no_fault_and_late_writes_are_refused(
    process: RedisProcess,
) -> None:
    client = process.client()
    first = take(client, "first")
    write(client, first, 1)
    second = take(client, "second")
    with pytest.raises(redis.ResponseError, match="FENCED"):
        write(client, first, 2)
    write(client, second, 1)
    found = OwnerEpochs().read(process.directory)
    assert (found.faults, found.writes, found.taken[KEYS.log.encode()]) == ([], 2, 2)
    assert refused(client) == 1
    client.close()


@pytest.mark.parametrize("has_written", [False, True])
def test_write_of_a_former_owner_after_a_new_one_is_found(
    process: RedisProcess, has_written: bool
) -> None:
    """As if the fence did not hold, whether or not the new owner has written yet."""
    client = process.client()
    first = take(client, "first")
    second = take(client, "second")
    if has_written:
        write(client, second, 1)
    write_without_fence(client, first, 2)
    assert OwnerEpochs().read(process.directory).faults == [
        "epochs:{log:c1}: epoch 1 wrote when 2 was the owner's"
    ]
    client.close()


def test_write_without_an_epoch_is_found(process: RedisProcess) -> None:
    client = process.client()
    client.xadd("stream", {"a": 1})
    assert OwnerEpochs().read(process.directory).faults == ["stream was written to without a stamp"]
    client.close()

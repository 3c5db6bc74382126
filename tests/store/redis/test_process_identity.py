"""Tests of the proof that the process of a lease has ended, and of takeovers that rest on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.errors import StoreLocked
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.ownership import ProcessIdentity, read_owner
from tests.store.kit import StoreUnderTest, message
from tests.support.redis_process import RedisProcess

HERE = ProcessIdentity.of_this_process()
NEVER = 3600.0

pytestmark = pytest.mark.skipif(not HERE.start, reason="this system does not describe processes")

PRINT_IDENTITY = """
import sys
from sluice.store.redis.ownership import ProcessIdentity
print(ProcessIdentity.of_this_process(), flush=True)
sys.stdin.read()
"""


class Owner:
    """A process that prints its identity and waits."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRINT_IDENTITY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        self.text = self.process.stdout.readline().decode().strip()
        found = ProcessIdentity.parse(self.text)
        assert found is not None
        self.identity = found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.kill()
    for stream in (made.process.stdin, made.process.stdout):
        assert stream is not None
        stream.close()


@pytest.fixture
def ended(owner: Owner) -> Owner:
    owner.kill()
    return owner


def changed(identity: ProcessIdentity, field: str, value: str) -> ProcessIdentity:
    return replace(identity, **{field: value})  # type: ignore[arg-type]


def test_text_of_an_identity_names_the_same_process() -> None:
    assert ProcessIdentity.parse(str(HERE)) == HERE
    assert str(HERE).startswith(f"{HERE.host}:{os.getpid()}:")
    assert HERE.name == f"{HERE.host}:{os.getpid()}:{HERE.nonce}"


@pytest.mark.parametrize("text", ["", "gone", "host:pid:n/a/b/c/d", "host:1:n/a", "::"])
def test_other_owners_are_no_identity(text: str) -> None:
    assert ProcessIdentity.parse(text) is None


def test_live_process_has_not_ended(owner: Owner) -> None:
    assert not owner.identity.has_provably_ended(HERE)
    assert not HERE.has_provably_ended(HERE)


def test_killed_process_has_ended(ended: Owner) -> None:
    assert ended.identity.has_provably_ended(HERE)


def test_pid_of_a_later_process_proves_the_end_of_the_former(owner: Owner) -> None:
    assert replace(owner.identity, start="1").has_provably_ended(HERE)


def test_zombie_has_ended(owner: Owner) -> None:
    owner.process.kill()
    deadline = time.monotonic() + 10
    state = Path(f"/proc/{owner.process.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert owner.identity.has_provably_ended(HERE)


@pytest.mark.parametrize("field", ["host", "machine", "boot", "namespace"])
def test_process_of_another_place_is_never_proven_to_have_ended(ended: Owner, field: str) -> None:
    assert not changed(ended.identity, field, "other").has_provably_ended(HERE)
    assert not ended.identity.has_provably_ended(changed(HERE, field, "other"))


@pytest.mark.parametrize("field", ["boot", "namespace", "start"])
def test_unknown_fact_proves_nothing(ended: Owner, field: str) -> None:
    unknown = changed(ended.identity, field, "")
    assert not unknown.has_provably_ended(changed(HERE, field, ""))


def test_identity_of_an_earlier_version_proves_nothing(ended: Owner) -> None:
    before = ProcessIdentity.parse(ended.identity.name)
    assert before is not None and not before.has_provably_ended(HERE)


def open_store(redis_server: RedisProcess, prefix: str, lease_seconds: float) -> StoreUnderTest:
    options = RedisOptions(prefix=prefix, lease_seconds=lease_seconds, renew_seconds=NEVER)
    return StoreUnderTest(None, redis=redis_server.url, options=options).open()


def test_store_of_a_killed_process_is_taken_at_once_and_fenced(
    redis_server: RedisProcess, tmp_path: Path, ended: Owner
) -> None:
    keys = RedisKeys(tmp_path.name)
    client = redis_server.client()
    client.set(keys.lease, ended.text, px=3_600_000)
    client.set(keys.fence, 7)
    assert read_owner(redis_server.url, tmp_path.name, 5.0) == "", "a standby may take it too"
    store = open_store(redis_server, tmp_path.name, NEVER)
    assert int(client.get(keys.fence) or 0) == 8
    store.commit(message(1))
    store.store.close()
    client.close()


def test_store_of_a_live_process_is_not_taken(
    redis_server: RedisProcess, tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RedisKeys(tmp_path.name)
    client = redis_server.client()
    client.set(keys.lease, owner.text, px=5000)
    assert read_owner(redis_server.url, tmp_path.name, 5.0) == owner.identity.name

    def renew_meanwhile(seconds: float) -> None:
        client.set(keys.lease, owner.text, px=60_000)

    monkeypatch.setattr(time, "sleep", renew_meanwhile)
    with pytest.raises(StoreLocked, match=owner.identity.name):
        open_store(redis_server, tmp_path.name, NEVER)
    client.close()

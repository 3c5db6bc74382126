"""Tests of a failing Redis: nothing is lost or stored twice, and the store recovers by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from sluice.errors import StoreError
from sluice.store.redis.options import RedisOptions
from tests.store.kit import StoreUnderTest, message, note
from tests.support.redis_process import RedisProcess


class Failing:
    """A Redis of the test, and a store in it with short timeouts."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisProcess(folder / "redis").start()
        self.stalls: list[str] = []
        self.store = StoreUnderTest(
            None,
            redis=self.server.url,
            options=RedisOptions(
                answer_seconds=0.3, wait_seconds=0.1, renew_seconds=0.1, lease_seconds=60.0
            ),
            on_stall=self.stalls.append,
        ).open()
        self._answers: list[int] = []

    def start_commit(self, seq: int) -> list[int]:
        return self.store.start_commit(
            message(seq, b"%d" % seq),
            note(seq, b"n%d" % seq),
            done=lambda: self._answers.append(seq),
        )

    def wait_for_stall(self) -> str:
        self.store.loop.turn_until(lambda: bool(self.stalls))
        assert not self._answers, "the commit does not complete"
        return self.stalls[0]

    def wait_for_answers(self, *seqs: int) -> None:
        self.store.loop.turn_until(lambda: self._answers == list(seqs) or bool(self.store.failures))
        assert not self.store.failures, self.store.failures

    def check(self, *seqs: int) -> None:
        self.store.loop.turn_until(lambda: not self.stalls or self.stalls[-1] == "")
        records = self.store.reopen().loaded.records
        assert [(record.seq, record.body) for record in records[1:]] == [
            (seq, body) for seq in seqs for body in (b"%d" % seq, b"n%d" % seq)
        ]


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Failing]:
    made = Failing(tmp_path)
    made.store.commit(message(0, b"before"))
    yield made
    made.server.start() if made.server.is_dead() else made.server.resume()
    made.store.store.close()
    made.server.stop()


def test_killed_and_restarted_redis_has_everything_once(failing: Failing) -> None:
    failing.server.kill()
    failing.start_commit(1)
    failing.wait_for_stall()
    failing.start_commit(2)
    failing.server.start()
    failing.wait_for_answers(1, 2)
    failing.check(1, 2)


def test_hanging_redis_is_waited_for(failing: Failing) -> None:
    failing.server.pause()
    failing.start_commit(1)
    assert failing.wait_for_stall()
    failing.server.resume()
    failing.wait_for_answers(1)
    failing.check(1)


def test_redis_without_memory_refuses_whole_frames_until_it_has_some(failing: Failing) -> None:
    client = failing.server.client()
    client.config_set("maxmemory", 1)
    failing.start_commit(1)
    assert "maxmemory" in failing.wait_for_stall()
    assert client.hget("sluice:{log}", "frame") == b"1"
    assert client.xlen("sluice:{1}:1") == 1
    client.config_set("maxmemory", 0)
    failing.wait_for_answers(1)
    failing.check(1)


def test_redis_that_became_a_replica_is_waited_for(failing: Failing) -> None:
    client = failing.server.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    failing.start_commit(1)
    assert "read only" in failing.wait_for_stall()
    client.execute_command("REPLICAOF", "NO", "ONE")
    failing.wait_for_answers(1)
    failing.check(1)


def test_replica_is_not_opened(failing: Failing) -> None:
    failing.store.store.close()
    failing.server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreError, match="read only"):
        failing.store.open()
    failing.server.client().execute_command("REPLICAOF", "NO", "ONE")
    failing.store.open()


def test_messages_are_read_when_redis_is_back(failing: Failing) -> None:
    address = failing.store.commit(message(1, b"kept"))
    failing.server.kill()
    answers: list[list[bytes | None]] = []
    failing.store.store.read(address, answers.append)
    failing.server.start()
    failing.store.loop.turn_until(lambda: bool(answers))
    assert answers[0][0] is not None


def test_redis_password_is_sent(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path / "redis", requirepass="hunter2")
    server.url = f"redis://:hunter2@127.0.0.1:{server.port}"
    server.start()
    try:
        with pytest.raises(StoreError, match="uthentication"):
            StoreUnderTest(None, redis=f"redis://127.0.0.1:{server.port}").open()
        store = StoreUnderTest(None, redis=server.url).open()
        store.commit(message(1))
        store.store.close()
    finally:
        server.stop()


def test_redis_connection_uses_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    server = RedisProcess(
        tmp_path / "redis",
        tls_cert_file=str(tmp_path / "cert.pem"),
        tls_key_file=str(tmp_path / "key.pem"),
        tls_ca_cert_file=str(tmp_path / "ca.pem"),
        tls_auth_clients="no",
    )
    server.speak_tls(tmp_path / "ca.pem")
    server.start()
    try:
        store = StoreUnderTest(None, redis=server.url).open()
        address = store.commit(message(1, b"secret"))
        assert store.bodies(address) == [b"secret"]
        store.store.close()
    finally:
        server.stop()

"""A broker that wants to know who is there, behind TLS: what the command line needs, and what it says without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.support.broker_process import Broker
from tests.cli.shell import Inside

PASSWORD = "correct horse battery staple"


class Guarded(Inside):
    """Commands for it, with what a user has been given."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        super().__init__(broker)
        self.folder = folder
        self.environ |= {
            "SLUICE_URL": f"https://{broker.facts['http']}",
            "SLUICE_MQTT": f"mqtts://mary:{PASSWORD.replace(' ', '%20')}@{broker.facts['mqtts']}",
            "SLUICE_CA": str(folder / "ca.pem"),
        }


@pytest.fixture
def sluice(guarded: Broker) -> Guarded:
    return Guarded(guarded, guarded.folder)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = Inside.__new__(Inside)
    files.environ = {}
    for role in ("viewer", "admin"):
        made = files.run("token", "add", f"a-{role}", "--role", role, "--file", str(folder / "tokens.toml"))
        (folder / role).write_text(made.stdout.split()[-1])
    added = files.run(
        "user",
        "add",
        "mary",
        "--password-stdin",
        "--file",
        str(folder / "users.toml"),
        stdin=PASSWORD + "\n",
    )
    assert added.code == 0, added.stderr
    config = f"""
[tls]
cert = "{folder / "cert.pem"}"
key = "{folder / "key.pem"}"
http = true
[auth]
users = "{folder / "users.toml"}"
tokens = "{folder / "tokens.toml"}"
"""
    broker = Broker(folder, config, ["--mqtts", "127.0.0.1:0"], {})
    yield broker
    broker.stop()


def test_a_token_opens_the_door_as_far_as_its_role_goes(sluice: Guarded) -> None:
    nobody = sluice.run("queue", "list")
    assert nobody.code == 1
    assert "SLUICE_TOKEN" in nobody.stderr
    wrong = sluice.run("queue", "list", "--token", "nonsense")
    assert wrong.code == 1
    assert "nonsense" not in wrong.stderr

    sluice.environ["SLUICE_TOKEN_FILE"] = str(sluice.folder / "viewer")
    assert sluice.run("queue", "list").code == 0
    refused = sluice.run("queue", "create", "jobs")
    assert (refused.code, refused.stdout) == (1, "")
    assert "a-viewer may not create queues" in refused.stderr

    sluice.environ["SLUICE_TOKEN_FILE"] = str(sluice.folder / "admin")
    assert sluice.run("queue", "create", "jobs").code == 0
    assert sluice.run("top", "--once").code == 0


def test_a_certificate_is_trusted_by_its_authority_alone(sluice: Guarded) -> None:
    sluice.environ["SLUICE_TOKEN_FILE"] = str(sluice.folder / "admin")
    assert sluice.run("queue", "list").code == 0
    other = sluice.folder / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    ran = sluice.run("queue", "list", "--ca", str(other))
    assert ran.code == 4
    assert "certificate" in ran.stderr and "--ca" in ran.stderr
    assert sluice.run("consume", "jobs", "-g", "g", "--ca", str(other)).code == 4
    (sluice.folder / "empty.pem").write_text("")
    assert sluice.run("queue", "list", "--ca", str(sluice.folder / "empty.pem")).code == 2


def test_messages_move_with_a_name_and_a_password(sluice: Guarded) -> None:
    assert sluice.run("publish", "jobs", "hello").code == 0
    assert sluice.run("consume", "jobs", "-g", "g", "--count", "1").stdout == "hello\n"
    sluice.environ["SLUICE_MQTT"] = sluice.environ["SLUICE_MQTT"].replace("correct", "wrong")
    for command in (["publish", "jobs", "x"], ["consume", "jobs", "-g", "g"]):
        ran = sluice.run(*command)
        assert (ran.code, ran.stdout) == (1, "")
        assert "horse" not in ran.stderr
        assert ran.stderr.startswith("sluice: ")
        assert "SLUICE_MQTT=mqtt://USER:PASSWORD@HOST:PORT" in ran.stderr


def test_plain_http_to_a_tls_door_is_not_reachable(sluice: Guarded) -> None:
    ran = sluice.run("queue", "list", "--url", sluice.environ["SLUICE_URL"].replace("https", "http"))
    assert ran.code == 4

"""A broker with authentication and TLS: what the command line needs, and its errors without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.cli.shell import InProcessShell
from tests.support.broker_process import Broker

PASSWORD = "correct horse battery staple"


class SecuredShell(InProcessShell):
    """Commands for this broker, with a user's credentials."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        super().__init__(broker)
        self.folder = folder
        self.environ |= {
            "SLUICE_URL": f"https://{broker.facts['http']}",
            "SLUICE_MQTT": f"mqtts://mary:{PASSWORD.replace(' ', '%20')}@{broker.facts['mqtts']}",
            "SLUICE_CA": str(folder / "ca.pem"),
        }


@pytest.fixture
def sluice(secured_broker: Broker) -> SecuredShell:
    return SecuredShell(secured_broker, secured_broker.folder)


@pytest.fixture(scope="module")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = InProcessShell.__new__(InProcessShell)
    files.environ = {}
    for role in ("viewer", "admin"):
        made = files.run(
            "token", "add", f"a-{role}", "--role", role, "--file", str(folder / "tokens.toml")
        )
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


def test_token_permits_what_its_role_permits(sluice: SecuredShell) -> None:
    anonymous = sluice.run("queue", "list")
    assert anonymous.code == 1
    assert "SLUICE_TOKEN" in anonymous.stderr
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


def test_certificate_is_trusted_by_its_authority_only(sluice: SecuredShell) -> None:
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


def test_messages_are_published_and_consumed_with_user_and_password(sluice: SecuredShell) -> None:
    assert sluice.run("publish", "jobs", "hello").code == 0
    assert sluice.run("consume", "jobs", "-g", "g", "--count", "1").stdout == "hello\n"
    sluice.environ["SLUICE_MQTT"] = sluice.environ["SLUICE_MQTT"].replace("correct", "wrong")
    for command in (["publish", "jobs", "x"], ["consume", "jobs", "-g", "g"]):
        ran = sluice.run(*command)
        assert (ran.code, ran.stdout) == (1, "")
        assert "horse" not in ran.stderr
        assert ran.stderr.startswith("sluice: ")
        assert "SLUICE_MQTT=mqtt://USER:PASSWORD@HOST:PORT" in ran.stderr


def test_plain_http_to_a_tls_port_is_unreachable(sluice: SecuredShell) -> None:
    ran = sluice.run(
        "queue", "list", "--url", sluice.environ["SLUICE_URL"].replace("https", "http")
    )
    assert ran.code == 4

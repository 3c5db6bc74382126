"""Certificates, and one broker with every listener and every kind of credential."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.access.api_tokens import make_token, write_tokens
from sluice.access.identity import Role
from tests.access.kit import SECRET, make_user, rules_file, users_file
from tests.conformance.conftest import Certificates, certificates, tls_config
from tests.support.broker_process import Broker

__all__ = ["certificates"]

RULES = """
[[rule]]
deny = ["connect"]
users = ["outcast"]

[[rule]]
allow = ["connect"]

[[rule]]
allow = ["publish", "subscribe"]
topics = ["open/#", "own/%u/#"]
"""


class SecuredBroker(Broker):
    """A broker that requires authentication. `tokens` are texts by role."""

    tokens: dict[str, str]


def credentials(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the configuration, and the tokens by role; write the files."""
    users = users_file(
        folder,
        make_user("ann", role=Role.ADMIN),
        make_user("bob", role=Role.VIEWER),
        make_user("plain"),
        make_user("outcast"),
        make_user("off", disabled=True),
    )
    made = {role.label: make_token(role.label, role, None) for role in Role}
    tokens = folder / "tokens.toml"
    write_tokens(tokens, {name: token for name, (token, _) in made.items()})
    secret = folder / "jwt.secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    rules = rules_file(folder, RULES)
    config = (
        f'[auth]\nusers = "{users}"\ntokens = "{tokens}"\nrules = "{rules}"\n'
        f'[auth.jwt]\nsecret_file = "{secret}"\nissuer = "us"\naudience = "sluice"\n'
        'client_claim = "client"\n'
    )
    return config, {name: text for name, (_, text) in made.items()}


@pytest.fixture(scope="session")
def secured_broker(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[SecuredBroker]:
    config, tokens = credentials(tmp_path_factory.mktemp("credentials"))
    running = SecuredBroker(
        tmp_path_factory.mktemp("broker"),
        config + tls_config(certificates),
        ["--log-level", "debug"],
        {},
    )
    running.tokens = tokens
    yield running
    running.stop()
    assert "Traceback" not in running.log_text()


@pytest.fixture(params=["mqtt", "mqtts", "ws", "wss"])
def listener(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5.0"])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number

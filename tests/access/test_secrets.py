"""No secret appears in the log, the ready line or an error, at the most verbose level."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.access.conftest import credentials
from tests.access.kit import PASSWORD, SECRET, make_user, token_of, users_file
from tests.access.mqtt_probe import SECONDS, probe
from tests.support.broker_process import StartBroker, same_build

WRONG = "a-wrong-password-of-a-client"


@pytest.mark.parametrize("form", ["text", "json"])
def test_refused_login_does_not_reveal_which_part_was_wrong(
    start_broker: StartBroker, tmp_path: Path, form: str
) -> None:
    config, tokens = credentials(tmp_path)
    broker = start_broker(config, ["--log-level", "debug", "--log-format", form])
    good = token_of(sub="eve", iss="us", aud="sluice", role="viewer")
    bad = token_of("another secret that is as long as it must be", sub="eve")
    for version in (4, 5):
        for username, password in (
            ("plain", PASSWORD),
            ("plain", WRONG),
            (WRONG, WRONG),
            ("outcast", PASSWORD),
            ("eve", good),
            ("eve", bad),
        ):
            with probe(broker, "mqtt", version, username, password) as client:
                if client.reason == 0:
                    client.client.publish("closed/x", WRONG.encode(), 0)
                    client.subscribe("closed/#")
    with httpx.Client(base_url=f"http://{broker.address('http')}/api/v1", timeout=30) as web:
        for header in (
            f"Bearer {tokens['viewer']}",
            f"Bearer {good}",
            f"Bearer {bad}",
            f"Bearer slu_{WRONG}",
        ):
            web.get("/queues", headers={"Authorization": header})
            web.post("/queues", headers={"Authorization": header}, json={"name": "q"})
        web.get("/queues", auth=("ann", PASSWORD))
        web.get("/queues", auth=("ann", WRONG))
        web.get(f"/queues?token={WRONG}")
    users = (tmp_path / "users.toml").read_text()
    (tmp_path / "users.toml").write_text(users.replace("$argon2id$", "$broken$"))
    with probe(broker, "mqtt", 5, "plain", WRONG):
        pass
    broker.stop()
    output = broker.log_text() + broker.ready_line
    hashes = [line.split('"')[1] for line in users.splitlines() if line.startswith("password")]
    for secret in (
        PASSWORD,
        WRONG,
        SECRET,
        good,
        bad,
        *tokens.values(),
        *hashes,
        good.rpartition(".")[2],
    ):
        assert secret not in output, secret[:12]
    assert "connect refused" in output


def test_store_password_is_not_leaked(tmp_path: Path) -> None:
    url = "redis://:hunter2-of-redis@127.0.0.1:1/0"
    command = [
        sys.executable,
        "-m",
        "sluice",
        "serve",
        "--store",
        url,
        "--mqtt",
        "127.0.0.1:0",
        "--log-level",
        "debug",
    ]
    for flags in (["--http", "127.0.0.1:0", "--grpc", "off"], ["--http", "nonsense"]):
        done = subprocess.run(
            [*command, *flags],
            cwd=tmp_path,
            env=same_build(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode != 0
        assert "hunter2" not in done.stdout + done.stderr


def test_configuration_error_does_not_repeat_secrets(tmp_path: Path) -> None:
    path = users_file(tmp_path, make_user("ann"))
    path.write_text(path.read_text().replace("$argon2id$", "hunter2$"))
    (tmp_path / "short").write_text("hunter2")
    for text in (
        f'[auth]\nusers = "{path}"',
        '[auth.jwt]\nsecret_file = "short"',
        '[auth]\npassword = "hunter2"',
    ):
        (tmp_path / "sluice.toml").write_text(text)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sluice",
                "serve",
                "--store",
                "memory",
                "--config",
                "sluice.toml",
            ],
            cwd=tmp_path,
            env=same_build(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 2, text
        assert "hunter2" not in done.stdout + done.stderr, text

"""Every refusal, on every listener of a running broker, seen by real clients."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from sluice.units import Address
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connect
from tests.access.conftest import SecuredBroker, credentials
from tests.access.kit import PASSWORD, make_user, token_of, touch_in_future, users_file
from tests.access.mqtt_probe import SECONDS, probe
from tests.conformance.conftest import Certificates, tls_config
from tests.support.broker_process import StartBroker, same_build

WRONG, NOT_ALLOWED = 0x86, 0x87


def jwt_for(**claims: Any) -> str:
    return token_of(**{"iss": "us", "aud": "sluice", **claims})


# ---- MQTT


@pytest.mark.parametrize(
    ("cipher", "taken"),
    [
        ("ECDHE-ECDSA-AES128-SHA256:ECDHE-ECDSA-AES256-SHA384", False),  # CBC
        ("AES128-GCM-SHA256", False),  # no forward secrecy
        ("ECDHE+AESGCM", True),
        ("ECDHE+CHACHA20", True),
    ],
)
def test_tls_1_2_has_forward_secrecy_and_no_cbc(
    secured_broker: SecuredBroker, certificates: Certificates, cipher: str, taken: bool
) -> None:
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(cipher)
    address = secured_broker.address("mqtts")
    with socket.create_connection((address.host, address.port), SECONDS) as connection:
        if taken:
            context.wrap_socket(connection, server_hostname="localhost").close()
        else:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_hostname="localhost")


def handshake(address: Address, origin: str) -> int:
    """Request a WebSocket as a browser does for a page of `origin`; return the status."""
    lines = [
        "GET /mqtt HTTP/1.1",
        f"Host: {address}",
        f"Origin: {origin}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: mqtt",
    ]
    with socket.create_connection((address.host, address.port), SECONDS) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.recv(4096).split()[1])


def test_web_page_of_another_site_is_not_anonymous_administrator(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    flags = ["--store", "memory", "--http", "off", "--grpc", "off", "--ws", "127.0.0.1:0"]
    address = start_broker(flags=flags).address("ws")
    assert handshake(address, "https://evil.example") == 403
    assert handshake(address, "http://localhost:3000") == 101
    named = start_broker('[mqtt]\nws_origins = ["https://app.example"]\n', flags).address("ws")
    assert handshake(named, "https://app.example") == 101
    users = users_file(tmp_path, make_user("ann"))
    closed = start_broker(f'[auth]\nusers = "{users}"\n', flags).address("ws")
    assert handshake(closed, "https://evil.example") == 101  # the page has no user's password


def test_password_is_accepted_on_every_mqtt_listener(
    secured_broker: SecuredBroker, certificates: Certificates, listener: str, version: int
) -> None:
    context = certificates.client_context()
    with probe(
        secured_broker, listener, version, "plain", PASSWORD, f"p-{listener}-{version}", context
    ) as client:
        assert client.reason == 0
        assert client.publish("own/plain/x") in (0, 0x10)
        assert client.subscribe("own/plain/#") == 1


@pytest.mark.parametrize(
    ("username", "password", "reason"),
    [
        ("plain", "wrong password", WRONG),
        ("unknown", PASSWORD, WRONG),
        ("off", PASSWORD, WRONG),
        ("plain", None, WRONG),
        ("outcast", PASSWORD, NOT_ALLOWED),
        (None, None, NOT_ALLOWED),
    ],
)
def test_unknown_client_is_refused_on_every_mqtt_listener(
    secured_broker: SecuredBroker,
    certificates: Certificates,
    listener: str,
    version: int,
    username: str | None,
    password: str | None,
    reason: int,
) -> None:
    with probe(
        secured_broker, listener, version, username, password, "", certificates.client_context()
    ) as client:
        assert client.reason == reason


def test_forbidden_action_is_refused_on_every_mqtt_listener(
    secured_broker: SecuredBroker, certificates: Certificates, listener: str
) -> None:
    context = certificates.client_context()
    with probe(secured_broker, listener, 5, "plain", PASSWORD, f"n-{listener}", context) as client:
        assert client.publish("own/ann/x") == NOT_ALLOWED
        assert client.subscribe("own/#") == NOT_ALLOWED
        assert client.subscribe("$SYS/#") == NOT_ALLOWED
        assert client.publish("$queue/q") == NOT_ALLOWED
        assert client.publish("$admin/queue/create", b'{"name": "q"}') == NOT_ALLOWED
    with probe(secured_broker, listener, 4, "plain", PASSWORD, f"n-{listener}", context) as client:
        assert client.subscribe("own/#") == 0x80
        client.client.publish("own/ann/x", b"", 1)
        client.lost.get(timeout=SECONDS)  # 3.1.1 has no reason code for it


def test_jwt_is_accepted_as_password(secured_broker: SecuredBroker, version: int) -> None:
    with probe(secured_broker, "mqtt", version, "eve", jwt_for(sub="eve"), "j1") as client:
        assert client.reason == 0
        assert client.subscribe("own/eve/#") == 1
    with probe(secured_broker, "mqtt", version, "", jwt_for(sub="eve"), "j2") as client:
        assert client.reason == 0


@pytest.mark.parametrize(
    "token",
    [
        jwt_for(sub="eve", exp=1),
        jwt_for(sub="eve", iss="them"),
        jwt_for(sub="eve", aud="another"),
        jwt_for(sub="mallory"),
        jwt_for(),
        token_of("another secret that is as long as it must be", sub="eve", iss="us", aud="sluice"),
        jwt_for(sub="eve")[:-4] + "AAAA",
    ],
    ids=["expired", "issuer", "audience", "another user", "no user", "another signer", "broken"],
)
def test_invalid_jwt_is_refused(secured_broker: SecuredBroker, token: str, version: int) -> None:
    with probe(secured_broker, "mqtt", version, "eve", token) as client:
        assert client.reason == WRONG
    answer = httpx.get(
        f"http://{secured_broker.address('http')}/api/v1/whoami",
        headers={"Authorization": f"Bearer {token}"},
        timeout=SECONDS,
    )
    assert answer.status_code == 401


def test_jwt_for_one_client_id_is_refused_for_another(secured_broker: SecuredBroker) -> None:
    token = jwt_for(sub="eve", client="mine")
    with probe(secured_broker, "mqtt", 5, "eve", token, "mine") as client:
        assert client.reason == 0
    with probe(secured_broker, "mqtt", 5, "eve", token, "yours") as client:
        assert client.reason == 0x85


def test_connection_ends_when_its_jwt_expires(start_broker: StartBroker, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that is known to both sides of it")
    broker = start_broker(f'[auth.jwt]\nsecret_file = "{secret}"\nleeway = "0s"\n')
    with probe(broker, "mqtt", 5, "eve", token_of(sub="eve", exp=time.time() + 2), "c") as client:
        assert client.reason == 0
        assert client.lost.get(timeout=SECONDS) == NOT_ALLOWED


# ---- certificates


@pytest.mark.parametrize("kind", ["cn", "san"])
def test_client_certificate_names_its_user(
    start_broker: StartBroker, certificates: Certificates, tmp_path: Path, kind: str
) -> None:
    authority = trustme.CA()
    (tmp_path / "clients.pem").write_bytes(authority.cert_pem.bytes())
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nallow = "connect"\n'
        '[[rule]]\nallow = ["publish", "subscribe"]\ntopics = ["own/%u/#"]\n'
    )
    users = users_file(tmp_path, make_user("banned.example", disabled=True))
    config = tls_config(certificates) + f'client_ca = "{tmp_path / "clients.pem"}"\n'
    broker = start_broker(
        f'[auth]\ncertificate_user = "{kind}"\nrules = "{rules}"\nusers = "{users}"\n' + config
    )

    def context(name: str, signer: trustme.CA = authority) -> ssl.SSLContext:
        made = certificates.client_context()
        issued = signer.issue_cert(name, common_name=name)
        issued.configure_cert(made)
        return made

    for listener in ("mqtts", "wss"):
        with probe(broker, listener, 5, None, None, "c", context("device-1.example")) as client:
            assert client.reason == 0
            assert client.subscribe("own/device-1.example/#") == 1
            assert client.subscribe("own/device-2.example/#") == NOT_ALLOWED
        with probe(
            broker, listener, 5, "root", "guess", "c", context("device-1.example")
        ) as client:
            # The certificate decides about the user.
            assert client.subscribe("own/root/#") == NOT_ALLOWED
        with probe(broker, listener, 5, None, None, "d", context("banned.example")) as client:
            assert client.reason == NOT_ALLOWED
    # A listener without TLS has no certificate, and so no user name.
    with probe(broker, "mqtt", 5, None, None, "c") as client:
        assert client.reason == NOT_ALLOWED
    for unknown in (context("device-1.example", trustme.CA()), certificates.client_context()):
        assert not _greets(broker.mqtts, unknown)
    assert _greets(broker.mqtts, context("device-1.example"))


def _greets(address: Address, context: ssl.SSLContext) -> bool:
    """Return whether a CONNECT is answered.

    TLS 1.3 reports a rejected certificate only on the first read.
    """
    with suppress(OSError), socket.create_connection((address.host, address.port)) as plain:
        plain.settimeout(SECONDS)
        with context.wrap_socket(plain, server_hostname=address.host) as connection:
            connection.sendall(encode(Connect("greeter", V5, True, 0), V5))
            return bool(connection.recv(1))
    return False


# ---- REST and gRPC


def test_rest_requires_authentication(secured_broker: SecuredBroker) -> None:
    with httpx.Client(base_url=f"http://{secured_broker.address('http')}", timeout=30) as web:
        for headers in (
            {},
            {"Authorization": "Bearer slu_wrong"},
            {"Authorization": "Basic !!!"},
            {"Authorization": "Digest x"},
        ):
            answer = web.get("/api/v1/queues", headers=headers)
            assert answer.status_code == 401 and answer.json()["do"], headers
        # This user has no role.
        assert web.get("/api/v1/queues", auth=("plain", PASSWORD)).status_code == 401
        assert web.get("/api/v1/queues", auth=("off", PASSWORD)).status_code == 401
        assert web.get("/api/v1/queues", auth=("ann", "wrong password")).status_code == 401
        assert web.get("/api/v1/whoami", auth=("ann", PASSWORD)).json()["role"] in (
            "admin",
            "ADMIN",
            3,
        )
        bearer = {"Authorization": f"Bearer {jwt_for(sub='eve', role='viewer')}"}
        assert web.get("/api/v1/queues", headers=bearer).status_code == 200
        no_role = {"Authorization": f"Bearer {jwt_for(sub='eve', role='emperor')}"}
        assert web.get("/api/v1/queues", headers=no_role).status_code == 401


def test_rest_enforces_roles(secured_broker: SecuredBroker) -> None:
    def web(role: str) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://{secured_broker.address('http')}/api/v1",
            headers={"Authorization": f"Bearer {secured_broker.tokens[role]}"},
            timeout=SECONDS,
        )

    with web("viewer") as viewer, web("operator") as operator, web("admin") as admin:
        for refused in (viewer, operator):
            assert refused.post("/queues", json={"name": "r/q"}).status_code == 403
        assert admin.post("/queues", json={"name": "r/q"}).status_code == 201
        assert viewer.get("/queues").status_code == 200
        assert viewer.post("/queues/r$q/messages", json={"payload": "x"}).status_code == 403
        assert operator.post("/queues/r$q/messages", json={"payload": "x"}).status_code == 201
        assert viewer.post("/queues/r$q/purge").status_code == 403
        assert operator.delete("/queues/r$q").status_code == 403
        assert admin.delete("/queues/r$q").is_success


def test_grpc_requires_authentication(secured_broker: SecuredBroker) -> None:
    from sluice.admin.grpc import queue_admin_pb2 as messages
    from sluice.admin.grpc import queue_admin_pb2_grpc as service

    with grpc.insecure_channel(str(secured_broker.address("grpc"))) as channel:
        stub = service.QueueAdminStub(channel)
        wrong: list[tuple[tuple[str, str], ...]] = [(), (("authorization", "Bearer slu_wrong"),)]
        for metadata in wrong:
            with pytest.raises(grpc.RpcError) as refusal:
                stub.ListQueues(messages.ListQueuesRequest(), metadata=metadata, timeout=SECONDS)
            assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        viewer = (("authorization", f"Bearer {secured_broker.tokens['viewer']}"),)
        stub.ListQueues(messages.ListQueuesRequest(), metadata=viewer, timeout=SECONDS)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.PurgeQueue(messages.PurgeQueueRequest(name="q"), metadata=viewer, timeout=SECONDS)
        assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_rest_and_grpc_use_tls_when_configured(
    start_broker: StartBroker, certificates: Certificates, tmp_path: Path
) -> None:
    config, tokens = credentials(tmp_path)
    broker = start_broker(config + tls_config(certificates) + "http = true\ngrpc = true\n")
    bearer = {"Authorization": f"Bearer {tokens['viewer']}"}
    context = certificates.client_context()
    answer = httpx.get(
        f"https://{broker.address('http')}/api/v1/queues",
        headers=bearer,
        verify=context,
        timeout=30,
    )
    assert answer.status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{broker.address('http')}/api/v1/queues", headers=bearer, timeout=30)
    from sluice.admin.grpc import queue_admin_pb2 as messages
    from sluice.admin.grpc import queue_admin_pb2_grpc as service

    trusted = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    with grpc.secure_channel(str(broker.address("grpc")), trusted) as channel:
        service.QueueAdminStub(channel).ListQueues(
            messages.ListQueuesRequest(),
            metadata=(("authorization", f"Bearer {tokens['viewer']}"),),
            timeout=SECONDS,
        )


# ---- guessing, and changes at run time


def test_guessing_is_slowed_down_and_known_clients_are_not(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(f'[auth]\nusers = "{users_file(tmp_path, make_user("ann"))}"\n')
    with probe(broker, "mqtt", 5, "ann", PASSWORD, source="127.0.0.1") as client:
        assert client.reason == 0
    reasons = []
    begun = time.monotonic()
    for nth in range(9):
        with probe(broker, "mqtt", 5, "ann", f"guess number {nth}", source="127.0.0.1") as client:
            reasons.append(client.reason)
        if reasons[-1] == 0x9F or (nth > 6 and time.monotonic() - begun > 1):
            break
    assert reasons[:6] == [WRONG] * 6
    assert reasons[-1] == 0x9F or time.monotonic() - begun > 1
    with probe(broker, "mqtt", 5, "ann", PASSWORD, source="127.0.0.1") as client:
        assert client.reason == 0


def test_credential_files_are_reloaded_while_broker_runs(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    path = users_file(tmp_path, make_user("ann"))
    broker = start_broker(f'[auth]\nusers = "{path}"\n')
    with probe(broker, "mqtt", 5, "ann", PASSWORD, "a") as ann:
        assert ann.reason == 0
        users_file(tmp_path, make_user("bob"))
        touch_in_future(path)
        assert ann.lost.get(timeout=SECONDS) == NOT_ALLOWED
    with probe(broker, "mqtt", 5, "bob", PASSWORD) as bob:
        assert bob.reason == 0
    with probe(broker, "mqtt", 5, "ann", PASSWORD) as ann:
        assert ann.reason == WRONG


# ---- starting


@pytest.mark.parametrize("flag", ["--mqtt", "--ws", "--http", "--grpc"])
def test_public_listener_without_users_refuses_to_start(tmp_path: Path, flag: str) -> None:
    command = [sys.executable, "-m", "sluice", "serve", "--store", "memory", flag, "0.0.0.0:0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=same_build(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 2
    assert "can be reached from other machines" in done.stderr
    assert "sluice user add" in done.stderr or "sluice token add" in done.stderr


@pytest.mark.parametrize("name", ["users", "tokens", "rules"])
def test_unreadable_file_refuses_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.toml").write_text("[[[")
    (tmp_path / "sluice.toml").write_text(f'[auth]\n{name} = "broken.toml"\n')
    command = [
        sys.executable,
        "-m",
        "sluice",
        "serve",
        "--store",
        "memory",
        "--config",
        "sluice.toml",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=same_build(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 2 and "broken.toml cannot be used" in done.stderr

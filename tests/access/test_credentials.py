"""Users, tokens and JWTs: what is kept of them, what they prove, and for how long."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import stat
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import argon2
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from sluice.access.watched_file import Watched
from sluice.access.authenticator import Gate, Proofs
from sluice.access.identity import Identity, Keyring, Role, require
from sluice.access.jwt_verifier import JwtVerifier
from sluice.access.passwords import MAX_KNOWN, Attempts, Passwords, host_of
from sluice.access.settings import AuthSettings, JwtSettings
from sluice.access.factory import access_for
from sluice.access.api_tokens import load_tokens, make_token, read_tokens, write_tokens
from sluice.access.users import check_users_change, load_users, read_users, verify
from sluice.broker.acl.access import Caller, Verdict
from sluice.errors import ConfigError, NotAllowed, NotAuthenticated
from sluice.wire.packets import V5, Connect
from sluice.wire.reasons import NOT_AUTHORIZED, SUCCESS
from tests.access.kit import PASSWORD, SECRET, make_user, token_of, touch_later, users_file


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- files


def test_a_users_file_says_what_was_written_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    users = [make_user("ann", role=Role.ADMIN), make_user('o"dd näme'), make_user("off", disabled=True)]
    path = users_file(tmp_path, *users)
    assert list(load_users(path).values()) == users
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PASSWORD not in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["users.toml"]


@pytest.mark.parametrize(
    "text",
    [
        "[[[",
        "x = 1",
        '[user."a:b"]\npassword = "$argon2id$x"',
        '[user.a]\npassword = "plain text"',
        '[user.a]\npassword = "$argon2id$x"\nrole = "emperor"',
        '[user.a]\npassword = "$argon2id$x"\nshoe = 1',
        '[user.a]\npassword = "$argon2id$x"\ndisabled = "no"',
    ],
)
def test_a_users_file_that_cannot_be_used_is_refused_without_telling_secrets(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "users.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        Watched(path, read_users)
    assert "plain text" not in str(refusal.value)


def test_a_file_is_looked_at_once_a_second_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    clock = Time()
    path = users_file(tmp_path, make_user("ann"))
    watched = Watched(path, read_users, clock)
    users_file(tmp_path, make_user("bob"))
    touch_later(path)
    assert set(watched.current()) == {"ann"}
    clock.now += 1
    assert set(watched.current()) == {"bob"} and watched.version == 2
    path.write_text("[[[")
    clock.now += 1
    assert set(watched.current()) == {"bob"} and watched.version == 2
    path.unlink()
    assert set(watched.current(now=True)) == {"bob"}
    users_file(tmp_path, make_user("cat"))
    assert set(watched.current(now=True)) == {"cat"}


@pytest.mark.parametrize("text", ["", "\n", "# Written by `sluice user`; read again when it changes.\n"])
def test_a_users_file_that_has_lost_all_its_users_changes_nothing(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor that writes in two steps leaves an empty file for a moment."""
    path = users_file(tmp_path, make_user("ann"))
    _, keyring = access_for(AuthSettings(users=path))
    watched = Watched(path, read_users, check_change=check_users_change)
    path.write_text(text)
    touch_later(path)
    assert set(watched.current(now=True)) == {"ann"} and watched.version == 1
    assert "no users any more" in str(caplog.records[-1].__dict__["why"])
    assert not keyring.is_open
    users_file(tmp_path, make_user("bob"))
    assert set(watched.current(now=True)) == {"bob"}
    users_file(tmp_path)  # as `sluice user remove` leaves it
    assert watched.current(now=True) == {}


# ---- passwords


def passwords_for(tmp_path: Path, clock: Time | None = None) -> Passwords:
    users = users_file(tmp_path, make_user("ann", role=Role.VIEWER), make_user("off", disabled=True))
    clock = clock or Time()
    return Passwords(Watched(users, read_users, clock), clock)


def test_a_password_is_remembered_for_a_minute_and_not_once_it_has_changed(tmp_path: Path) -> None:
    clock = Time()
    passwords = passwords_for(tmp_path, clock)
    given = PASSWORD.encode()
    assert passwords.known("ann", given) is None
    assert passwords.check("ann", given) is not None
    assert passwords.known("ann", given) is not None
    assert passwords.known("ann", b"wrong") is None and passwords.known("off", given) is None
    clock.now += 61
    assert passwords.known("ann", given) is None
    passwords.check("ann", given)
    users_file(tmp_path, make_user("ann", "another password"))
    touch_later(passwords.users.path)
    clock.now += 2
    assert passwords.known("ann", given) is None and passwords.check("ann", given) is None


def test_nothing_that_is_remembered_holds_the_password(tmp_path: Path) -> None:
    passwords = passwords_for(tmp_path)
    passwords.check("ann", PASSWORD.encode())
    assert PASSWORD not in repr(vars(passwords))


def test_those_who_ask_at_the_same_time_share_one_hash(tmp_path: Path) -> None:
    passwords = passwords_for(tmp_path)
    done = threading.Semaphore(0)
    checks = 0
    usual = passwords.check

    def counted(name: str, password: bytes) -> object:
        nonlocal checks
        checks += 1
        return usual(name, password)

    passwords.check = counted  # type: ignore[method-assign,assignment]
    for _ in range(50):
        assert passwords.check_aside("ann", PASSWORD.encode(), lambda user: done.release())
    for _ in range(50):
        assert done.acquire(timeout=30)
    assert checks < 50


def test_too_many_checks_at_once_are_refused(tmp_path: Path) -> None:
    passwords = passwords_for(tmp_path)
    gate = threading.Event()

    def hold(name: str, password: bytes) -> None:
        gate.wait(20)

    passwords.check = hold  # type: ignore[method-assign]
    taken = [passwords.check_aside("ann", b"%d" % nth, lambda user: None) for nth in range(300)]
    gate.set()
    assert taken.count(True) == 256 and not taken[-1]


def test_a_user_that_is_not_there_costs_the_same_hash_as_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = passwords_for(tmp_path)
    costs = []

    def verified(hashed: str, password: bytes) -> bool:
        costs.append(argon2.extract_parameters(hashed))
        return verify(hashed, password)

    monkeypatch.setattr("sluice.access.passwords.verify", verified)
    assert passwords.check("ann", b"wrong") is None and passwords.check("nobody", b"wrong") is None
    there, not_there = costs
    assert there == not_there, "memory, passes, lanes, lengths: what decides how long it takes"


def test_an_address_that_guesses_waits_longer_and_longer_and_is_forgiven() -> None:
    clock = Time()
    attempts = Attempts(clock)
    for _ in range(5):
        assert attempts.wait("ann", "1.2.3.4", 5) == 0
        attempts.failed("ann", "1.2.3.4")
    assert attempts.wait("ann", "1.2.3.4", 5) == 0  # the fifth is free yet
    attempts.failed("ann", "1.2.3.4")
    assert attempts.wait("ann", "1.2.3.4", 5) == 0
    assert 0 < attempts.wait("ann", "1.2.3.4", 5) <= 5
    waits = [attempts.wait("ann", "1.2.3.4", 5) for _ in range(10)]
    assert waits[-1] == -1  # it would take too long: refused
    assert attempts.wait("ann", "1.2.3.5", 5) == 0
    clock.now += 600
    assert attempts.wait("ann", "1.2.3.4", 5) == 0


def test_one_users_guesser_does_not_keep_others_behind_the_same_proxy_out() -> None:
    attempts = Attempts(Time())
    for _ in range(20):
        attempts.failed("ann", "10.0.0.1")
    attempts.wait("ann", "10.0.0.1", 5)
    assert attempts.wait("ann", "10.0.0.1", 0) == -1
    assert attempts.wait("bob", "10.0.0.1", 0) == 0
    assert attempts.wait("ann", "10.0.0.2", 0) == 0


def test_one_address_cannot_try_all_users() -> None:
    attempts = Attempts(Time())
    for nth in range(100):
        assert attempts.wait(f"user{nth}", "10.0.0.1", 0) == 0
        attempts.failed(f"user{nth}", "10.0.0.1")
    attempts.failed("x" * 100_000, "10.0.0.1")
    attempts.wait("another", "10.0.0.1", 0)
    assert attempts.wait("another", "10.0.0.1", 0) == -1
    assert attempts.wait("another", "10.0.0.2", 0) == 0
    assert max(map(len, attempts._known)) < 1000


def test_a_network_of_ipv6_is_one_guesser_and_memory_is_bounded() -> None:
    attempts = Attempts(Time())
    for nth in range(20):
        attempts.failed("ann", f"2001:db8::{nth:x}")
    attempts.wait("ann", "2001:db8::ffff", 0)
    assert attempts.wait("ann", "2001:db8::ffff", 0) == -1
    assert attempts.wait("ann", "2001:db8:1::1", 0) == 0
    for nth in range(MAX_KNOWN + 100):
        attempts.failed("ann", f"10.{nth >> 16}.{nth >> 8 & 255}.{nth & 255}")
    assert len(attempts) <= MAX_KNOWN


@pytest.mark.parametrize(
    ("peer", "host"),
    [("1.2.3.4:5", "1.2.3.4"), ("1.2.3.4", "1.2.3.4"), ("[::1]:5", "::1"), ("::1", "::1"), ("", "")],
)
def test_the_address_of_a_peer_is_found(peer: str, host: str) -> None:
    assert host_of(peer) == host


# ---- tokens and roles


def test_a_token_is_kept_as_a_hash_and_ends_when_it_should(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    soon = datetime.now(UTC) + timedelta(hours=1)
    token, text = make_token("ci", Role.OPERATOR, soon)
    write_tokens(path, {"ci": token})
    assert text not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    (kept,) = load_tokens(path).values()
    assert (kept.name, kept.role, kept.sha256) == ("ci", Role.OPERATOR, token.sha256)
    clock = Time()
    clock.now = soon.timestamp() - 10
    proofs = Proofs(None, None, Watched(path, read_tokens), Attempts(), clock)
    assert proofs.of_bearer(text) == Identity("ci", Role.OPERATOR)
    assert proofs.of_bearer(text + "x") is None and proofs.of_bearer("") is None
    clock.now += 20
    assert proofs.of_bearer(text) is None


def test_a_keyring_reads_what_callers_send(tmp_path: Path) -> None:
    keyring = Keyring(Proofs(passwords_for(tmp_path), None, None, Attempts()))
    good = base64.b64encode(f"ann:{PASSWORD}".encode()).decode()
    assert keyring.identify(f"Basic {good}", "1.2.3.4") == Identity("ann", Role.VIEWER)
    for wrong in (None, "", "Basic", "Basic x", f"basic {good}x", "Bearer", "Bearer x", f"Digest {good}"):
        with pytest.raises(NotAuthenticated) as refusal:
            keyring.identify(wrong, "1.2.3.4")
        assert "sluice token add" in refusal.value.do
    guess = base64.b64encode(b"ann:wrong").decode()
    with pytest.raises(NotAuthenticated, match="too many"):  # noqa: PT012
        for _ in range(10):
            try:
                keyring.identify(f"Basic {guess}", "9.9.9.9")
            except NotAuthenticated as refused:
                if "too many" in str(refused):
                    raise
    assert (
        keyring.identify(f"Basic {good}", "9.9.9.9").name == "ann"
    )  # known: not slowed by who shares its address


def test_guesses_that_come_all_at_once_are_not_all_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    proofs = Proofs(passwords_for(tmp_path), None, None, Attempts())

    def verify(hashed: str, password: bytes) -> bool:
        looked.append(password)
        time.sleep(0.01)
        return False

    monkeypatch.setattr("sluice.access.passwords.verify", verify)

    def guess(nth: int) -> None:
        with suppress(NotAuthenticated):
            proofs.of_password("ann", f"guess {nth}", "9.9.9.9")

    threads = [threading.Thread(target=guess, args=(nth,)) for nth in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looked) < 10


def test_who_is_disabled_has_no_other_way_in(tmp_path: Path) -> None:
    users = users_file(tmp_path, make_user("ann", role=Role.ADMIN, disabled=True), make_user("bob"))
    jwts = verifier(tmp_path, SECRET, secret=True)
    proofs = Proofs(Passwords(Watched(users, read_users)), jwts, None, Attempts())
    assert proofs.of_bearer(token_of(sub="ann", role="admin")) is None
    assert proofs.of_bearer(token_of(sub="bob", role="admin")) == Identity("bob", Role.ADMIN)
    gate = Gate(False, Passwords(Watched(users, read_users)), jwts)
    for name, reason in (("ann", NOT_AUTHORIZED), ("bob", SUCCESS)):
        answers: list[Verdict] = []
        connect = Connect("c", V5, True, 0)
        connect.password = token_of(sub=name).encode()
        gate.admit(connect, Caller("c", "127.0.0.1", None), answers.append)
        assert [one.reason for one in answers] == [reason]


def test_without_credentials_everybody_is_an_administrator() -> None:
    assert Keyring().identify(None, "127.0.0.1") == Identity("anonymous", Role.ADMIN, anonymous=True)
    assert Keyring().is_open


def test_a_role_is_required_by_name() -> None:
    require(Identity("ann", Role.ADMIN), Role.OPERATOR, "purge a queue")
    with pytest.raises(NotAllowed, match=r"ann may not purge a queue .*operator.*viewer"):
        require(Identity("ann", Role.VIEWER), Role.OPERATOR, "purge a queue")


# ---- JWT


def verifier(tmp_path: Path, text: str, secret: bool = False, **options: object) -> JwtVerifier:
    path = tmp_path / "key"
    path.write_text(text)
    key = {"secret_file" if secret else "key_file": path}
    return JwtVerifier(JwtSettings(**key, **options))  # type: ignore[arg-type]


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def signed(key: object, algorithm: str, kid: str = "", **claims: object) -> str:
    headers = {"kid": kid} if kid else None
    return jwt.encode({"sub": "eve", "exp": time.time() + 60, **claims}, key, algorithm, headers)  # type: ignore[arg-type]


RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def test_public_keys_verify_what_their_owner_signed(tmp_path: Path) -> None:
    for key, algorithm in ((RSA, "RS256"), (EC, "ES256")):
        one = verifier(tmp_path, pem(key))
        claims = one.claims_of(signed(key, algorithm, role="operator"))
        assert claims is not None and (claims.user, claims.role) == ("eve", Role.OPERATOR)
        others = {
            "RS256": rsa.generate_private_key(65537, 2048),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
        }
        assert one.claims_of(signed(others[algorithm], algorithm)) is None


def test_a_key_set_is_searched_by_key_id(tmp_path: Path) -> None:
    listed = (
        ("r", jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key())),
        ("e", jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key())),
    )
    keys = [{**json.loads(text), "kid": name, "use": "sig"} for name, text in listed]
    one = verifier(tmp_path, json.dumps({"keys": [*keys, {"kty": "oct", "k": "AAAA"}]}))
    assert one.claims_of(signed(RSA, "RS256", "r")) is not None
    assert one.claims_of(signed(EC, "ES256", "e")) is not None
    assert one.claims_of(signed(EC, "ES256")) is not None
    assert one.claims_of(signed(EC, "ES256", "r")) is None


def test_a_public_key_does_not_serve_as_a_secret_and_no_signature_is_none(tmp_path: Path) -> None:
    one = verifier(tmp_path, pem(RSA))
    body = base64.urlsafe_b64encode(json.dumps({"sub": "eve", "exp": time.time() + 60}).encode()).rstrip(b"=")
    for header in ({"alg": "none"}, {"alg": "HS256"}):
        head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=")
        assert one.claims_of(f"{head.decode()}.{body.decode()}.") is None
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
    mac = hmac.new(pem(RSA).encode(), head + b"." + body, hashlib.sha256).digest()
    forged = b".".join((head, body, base64.urlsafe_b64encode(mac).rstrip(b"="))).decode()
    assert one.claims_of(forged) is None


def test_time_is_taken_with_some_leeway_and_an_end_is_needed(tmp_path: Path) -> None:
    one = verifier(tmp_path, SECRET, secret=True, leeway="30s")
    assert one.claims_of(token_of(sub="eve", exp=time.time() - 20)) is not None
    assert one.claims_of(token_of(sub="eve", exp=time.time() - 40)) is None
    assert one.claims_of(token_of(sub="eve", nbf=time.time() + 90)) is None
    assert one.claims_of(jwt.encode({"sub": "eve"}, SECRET, "HS256")) is None
    assert one.claims_of("eyJ" + "x" * 20_000 + ".y.z") is None


@pytest.mark.parametrize(
    "text", ["short", "", "-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----", "{}"]
)
def test_a_key_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        verifier(tmp_path, text, secret=text == "short")


# ---- the start


def test_a_door_to_the_world_needs_somebody_who_may_come_in(tmp_path: Path) -> None:
    none = AuthSettings()
    with pytest.raises(ConfigError, match="sluice user add"):
        access_for(none, ["0.0.0.0:1883"])
    with pytest.raises(ConfigError, match="sluice token add"):
        access_for(none, [], ["0.0.0.0:8080"])
    with pytest.raises(ConfigError, match="sluice token add"):  # asked for on MQTT, never for the admin doors
        access_for(AuthSettings(allow_anonymous=True), ["0.0.0.0:1883"], ["0.0.0.0:8080"])
    access_for(AuthSettings(allow_anonymous=True), ["0.0.0.0:1883"])
    empty = users_file(tmp_path)
    with pytest.raises(ConfigError, match="sluice user add"):
        access_for(AuthSettings(users=empty), ["0.0.0.0:1883"])
    plain = users_file(tmp_path, make_user("ann"))
    access_for(AuthSettings(users=plain), ["0.0.0.0:1883"])
    with pytest.raises(ConfigError, match="sluice token add"):
        access_for(AuthSettings(users=plain), [], ["0.0.0.0:8080"])
    access_for(
        AuthSettings(users=users_file(tmp_path, make_user("ann", role=Role.VIEWER))), [], ["0.0.0.0:8080"]
    )

"""Users, tokens and JWTs: how they are stored, what they prove, and for how long."""

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

from sluice.access.api_tokens import load_tokens, make_token, read_tokens, write_tokens
from sluice.access.authenticator import AdminCredentials, Authenticator
from sluice.access.factory import build_access
from sluice.access.identity import AdminAuthenticator, Identity, Role, require_role
from sluice.access.jwt_verifier import JwtVerifier
from sluice.access.passwords import MAX_TRACKED, FailedAttempts, PasswordVerifier, host_of
from sluice.access.settings import AuthSettings, JwtSettings
from sluice.access.users import check_users_change, load_users, read_users, verify
from sluice.access.watched_file import WatchedFile
from sluice.broker.acl import AuthResult, PeerInfo
from sluice.errors import ConfigError, NotAllowed, NotAuthenticated
from sluice.wire.packets import V5, Connect
from sluice.wire.reasons import NOT_AUTHORIZED, SUCCESS
from tests.access.kit import PASSWORD, SECRET, make_user, token_of, touch_in_future, users_file


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- files


def test_users_file_round_trips_and_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    users = [
        make_user("ann", role=Role.ADMIN),
        make_user('o"dd näme'),
        make_user("off", disabled=True),
    ]
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
def test_invalid_users_file_is_refused_without_leaking_secrets(text: str, tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        WatchedFile(path, read_users)
    assert "plain text" not in str(refusal.value)


def test_file_is_checked_once_a_second_and_a_broken_file_is_ignored(tmp_path: Path) -> None:
    clock = Time()
    path = users_file(tmp_path, make_user("ann"))
    watched = WatchedFile(path, read_users, clock)
    users_file(tmp_path, make_user("bob"))
    touch_in_future(path)
    assert set(watched.current()) == {"ann"}
    clock.now += 1
    assert set(watched.current()) == {"bob"} and watched.version == 2
    path.write_text("[[[")
    clock.now += 1
    assert set(watched.current()) == {"bob"} and watched.version == 2
    path.unlink()
    assert set(watched.current(check_now=True)) == {"bob"}
    users_file(tmp_path, make_user("cat"))
    assert set(watched.current(check_now=True)) == {"cat"}


@pytest.mark.parametrize(
    "text", ["", "\n", "# Written by `sluice user`; read again when it changes.\n"]
)
def test_users_file_that_became_empty_is_ignored(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor that writes in two steps leaves an empty file for a moment."""
    path = users_file(tmp_path, make_user("ann"))
    _, authenticator = build_access(AuthSettings(users=path))
    watched = WatchedFile(path, read_users, check_change=check_users_change)
    path.write_text(text)
    touch_in_future(path)
    assert set(watched.current(check_now=True)) == {"ann"} and watched.version == 1
    assert "no users any more" in str(caplog.records[-1].__dict__["why"])
    assert not authenticator.allows_anonymous
    users_file(tmp_path, make_user("bob"))
    assert set(watched.current(check_now=True)) == {"bob"}
    users_file(tmp_path)  # as `sluice user remove` leaves it
    assert watched.current(check_now=True) == {}


# ---- passwords


def passwords_for(tmp_path: Path, clock: Time | None = None) -> PasswordVerifier:
    users = users_file(
        tmp_path, make_user("ann", role=Role.VIEWER), make_user("off", disabled=True)
    )
    clock = clock or Time()
    return PasswordVerifier(WatchedFile(users, read_users, clock), clock)


def test_verified_password_is_cached_for_a_minute_unless_it_changed(tmp_path: Path) -> None:
    clock = Time()
    passwords = passwords_for(tmp_path, clock)
    given = PASSWORD.encode()
    assert passwords.find_cached("ann", given) is None
    assert passwords.check("ann", given) is not None
    assert passwords.find_cached("ann", given) is not None
    assert (
        passwords.find_cached("ann", b"wrong") is None
        and passwords.find_cached("off", given) is None
    )
    clock.now += 61
    assert passwords.find_cached("ann", given) is None
    passwords.check("ann", given)
    users_file(tmp_path, make_user("ann", "another password"))
    touch_in_future(passwords.users.path)
    clock.now += 2
    assert passwords.find_cached("ann", given) is None and passwords.check("ann", given) is None


def test_password_cache_does_not_contain_the_password(tmp_path: Path) -> None:
    passwords = passwords_for(tmp_path)
    passwords.check("ann", PASSWORD.encode())
    assert PASSWORD not in repr(vars(passwords))


def test_concurrent_checks_of_one_password_share_one_hash(tmp_path: Path) -> None:
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
        assert passwords.check_in_thread("ann", PASSWORD.encode(), lambda user: done.release())
    for _ in range(50):
        assert done.acquire(timeout=30)
    assert checks < 50


def test_too_many_concurrent_checks_are_refused(tmp_path: Path) -> None:
    passwords = passwords_for(tmp_path)
    released = threading.Event()

    def hold(name: str, password: bytes) -> None:
        released.wait(20)

    passwords.check = hold  # type: ignore[method-assign]
    taken = [passwords.check_in_thread("ann", b"%d" % nth, lambda user: None) for nth in range(300)]
    released.set()
    assert taken.count(True) == 256 and not taken[-1]


def test_unknown_user_costs_the_same_hash_as_a_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = passwords_for(tmp_path)
    costs = []

    def verified(hashed: str, password: bytes) -> bool:
        costs.append(argon2.extract_parameters(hashed))
        return verify(hashed, password)

    monkeypatch.setattr("sluice.access.passwords.verify", verified)
    assert passwords.check("ann", b"wrong") is None and passwords.check("unknown", b"wrong") is None
    there, not_there = costs
    assert there == not_there, "memory, passes, lanes, lengths: what decides how long it takes"


def test_address_that_guesses_waits_longer_each_time_and_is_released_later() -> None:
    clock = Time()
    attempts = FailedAttempts(clock)
    for _ in range(5):
        assert attempts.reserve_attempt("ann", "1.2.3.4", 5) == 0
        attempts.record_failure("ann", "1.2.3.4")
    assert attempts.reserve_attempt("ann", "1.2.3.4", 5) == 0  # the fifth is still free
    attempts.record_failure("ann", "1.2.3.4")
    assert attempts.reserve_attempt("ann", "1.2.3.4", 5) == 0
    assert 0 < attempts.reserve_attempt("ann", "1.2.3.4", 5) <= 5
    waits = [attempts.reserve_attempt("ann", "1.2.3.4", 5) for _ in range(10)]
    assert waits[-1] == -1  # it would take too long: refused
    assert attempts.reserve_attempt("ann", "1.2.3.5", 5) == 0
    clock.now += 600
    assert attempts.reserve_attempt("ann", "1.2.3.4", 5) == 0


def test_guesses_for_one_user_do_not_lock_out_others_behind_the_same_proxy() -> None:
    attempts = FailedAttempts(Time())
    for _ in range(20):
        attempts.record_failure("ann", "10.0.0.1")
    attempts.reserve_attempt("ann", "10.0.0.1", 5)
    assert attempts.reserve_attempt("ann", "10.0.0.1", 0) == -1
    assert attempts.reserve_attempt("bob", "10.0.0.1", 0) == 0
    assert attempts.reserve_attempt("ann", "10.0.0.2", 0) == 0


def test_one_address_cannot_try_all_users() -> None:
    attempts = FailedAttempts(Time())
    for nth in range(100):
        assert attempts.reserve_attempt(f"user{nth}", "10.0.0.1", 0) == 0
        attempts.record_failure(f"user{nth}", "10.0.0.1")
    attempts.record_failure("x" * 100_000, "10.0.0.1")
    attempts.reserve_attempt("another", "10.0.0.1", 0)
    assert attempts.reserve_attempt("another", "10.0.0.1", 0) == -1
    assert attempts.reserve_attempt("another", "10.0.0.2", 0) == 0
    assert max(map(len, attempts._penalties)) < 1000


def test_ipv6_network_counts_as_one_guesser_and_memory_is_bounded() -> None:
    attempts = FailedAttempts(Time())
    for nth in range(20):
        attempts.record_failure("ann", f"2001:db8::{nth:x}")
    attempts.reserve_attempt("ann", "2001:db8::ffff", 0)
    assert attempts.reserve_attempt("ann", "2001:db8::ffff", 0) == -1
    assert attempts.reserve_attempt("ann", "2001:db8:1::1", 0) == 0
    for nth in range(MAX_TRACKED + 100):
        attempts.record_failure("ann", f"10.{nth >> 16}.{nth >> 8 & 255}.{nth & 255}")
    assert len(attempts) <= MAX_TRACKED


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("1.2.3.4:5", "1.2.3.4"),
        ("1.2.3.4", "1.2.3.4"),
        ("[::1]:5", "::1"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_peer_address_is_found(peer: str, host: str) -> None:
    assert host_of(peer) == host


# ---- tokens and roles


def test_token_is_stored_as_hash_and_expires(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    soon = datetime.now(UTC) + timedelta(hours=1)
    token, text = make_token("ci", Role.OPERATOR, soon)
    write_tokens(path, {"ci": token})
    assert text not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    (stored,) = load_tokens(path).values()
    assert (stored.name, stored.role, stored.sha256) == ("ci", Role.OPERATOR, token.sha256)
    clock = Time()
    clock.now = soon.timestamp() - 10
    credentials = AdminCredentials(
        None, None, WatchedFile(path, read_tokens), FailedAttempts(), clock
    )
    assert credentials.verify_bearer(text) == Identity("ci", Role.OPERATOR)
    assert credentials.verify_bearer(text + "x") is None and credentials.verify_bearer("") is None
    clock.now += 20
    assert credentials.verify_bearer(text) is None


def test_authenticator_parses_credentials_of_callers(tmp_path: Path) -> None:
    authenticator = AdminAuthenticator(
        AdminCredentials(passwords_for(tmp_path), None, None, FailedAttempts())
    )
    good = base64.b64encode(f"ann:{PASSWORD}".encode()).decode()
    assert authenticator.identify(f"Basic {good}", "1.2.3.4") == Identity("ann", Role.VIEWER)
    for wrong in (
        None,
        "",
        "Basic",
        "Basic x",
        f"basic {good}x",
        "Bearer",
        "Bearer x",
        f"Digest {good}",
    ):
        with pytest.raises(NotAuthenticated) as refusal:
            authenticator.identify(wrong, "1.2.3.4")
        assert "sluice token add" in refusal.value.remedy
    guess = base64.b64encode(b"ann:wrong").decode()
    with pytest.raises(NotAuthenticated, match="too many"):  # noqa: PT012
        for _ in range(10):
            try:
                authenticator.identify(f"Basic {guess}", "9.9.9.9")
            except NotAuthenticated as refused:
                if "too many" in str(refused):
                    raise
    # A cached password is not delayed by guesses from the same address.
    assert authenticator.identify(f"Basic {good}", "9.9.9.9").name == "ann"


def test_concurrent_guesses_are_not_all_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    credentials = AdminCredentials(passwords_for(tmp_path), None, None, FailedAttempts())

    def verify(hashed: str, password: bytes) -> bool:
        looked.append(password)
        time.sleep(0.01)
        return False

    monkeypatch.setattr("sluice.access.passwords.verify", verify)

    def guess(nth: int) -> None:
        with suppress(NotAuthenticated):
            credentials.verify_password("ann", f"guess {nth}", "9.9.9.9")

    threads = [threading.Thread(target=guess, args=(nth,)) for nth in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looked) < 10


def test_disabled_user_cannot_authenticate_by_other_means(tmp_path: Path) -> None:
    users = users_file(tmp_path, make_user("ann", role=Role.ADMIN, disabled=True), make_user("bob"))
    jwts = verifier(tmp_path, SECRET, secret=True)
    credentials = AdminCredentials(
        PasswordVerifier(WatchedFile(users, read_users)), jwts, None, FailedAttempts()
    )
    assert credentials.verify_bearer(token_of(sub="ann", role="admin")) is None
    assert credentials.verify_bearer(token_of(sub="bob", role="admin")) == Identity(
        "bob", Role.ADMIN
    )
    authenticator = Authenticator(False, PasswordVerifier(WatchedFile(users, read_users)), jwts)
    for name, reason in (("ann", NOT_AUTHORIZED), ("bob", SUCCESS)):
        answers: list[AuthResult] = []
        connect = Connect("c", V5, True, 0)
        connect.password = token_of(sub=name).encode()
        authenticator.authenticate(connect, PeerInfo("c", "127.0.0.1", None), answers.append)
        assert [one.reason for one in answers] == [reason]


def test_without_credentials_everybody_is_administrator() -> None:
    assert AdminAuthenticator().identify(None, "127.0.0.1") == Identity(
        "anonymous", Role.ADMIN, is_anonymous=True
    )
    assert AdminAuthenticator().allows_anonymous


def test_a_role_is_required_by_name() -> None:
    require_role(Identity("ann", Role.ADMIN), Role.OPERATOR, "purge a queue")
    with pytest.raises(NotAllowed, match=r"ann may not purge a queue .*operator.*viewer"):
        require_role(Identity("ann", Role.VIEWER), Role.OPERATOR, "purge a queue")


# ---- JWT


def verifier(tmp_path: Path, text: str, secret: bool = False, **options: object) -> JwtVerifier:
    path = tmp_path / "key"
    path.write_text(text)
    key = {"secret_file" if secret else "key_file": path}
    return JwtVerifier(JwtSettings(**key, **options))  # type: ignore[arg-type]


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def sign_jwt(key: object, algorithm: str, kid: str = "", **claims: object) -> str:
    headers = {"kid": kid} if kid else None
    return jwt.encode({"sub": "eve", "exp": time.time() + 60, **claims}, key, algorithm, headers)  # type: ignore[arg-type]


RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def test_public_key_verifies_signature_of_its_owner(tmp_path: Path) -> None:
    for key, algorithm in ((RSA, "RS256"), (EC, "ES256")):
        one = verifier(tmp_path, pem(key))
        claims = one.verify(sign_jwt(key, algorithm, role="operator"))
        assert claims is not None and (claims.user, claims.role) == ("eve", Role.OPERATOR)
        others = {
            "RS256": rsa.generate_private_key(65537, 2048),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
        }
        assert one.verify(sign_jwt(others[algorithm], algorithm)) is None


def test_key_set_is_searched_by_key_id(tmp_path: Path) -> None:
    listed = (
        ("r", jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key())),
        ("e", jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key())),
    )
    keys = [{**json.loads(text), "kid": name, "use": "sig"} for name, text in listed]
    one = verifier(tmp_path, json.dumps({"keys": [*keys, {"kty": "oct", "k": "AAAA"}]}))
    assert one.verify(sign_jwt(RSA, "RS256", "r")) is not None
    assert one.verify(sign_jwt(EC, "ES256", "e")) is not None
    assert one.verify(sign_jwt(EC, "ES256")) is not None
    assert one.verify(sign_jwt(EC, "ES256", "r")) is None


def test_public_key_is_not_accepted_as_secret_nor_algorithm_none(tmp_path: Path) -> None:
    one = verifier(tmp_path, pem(RSA))
    body = base64.urlsafe_b64encode(
        json.dumps({"sub": "eve", "exp": time.time() + 60}).encode()
    ).rstrip(b"=")
    for header in ({"alg": "none"}, {"alg": "HS256"}):
        head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=")
        assert one.verify(f"{head.decode()}.{body.decode()}.") is None
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
    mac = hmac.new(pem(RSA).encode(), head + b"." + body, hashlib.sha256).digest()
    forged = b".".join((head, body, base64.urlsafe_b64encode(mac).rstrip(b"="))).decode()
    assert one.verify(forged) is None


def test_jwt_times_have_leeway_and_expiry_is_required(tmp_path: Path) -> None:
    one = verifier(tmp_path, SECRET, secret=True, leeway="30s")
    assert one.verify(token_of(sub="eve", exp=time.time() - 20)) is not None
    assert one.verify(token_of(sub="eve", exp=time.time() - 40)) is None
    assert one.verify(token_of(sub="eve", nbf=time.time() + 90)) is None
    assert one.verify(jwt.encode({"sub": "eve"}, SECRET, "HS256")) is None
    assert one.verify("eyJ" + "x" * 20_000 + ".y.z") is None


@pytest.mark.parametrize(
    "text", ["short", "", "-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----", "{}"]
)
def test_invalid_key_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        verifier(tmp_path, text, secret=text == "short")


# ---- start


def test_public_listener_requires_configured_users(tmp_path: Path) -> None:
    none = AuthSettings()
    with pytest.raises(ConfigError, match="sluice user add"):
        build_access(none, ["0.0.0.0:1883"])
    with pytest.raises(ConfigError, match="sluice token add"):
        build_access(none, [], ["0.0.0.0:8080"])
    # Requested for MQTT, never for the admin APIs.
    with pytest.raises(ConfigError, match="sluice token add"):
        build_access(AuthSettings(allow_anonymous=True), ["0.0.0.0:1883"], ["0.0.0.0:8080"])
    build_access(AuthSettings(allow_anonymous=True), ["0.0.0.0:1883"])
    empty = users_file(tmp_path)
    with pytest.raises(ConfigError, match="sluice user add"):
        build_access(AuthSettings(users=empty), ["0.0.0.0:1883"])
    plain = users_file(tmp_path, make_user("ann"))
    build_access(AuthSettings(users=plain), ["0.0.0.0:1883"])
    with pytest.raises(ConfigError, match="sluice token add"):
        build_access(AuthSettings(users=plain), [], ["0.0.0.0:8080"])
    build_access(
        AuthSettings(users=users_file(tmp_path, make_user("ann", role=Role.VIEWER))),
        [],
        ["0.0.0.0:8080"],
    )

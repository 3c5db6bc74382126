"""Authenticate a CONNECT and determine its rights: the broker's `AccessControl`.

    certificate ─▶ JWT ─▶ password ─▶ anonymous      the first that applies decides; it never
                                │                    falls through to the next
                                └─ hashed in a thread; all else completes at once

It runs in the broker's loop. Once a second it checks whether a file has changed, and applies the
changes to connected clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from sluice.access.api_tokens import ApiToken, hash_token
from sluice.access.identity import Identity, Role, looks_like_jwt
from sluice.access.passwords import FailedAttempts, PasswordVerifier, host_of
from sluice.access.users import User
from sluice.access.watched_file import WatchedFile
from sluice.broker.acl import (
    QUEUE_ACTIONS,
    QUEUE_ADMIN,
    TOPIC_ACTIONS,
    AccessControl,
    AccessControlList,
    AuthCallback,
    AuthResult,
    Grant,
    PeerInfo,
    Rule,
    clause_for_topic,
)
from sluice.broker.broker import Broker
from sluice.broker.routing import enforce_all_grants
from sluice.broker.turn import PeriodicTask
from sluice.clock import Clock, steady_time
from sluice.errors import NotAuthenticated
from sluice.wire.packets import Connect
from sluice.wire.reasons import (
    BAD_USER_NAME_OR_PASSWORD,
    CLIENT_IDENTIFIER_NOT_VALID,
    CONNECTION_RATE_EXCEEDED,
    NOT_AUTHORIZED,
    SERVER_BUSY,
)

if TYPE_CHECKING:
    # Imported only if JWTs are configured: 20 MB of cryptography.
    from sluice.access.jwt_verifier import JwtVerifier

# A CONNECT is delayed by at most this for its address; beyond it, it is refused.
MAX_WAIT_SECONDS: Final = 5.0
POLL_SECONDS: Final = 1.0

_WRONG_CREDENTIALS: Final = "wrong user name or password"  # the same text for either fault
_USER_DISABLED: Final = "this user is disabled: ask the operator of this server"
_TOO_MANY_FAILURES: Final = (
    "too many wrong passwords came for this user from this address: try again in a minute"
)
CertificateUser = Literal["off", "cn", "san"]

# Without a rules file: clients may do everything but manage queues, which needs the role admin.
DEFAULT_RULES: Final = AccessControlList(
    [
        Rule(
            True,
            TOPIC_ACTIONS | (QUEUE_ACTIONS & ~QUEUE_ADMIN),
            [],
            [],
            ["#", "$SYS/#"],
            [],
            "the default rules",
        )
    ]
)


class Loop(Protocol):
    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Any: ...
    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any: ...


class Authenticator(AccessControl):
    def __init__(
        self,
        allows_anonymous: bool,
        passwords: PasswordVerifier | None = None,
        jwts: JwtVerifier | None = None,
        rules: WatchedFile[list[Rule]] | None = None,
        certificate_user: CertificateUser = "off",
        attempts: FailedAttempts | None = None,
    ) -> None:
        self._allows_anonymous = allows_anonymous
        self._passwords = passwords
        self._jwts = jwts
        self._rules = rules
        self._acl = AccessControlList(rules.current()) if rules is not None else None
        self._certificate_user = certificate_user
        self._attempts = attempts or FailedAttempts()
        self._brokers: Callable[[], list[Broker]] = list  # the brokers it authenticates for
        self._loop: Loop | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        self._rules_version = rules.version if rules is not None else 0
        self._users_version = passwords.users.version if passwords is not None else 0

    @property
    def has_ambient_credentials(self) -> bool:
        """Return whether a client can be admitted without sending a secret.

        That is the case for anonymous clients, and for a certificate, which a browser presents for
        every page.
        """
        return self._allows_anonymous or self._certificate_user != "off"

    # ---- a CONNECT

    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        if self._certificate_user != "off":
            name = certificate_user_name(peer.get_certificate(), self._certificate_user)
            if name:
                on_result(self._authenticate_certificate(name, peer))
                return
        password = connect.password
        if password is None and not connect.username:
            if self._allows_anonymous:
                on_result(self._authorize("", None, peer))
            else:
                on_result(
                    AuthResult(
                        NOT_AUTHORIZED,
                        "this server requires a user name and a password, or a certificate",
                    )
                )
            return
        if self._jwts is not None and password is not None:
            text = password.decode("ascii", "replace")
            if looks_like_jwt(text):
                on_result(self._authenticate_jwt(self._jwts, text, connect, peer))
                return
        if self._passwords is not None:
            self._authenticate_password(
                self._passwords, connect.username or "", password or b"", peer, on_result
            )
        elif self._allows_anonymous and self._jwts is None:
            # Names are not checked here, so no client has one.
            on_result(self._authorize("", None, peer))
        else:
            on_result(AuthResult(BAD_USER_NAME_OR_PASSWORD, _WRONG_CREDENTIALS))

    def _authenticate_certificate(self, name: str, peer: PeerInfo) -> AuthResult:
        """Authorize a client by its certificate, which TLS has verified.

        The users file may list the user too: for a role, or as disabled.
        """
        user = _find_user(self._passwords, name)
        if user is None:
            return self._authorize(name, None, peer)
        if user.disabled:
            return AuthResult(NOT_AUTHORIZED, _USER_DISABLED)
        result = self._authorize(name, user.role, peer)
        result.credential_id = _certificate_credential_id(user)
        return result

    def _authenticate_jwt(
        self, jwts: JwtVerifier, text: str, connect: Connect, peer: PeerInfo
    ) -> AuthResult:
        claims = jwts.verify(text)
        if claims is None or (connect.username and connect.username != claims.user):
            return AuthResult(BAD_USER_NAME_OR_PASSWORD, _WRONG_CREDENTIALS)
        if claims.client_id and claims.client_id != peer.client_id:
            return AuthResult(
                CLIENT_IDENTIFIER_NOT_VALID, "this token is for another client id: use that one"
            )
        if _is_disabled(self._passwords, claims.user):
            return AuthResult(NOT_AUTHORIZED, _USER_DISABLED)
        result = self._authorize(claims.user, claims.role, peer)
        result.expires_at = claims.expires_at
        return result

    def _authenticate_password(
        self,
        passwords: PasswordVerifier,
        name: str,
        password: bytes,
        peer: PeerInfo,
        on_result: AuthCallback,
    ) -> None:
        known = passwords.find_cached(name, password)
        if known is not None:
            on_result(self._admit_user(known, peer))
            return
        loop = self._loop
        if loop is None:  # not in a loop: no other client waits
            on_result(self._password_result(passwords.check(name, password), name, peer))
            return
        delay = self._attempts.reserve_attempt(name, peer.address, MAX_WAIT_SECONDS)
        if delay < 0:
            on_result(AuthResult(CONNECTION_RATE_EXCEEDED, _TOO_MANY_FAILURES))
            return

        def check_password() -> None:
            if not passwords.check_in_thread(name, password, on_checked):
                on_result(
                    AuthResult(
                        SERVER_BUSY,
                        "too many clients are being checked: try again in a few seconds",
                    )
                )

        def on_checked(user: User | None) -> None:  # in a thread
            loop.call_soon_threadsafe(lambda: on_result(self._password_result(user, name, peer)))

        if delay:
            loop.call_later(delay, check_password)
        else:
            check_password()

    def _password_result(self, user: User | None, name: str, peer: PeerInfo) -> AuthResult:
        if user is None:
            self._attempts.record_failure(name, peer.address)
            return AuthResult(BAD_USER_NAME_OR_PASSWORD, _WRONG_CREDENTIALS)
        return self._admit_user(user, peer)

    def _admit_user(self, user: User, peer: PeerInfo) -> AuthResult:
        result = self._authorize(user.name, user.role, peer)
        result.credential_id = _password_credential_id(user)
        return result

    def creates_queue(self, action: int, queue: str, user: str, client_id: str) -> bool | None:
        """Return what the rule says that admits this action, or None."""
        if self._acl is None:
            return None
        clauses = self._acl.build_clauses(action, user, client_id)
        clause = clause_for_topic(clauses, queue.encode())
        return None if clause is None else clause.auto_create

    def _authorize(self, user: str, role: Role | None, peer: PeerInfo) -> AuthResult:
        acl = self._acl
        if acl is None:
            is_unrestricted = role == Role.ADMIN or self._has_no_credentials
            return AuthResult(
                user=user,
                grant=None if is_unrestricted else Grant(DEFAULT_RULES, user, peer.client_id),
            )
        fault = acl.client_name_error(user, peer.client_id)
        if fault:
            return AuthResult(CLIENT_IDENTIFIER_NOT_VALID, f"{fault}: choose another")
        rule = acl.find_connect_rule(user, peer.client_id)
        if rule is None or not rule.allow:
            return AuthResult(
                NOT_AUTHORIZED,
                "the access rules do not let this client connect: have a rule added for it",
            )
        return AuthResult(user=user, grant=Grant(acl, user, peer.client_id))

    @property
    def _has_no_credentials(self) -> bool:
        return self._passwords is None and self._jwts is None and self._certificate_user == "off"

    # ---- connected clients

    def attach(self, broker: Broker, loop: Loop) -> None:
        """Authenticate for this broker, and watch the files from now on."""
        self._brokers = lambda: [broker]
        self._loop = loop
        if self._rules is not None or self._passwords is not None:
            broker.wake_at(
                broker.turn.now + POLL_SECONDS,
                PeriodicTask(POLL_SECONDS, lambda: self.reload_files(False)),
            )

    def attach_many(
        self, brokers: Callable[[], list[Broker]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Authenticate for a changing set of brokers: the cells of a node."""
        self._brokers = brokers
        self._loop = loop
        if self._rules is not None or self._passwords is not None:
            self._poll_files(loop)

    def _poll_files(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reload_files(False)
        self._poll_timer = loop.call_later(POLL_SECONDS, self._poll_files, loop)

    def reload_files(self, check_now: bool = True) -> None:
        """Apply changes in the files."""
        if self._rules is not None and self._acl is not None:
            rules = self._rules.current(check_now)
            if self._rules.version != self._rules_version:
                self._rules_version = self._rules.version
                self._acl.replace(rules)
                self._apply_rules()
        if self._passwords is not None:
            users = self._passwords.users
            users.current(check_now)
            version = users.version  # before the content, which another thread may change
            if version != self._users_version:
                self._users_version = version
                self._apply_users(users.current())

    def _apply_rules(self) -> None:
        acl = self._acl
        if acl is None:
            return
        for broker in self._brokers():
            self._apply_rules_to(broker, acl)

    def _apply_rules_to(self, broker: Broker, acl: AccessControlList) -> None:
        for connection in list(broker.connections):
            session = connection.session
            if session is None or session.grant is None:
                continue
            rule = acl.find_connect_rule(session.grant.user, session.client_id)
            fault = acl.client_name_error(session.grant.user, session.client_id)
            if fault or rule is None or not rule.allow:
                connection.end(
                    NOT_AUTHORIZED,
                    "the access rules have changed and do not let this client connect",
                )
        enforce_all_grants(broker.router, broker.registry)

    def _apply_users(self, users: dict[str, User]) -> None:
        """Disconnect clients whose user was removed, disabled, or changed its password or role."""
        for connection in [one for broker in self._brokers() for one in broker.connections]:
            session = connection.session
            if session is None or not session.user or connection.is_from_cluster:
                continue
            user = users.get(session.user)
            credential_id = connection.credential_id
            if (user is not None and user.disabled) or (
                credential_id
                and (
                    user is None
                    or credential_id
                    not in (_password_credential_id(user), _certificate_credential_id(user))
                )
            ):
                connection.end(
                    NOT_AUTHORIZED, "this user was removed, disabled or has a new password or role"
                )

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        if self._passwords is not None:
            self._passwords.close()


class AdminCredentials:
    """The credentials of the admin APIs: the same users and JWTs, and tokens. Thread-safe."""

    def __init__(
        self,
        passwords: PasswordVerifier | None,
        jwts: JwtVerifier | None,
        tokens: WatchedFile[dict[str, ApiToken]] | None,
        attempts: FailedAttempts,
        clock: Clock = steady_time,
    ) -> None:
        self._passwords = passwords
        self._jwts = jwts
        self._tokens = tokens
        self._attempts = attempts
        self._clock = clock

    def verify_bearer(self, text: str) -> Identity | None:
        if self._tokens is not None:
            token = self._tokens.current().get(hash_token(text))
            if token is not None:
                return (
                    Identity(token.name, token.role) if token.is_valid_at(self._clock()) else None
                )
        claims = self._jwts.verify(text) if self._jwts is not None else None
        if claims is None or claims.role is None or _is_disabled(self._passwords, claims.user):
            return None
        return Identity(claims.user, claims.role)

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        if self._passwords is None:
            return None
        password_bytes = password.encode("utf-8", "surrogateescape")
        user = self._passwords.find_cached(name, password_bytes)
        if user is None:
            address = host_of(peer)
            # Many guesses that arrive at once are checked one after the other.
            with self._passwords.check_slots:
                if self._attempts.reserve_attempt(name, address, 0.0) != 0.0:
                    raise NotAuthenticated(
                        "too many wrong passwords came for this user from this address",
                        "Try again in a minute",
                    )
                user = self._passwords.check(name, password_bytes)
                if user is None:
                    self._attempts.record_failure(name, address)
        return (
            Identity(user.name, user.role) if user is not None and user.role is not None else None
        )


def _find_user(passwords: PasswordVerifier | None, name: str) -> User | None:
    return passwords.users.current().get(name) if passwords is not None else None


def _is_disabled(passwords: PasswordVerifier | None, name: str) -> bool:
    """Return whether the users file disables this user, regardless of the credential."""
    user = _find_user(passwords, name)
    return user is not None and user.disabled


def _password_credential_id(user: User) -> str:
    """Return an id of the user's credentials; it changes when the client must log in again."""
    return f"{user.role_label} {user.hash}"


def _certificate_credential_id(user: User) -> str:
    return f"{user.role_label} "


def certificate_user_name(certificate: dict[str, Any], source: CertificateUser) -> str:
    """Return the user name in a certificate, or an empty string.

    It is the common name, or the first DNS name, e-mail address or URI of the subject alternative
    names.
    """
    if source == "san":
        for kind, value in certificate.get("subjectAltName", ()):
            if kind in ("DNS", "email", "URI"):
                return str(value)
        return ""
    for group in certificate.get("subject", ()):
        for key, value in group:
            if key == "commonName":
                return str(value)
    return ""

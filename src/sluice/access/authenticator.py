"""Who a CONNECT comes from, and with which rights: the broker's `Access` where there are users, tokens or rules.

    certificate ─▶ JWT ─▶ password ─▶ anonymous      the first that applies decides; it never falls through to the next
                                │
                                └─ hashed in a thread; all else is answered at once

It runs in the broker's loop. Each second it looks whether a file has changed, and holds those who are connected to
what the files say now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from sluice.access.watched_file import Watched
from sluice.access.identity import Identity, Role, looks_like_jwt
from sluice.access.passwords import Attempts, Passwords, host_of
from sluice.access.api_tokens import Token, hash_of
from sluice.access.users import User
from sluice.broker.acl.access import Caller, Reply, Verdict
from sluice.broker.broker import Broker
from sluice.broker.acl.grants import Grant, review_all
from sluice.broker.acl.acl import ON_QUEUES, ON_TOPICS, QUEUE_ADMIN, Book, Rule
from sluice.broker.scheduler import Repeated
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
    from sluice.access.jwt_verifier import JwtVerifier  # 20 MB of cryptography: only where there are JWTs

LONGEST_WAIT: Final = 5.0  # that a CONNECT is held for its address's sake; beyond it, it is refused
LOOK_SECONDS: Final = 1.0

_WRONG: Final = "wrong user name or password"  # the same words whichever it is
_DISABLED: Final = "this user is disabled: ask who runs the server"
_GUESSING: Final = "too many wrong passwords came for this user from this address: try again in a minute"
CertificateUser = Literal["off", "cn", "san"]

# Without a rules file: whoever has come in may do everything but manage queues, which takes the role admin.
HOUSE_RULES: Final = Book(
    [
        Rule(
            True,
            ON_TOPICS | (ON_QUEUES & ~QUEUE_ADMIN),
            [],
            [],
            ["#", "$SYS/#"],
            [],
            "the rules of the house",
        )
    ]
)


class Loop(Protocol):
    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Any: ...
    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any: ...


class Gate:
    def __init__(
        self,
        anonymous: bool,
        passwords: Passwords | None = None,
        jwts: JwtVerifier | None = None,
        rules: Watched[list[Rule]] | None = None,
        certificate_user: CertificateUser = "off",
        attempts: Attempts | None = None,
    ) -> None:
        self._anonymous = anonymous
        self._passwords = passwords
        self._jwts = jwts
        self._rules = rules
        self._book = Book(rules.current()) if rules is not None else None
        self._certificate_user = certificate_user
        self._attempts = attempts or Attempts()
        self._brokers: Callable[[], list[Broker]] = list  # those that it answers for
        self._loop: Loop | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._rules_seen = rules.version if rules is not None else 0
        self._users_seen = passwords.users.version if passwords is not None else 0

    @property
    def ambient(self) -> bool:
        """Whether a client can get in without a secret that it sends: anonymously, or by a certificate, which a
        browser shows for every page."""
        return self._anonymous or self._certificate_user != "off"

    # ---- a CONNECT

    def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
        if self._certificate_user != "off":
            name = name_in(caller.certificate(), self._certificate_user)
            if name:
                reply(self._by_certificate(name, caller))
                return
        password = connect.password
        if password is None and not connect.username:
            if self._anonymous:
                reply(self._let_in("", None, caller))
            else:
                reply(
                    Verdict(NOT_AUTHORIZED, "this server wants a user name and a password, or a certificate")
                )
            return
        if self._jwts is not None and password is not None:
            text = password.decode("ascii", "replace")
            if looks_like_jwt(text):
                reply(self._by_jwt(self._jwts, text, connect, caller))
                return
        if self._passwords is not None:
            self._by_password(self._passwords, connect.username or "", password or b"", caller, reply)
        elif self._anonymous and self._jwts is None:
            reply(self._let_in("", None, caller))  # nobody checks names here, so nobody has one
        else:
            reply(Verdict(BAD_USER_NAME_OR_PASSWORD, _WRONG))

    def _by_certificate(self, name: str, caller: Caller) -> Verdict:
        """TLS has checked that it is theirs. The users file may know them too: for a role, or to keep them out."""
        user = _found(self._passwords, name)
        if user is None:
            return self._let_in(name, None, caller)
        if user.disabled:
            return Verdict(NOT_AUTHORIZED, _DISABLED)
        verdict = self._let_in(name, user.role, caller)
        verdict.proof = _proof_by_certificate(user)
        return verdict

    def _by_jwt(self, jwts: JwtVerifier, text: str, connect: Connect, caller: Caller) -> Verdict:
        claims = jwts.claims_of(text)
        if claims is None or (connect.username and connect.username != claims.user):
            return Verdict(BAD_USER_NAME_OR_PASSWORD, _WRONG)
        if claims.client_id and claims.client_id != caller.client_id:
            return Verdict(CLIENT_IDENTIFIER_NOT_VALID, "this token is for another client id: use that one")
        if _is_disabled(self._passwords, claims.user):
            return Verdict(NOT_AUTHORIZED, _DISABLED)
        verdict = self._let_in(claims.user, claims.role, caller)
        verdict.expires_at = claims.expires_at
        return verdict

    def _by_password(
        self, passwords: Passwords, name: str, password: bytes, caller: Caller, reply: Reply
    ) -> None:
        known = passwords.known(name, password)
        if known is not None:
            reply(self._as_user(known, caller))
            return
        loop = self._loop
        if loop is None:  # not in a loop: nobody else waits
            reply(self._judged(passwords.check(name, password), name, caller))
            return
        wait = self._attempts.wait(name, caller.address, LONGEST_WAIT)
        if wait < 0:
            reply(Verdict(CONNECTION_RATE_EXCEEDED, _GUESSING))
            return

        def look() -> None:
            if not passwords.check_aside(name, password, looked):
                reply(Verdict(SERVER_BUSY, "too many clients are being checked: try again in a few seconds"))

        def looked(user: User | None) -> None:  # in a thread
            loop.call_soon_threadsafe(lambda: reply(self._judged(user, name, caller)))

        if wait:
            loop.call_later(wait, look)
        else:
            look()

    def _judged(self, user: User | None, name: str, caller: Caller) -> Verdict:
        if user is None:
            self._attempts.failed(name, caller.address)
            return Verdict(BAD_USER_NAME_OR_PASSWORD, _WRONG)
        return self._as_user(user, caller)

    def _as_user(self, user: User, caller: Caller) -> Verdict:
        verdict = self._let_in(user.name, user.role, caller)
        verdict.proof = _proof_by_password(user)
        return verdict

    def _let_in(self, user: str, role: Role | None, caller: Caller) -> Verdict:
        book = self._book
        if book is None:
            everything = role == Role.ADMIN or self._nobody_is_named
            return Verdict(
                user=user, grant=None if everything else Grant(HOUSE_RULES, user, caller.client_id)
            )
        fault = book.fault_of_names(user, caller.client_id)
        if fault:
            return Verdict(CLIENT_IDENTIFIER_NOT_VALID, f"{fault}: choose another")
        rule = book.who_connects(user, caller.client_id)
        if rule is None or not rule.allow:
            return Verdict(
                NOT_AUTHORIZED, "the access rules do not let this client connect: have a rule added for it"
            )
        return Verdict(user=user, grant=Grant(book, user, caller.client_id))

    @property
    def _nobody_is_named(self) -> bool:
        return self._passwords is None and self._jwts is None and self._certificate_user == "off"

    # ---- those who are connected

    def attach(self, broker: Broker, loop: Loop) -> None:
        """Answer for this broker, and look after the files from now on."""
        self._brokers = lambda: [broker]
        self._loop = loop
        if self._rules is not None or self._passwords is not None:
            broker.wake_at(broker.turn.now + LOOK_SECONDS, Repeated(LOOK_SECONDS, lambda: self.look(False)))

    def attach_many(self, brokers: Callable[[], list[Broker]], loop: asyncio.AbstractEventLoop) -> None:
        """The same for brokers that come and go: the cells of a node."""
        self._brokers = brokers
        self._loop = loop
        if self._rules is not None or self._passwords is not None:
            self._look_on(loop)

    def _look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self.look(False)
        self._looking = loop.call_later(LOOK_SECONDS, self._look_on, loop)

    def look(self, at_once: bool = True) -> None:
        """Take in what has changed in the files."""
        if self._rules is not None and self._book is not None:
            rules = self._rules.current(at_once)
            if self._rules.version != self._rules_seen:
                self._rules_seen = self._rules.version
                self._book.replace(rules)
                self._review_rules()
        if self._passwords is not None:
            users = self._passwords.users
            users.current(at_once)
            version = users.version  # before the content, which another thread may change at any time
            if version != self._users_seen:
                self._users_seen = version
                self._review_users(users.current())

    def _review_rules(self) -> None:
        book = self._book
        if book is None:
            return
        for broker in self._brokers():
            self._review_rules_of(broker, book)

    def _review_rules_of(self, broker: Broker, book: Book) -> None:
        for connection in list(broker.connections):
            session = connection.session
            if session is None or session.grant is None:
                continue
            rule = book.who_connects(session.grant.user, session.client_id)
            fault = book.fault_of_names(session.grant.user, session.client_id)
            if fault or rule is None or not rule.allow:
                connection.end(
                    NOT_AUTHORIZED, "the access rules have changed and do not let this client connect"
                )
        review_all(broker.registry)

    def _review_users(self, users: dict[str, User]) -> None:
        """Who was let in by a password that is not the user's any more, or with another role, has to go."""
        for connection in [one for broker in self._brokers() for one in broker.connections]:
            session = connection.session
            if session is None or not session.user or connection.trusted:
                continue
            user = users.get(session.user)
            proof = connection.proof
            if (user is not None and user.disabled) or (
                proof
                and (user is None or proof not in (_proof_by_password(user), _proof_by_certificate(user)))
            ):
                connection.end(
                    NOT_AUTHORIZED, "this user was removed, disabled or has a new password or role"
                )

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._passwords is not None:
            self._passwords.close()


class Proofs:
    """The credentials of the admin doors: the same users and JWTs, and tokens of their own. Any thread may ask."""

    def __init__(
        self,
        passwords: Passwords | None,
        jwts: JwtVerifier | None,
        tokens: Watched[dict[str, Token]] | None,
        attempts: Attempts,
        clock: Clock = steady_time,
    ) -> None:
        self._passwords = passwords
        self._jwts = jwts
        self._tokens = tokens
        self._attempts = attempts
        self._clock = clock

    def of_bearer(self, text: str) -> Identity | None:
        if self._tokens is not None:
            token = self._tokens.current().get(hash_of(text))
            if token is not None:
                return Identity(token.name, token.role) if token.is_valid_at(self._clock()) else None
        claims = self._jwts.claims_of(text) if self._jwts is not None else None
        if claims is None or claims.role is None or _is_disabled(self._passwords, claims.user):
            return None
        return Identity(claims.user, claims.role)

    def of_password(self, name: str, password: str, peer: str) -> Identity | None:
        if self._passwords is None:
            return None
        given = password.encode("utf-8", "surrogateescape")
        user = self._passwords.known(name, given)
        if user is None:
            address = host_of(peer)
            with self._passwords.turns:  # many guesses that come at once are judged one after the other
                if self._attempts.wait(name, address, 0.0) != 0.0:
                    raise NotAuthenticated(
                        "too many wrong passwords came for this user from this address",
                        "Try again in a minute",
                    )
                user = self._passwords.check(name, given)
                if user is None:
                    self._attempts.failed(name, address)
        return Identity(user.name, user.role) if user is not None and user.role is not None else None


def _found(passwords: Passwords | None, name: str) -> User | None:
    return passwords.users.current().get(name) if passwords is not None else None


def _is_disabled(passwords: Passwords | None, name: str) -> bool:
    """However somebody proves to be this user: the file keeps them out."""
    user = _found(passwords, name)
    return user is not None and user.disabled


def _proof_by_password(user: User) -> str:
    """What differs when a user would not be let in as before."""
    return f"{user.role_word} {user.hash}"


def _proof_by_certificate(user: User) -> str:
    return f"{user.role_word} "


def name_in(certificate: dict[str, Any], part: CertificateUser) -> str:
    """The user name that a certificate stands for: its common name, or the first DNS name, e-mail address or URI of its
    subject alternative names. Empty when it has none."""
    if part == "san":
        for kind, value in certificate.get("subjectAltName", ()):
            if kind in ("DNS", "email", "URI"):
                return str(value)
        return ""
    for group in certificate.get("subject", ()):
        for key, value in group:
            if key == "commonName":
                return str(value)
    return ""

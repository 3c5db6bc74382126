"""Build the authenticators from the configuration; refuse public listeners without credentials."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.access.acl_file import read_rules
from sluice.access.api_tokens import read_tokens
from sluice.access.authenticator import AdminCredentials, Authenticator
from sluice.access.identity import AdminAuthenticator
from sluice.access.passwords import FailedAttempts, PasswordVerifier
from sluice.access.settings import AuthSettings
from sluice.access.users import check_users_change, read_users
from sluice.access.watched_file import WatchedFile, warn_if_readable_by_others
from sluice.errors import ConfigError


def build_access(
    auth: AuthSettings, public_mqtt: Sequence[str] = (), public_admin: Sequence[str] = ()
) -> tuple[Authenticator, AdminAuthenticator]:
    """Return the authenticators of the MQTT listeners and of the admin APIs.

    `public_mqtt` and `public_admin` are the listener addresses, as configured, that other machines
    can reach.
    """
    for path in (auth.users, auth.tokens, auth.jwt.secret_file):
        if path is not None:
            warn_if_readable_by_others(path)
    attempts = FailedAttempts()
    passwords = (
        PasswordVerifier(WatchedFile(auth.users, read_users, check_change=check_users_change))
        if auth.users is not None
        else None
    )
    tokens = WatchedFile(auth.tokens, read_tokens) if auth.tokens is not None else None
    jwts = None
    if auth.jwt.is_configured:
        from sluice.access.jwt_verifier import JwtVerifier  # 20 MB of cryptography

        jwts = JwtVerifier(auth.jwt)
    rules = WatchedFile(auth.rules, read_rules) if auth.rules is not None else None

    has_users = passwords is not None and bool(passwords.users.current())
    has_mqtt_credentials = has_users or jwts is not None or auth.certificate_user != "off"
    if public_mqtt and not has_mqtt_credentials and not auth.allow_anonymous:
        raise ConfigError(
            f"{', '.join(public_mqtt)} can be reached from other machines, and no users are set up",
            "Make one with `sluice user add NAME --file users.toml` "
            'and set auth.users = "users.toml", or listen on 127.0.0.1, '
            "or admit all clients on purpose with auth.allow_anonymous = true",
        )
    has_roles = passwords is not None and any(
        user.role is not None for user in passwords.users.current().values()
    )
    has_admin_credentials = (
        has_roles or jwts is not None or (tokens is not None and bool(tokens.current()))
    )
    if public_admin and not has_admin_credentials:
        raise ConfigError(
            f"{', '.join(public_admin)} can be reached from other machines, "
            "and no token or user with a role is set up",
            "Make one with `sluice token add NAME --role admin --file tokens.toml` "
            'and set auth.tokens = "tokens.toml", or listen on 127.0.0.1, '
            'or close the listener with "off"',
        )
    # A users file without users does not mean anonymous access: users will be added.
    allows_anonymous = not has_mqtt_credentials and passwords is None
    if auth.allow_anonymous is not None:
        allows_anonymous = auth.allow_anonymous
    authenticator = Authenticator(
        allows_anonymous, passwords, jwts, rules, auth.certificate_user, attempts
    )
    needs_credentials = tokens is not None or passwords is not None or jwts is not None
    admin_authenticator = AdminAuthenticator(
        AdminCredentials(passwords, jwts, tokens, attempts) if needs_credentials else None
    )
    return authenticator, admin_authenticator

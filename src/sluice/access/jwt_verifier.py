"""JWTs of an external issuer (RFC 7519), as an MQTT password or as a Bearer token.

The type of the key determines the accepted signatures: a secret accepts only HS256, public keys
only RS256 and ES256. The algorithm in a token never selects the key, so a public key cannot be used
as a secret.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from sluice.access.identity import Role, looks_like_jwt
from sluice.access.settings import JwtSettings
from sluice.access.watched_file import WatchedFile

MIN_SECRET_BYTES: Final = 32  # RFC 7518 section 3.2
_SECRET_ALGORITHMS: Final = ["HS256"]
_PUBLIC_KEY_ALGORITHMS: Final = ["RS256", "ES256"]


@dataclass(frozen=True)
class JwtClaims:
    user: str
    role: Role | None
    client_id: str  # "": any
    expires_at: float


@dataclass(frozen=True)
class _VerificationKey:
    id: str
    key: Any
    algorithms: list[str]


class JwtVerifier:
    """Verify JWTs. Thread-safe. A key file that changes is read again."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings
        path = settings.secret_file or settings.key_file
        assert path is not None
        self._keys: WatchedFile[list[_VerificationKey]] = WatchedFile(
            Path(path), _read_secret if settings.secret_file is not None else _read_keys
        )

    def verify(self, text: str) -> JwtClaims | None:
        """Return the claims of a valid token, or None."""
        settings = self._settings
        if not looks_like_jwt(text):
            return None
        try:
            wanted_id = jwt.get_unverified_header(text).get("kid")
        except jwt.InvalidTokenError:
            return None
        for key in self._keys.current():
            if key.id and wanted_id and key.id != wanted_id:
                continue
            try:
                claims = jwt.decode(
                    text,
                    key.key,
                    algorithms=key.algorithms,
                    issuer=settings.issuer or None,
                    audience=settings.audience or None,
                    leeway=settings.leeway,
                    options={"require": ["exp"], "verify_aud": bool(settings.audience)},
                )
            except jwt.InvalidTokenError:
                continue
            except (TypeError, ValueError):  # the key's type does not match the signature
                continue
            return self._read_claims(claims)
        return None

    def _read_claims(self, claims: dict[str, Any]) -> JwtClaims | None:
        settings = self._settings
        user = claims.get(settings.user_claim)
        if not isinstance(user, str) or not user:
            return None
        role: Role | None = None
        role_name = claims.get(settings.role_claim)
        if isinstance(role_name, str):
            try:
                role = Role.parse(role_name)
            except ValueError:
                role = None  # a role of another system is no role here
        client_id = claims.get(settings.client_claim, "") if settings.client_claim else ""
        if not isinstance(client_id, str):
            return None
        return JwtClaims(user, role, client_id, float(claims["exp"]) + settings.leeway)


def _read_secret(text: str) -> list[_VerificationKey]:
    secret = text.strip().encode()
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the secret has fewer than {MIN_SECRET_BYTES} bytes: "
            "make one with `openssl rand -hex 32`"
        )
    return [_VerificationKey("", secret, _SECRET_ALGORITHMS)]


def _read_keys(text: str) -> list[_VerificationKey]:
    if text.lstrip().startswith("{"):
        try:
            listed = json.loads(text).get("keys", [])
            found = [_read_jwk(one) for one in listed]
        except (jwt.PyJWTError, ValueError, AttributeError, TypeError):
            raise ValueError("it is not a JWKS of RSA and P-256 keys") from None
        keys = [one for one in found if one is not None]
        if not keys:
            raise ValueError("it has no RSA or P-256 key for signatures")
        return keys
    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("it is neither a PEM public key nor a JWKS") from None
    return [_VerificationKey("", key, _PUBLIC_KEY_ALGORITHMS)]


def _read_jwk(jwk: dict[str, Any]) -> _VerificationKey | None:
    """Return a key of a set, or None if it is not for signatures that are verified here."""
    kind, curve = jwk.get("kty"), jwk.get("crv")
    algorithm = "RS256" if kind == "RSA" else "ES256" if kind == "EC" and curve == "P-256" else ""
    if not algorithm or jwk.get("use", "sig") != "sig" or jwk.get("alg", algorithm) != algorithm:
        return None
    return _VerificationKey(str(jwk.get("kid", "")), jwt.PyJWK(jwk, algorithm).key, [algorithm])

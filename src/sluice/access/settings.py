"""Settings of authentication: the tables `auth` and `webhooks` of the configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from sluice.config.setting_types import ConfigSection, Seconds, duration_between


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not a file that exists; make it first, or correct the path")
    return path


ExistingFile = Annotated[Path, AfterValidator(_existing_file)]


class JwtSettings(ConfigSection):
    """JWTs of an external issuer; accepted if one of the two key files is given."""

    # HS256: a secret of 32 bytes or more that the issuer knows too
    secret_file: ExistingFile | None = None
    key_file: ExistingFile | None = None  # RS256, ES256: public keys, as PEM or as a JWKS (JSON)
    issuer: str = ""  # if set, the required `iss`
    audience: str = ""  # if set, the required `aud`
    leeway: Annotated[Seconds, duration_between(0, 600)] = 30.0  # tolerated clock difference
    user_claim: str = "sub"
    role_claim: str = "role"  # viewer, operator or admin: for the admin APIs
    client_claim: str = ""  # if set: the only MQTT client id the token is valid for

    @model_validator(mode="after")
    def _check_single_key(self) -> JwtSettings:
        if self.secret_file is not None and self.key_file is not None:
            raise ValueError(
                "auth.jwt takes secret_file or key_file, not both: a token has one kind of signer"
            )
        return self

    @property
    def is_configured(self) -> bool:
        return self.secret_file is not None or self.key_file is not None


class AuthSettings(ConfigSection):
    allow_anonymous: bool | None = None  # None: on loopback only, and only without users
    users: ExistingFile | None = None  # created by `sluice user add`
    tokens: ExistingFile | None = None  # created by `sluice token add`
    # Access rules; without it, the role of a user decides.
    rules: ExistingFile | None = None
    # Use the name in a verified client certificate as the user.
    certificate_user: Literal["off", "cn", "san"] = "off"
    jwt: JwtSettings = JwtSettings()
